//! The host half, and an agent in namespaces of its own for each guest.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::process::{Child, Command};

use guestlet::sys::terminal::Size;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::guests::{FILES, GUESTS, Guest};
use crate::host::{self, DEADLINE};
use crate::launch;
use crate::screen::Screen;
use crate::terminal::Terminal;

/// What ends the output of a program that has ended.
const END: &str = "(that is all)";
/// A VM whose agent does not run.
const ABSENT: &str = "mail-1";

/// Both; the agents end when this is dropped.
pub struct Lab {
    pub host: host::Lab,
    agents: BTreeMap<&'static str, Child>,
}

impl Lab {
    pub fn new() -> Self {
        let uuid = std::fs::read_to_string("/sys/class/dmi/id/product_uuid")
            .unwrap_or_default()
            .trim()
            .to_lowercase();
        let uuid = if uuid.is_empty() { "none" } else { &uuid };
        let mut host = host::Lab::new().set("topology = { region = 'eu', zone = 'rack-3', host = 'host-3' }");
        for (number, guest) in (1..).zip(&GUESTS) {
            let rest = format!(
                "dmi-uuid = '{uuid}'\nunix-socket = '@{}/control.sock'\ncluster = 'shop'",
                guest.name
            );
            host = host.vm(guest.name, number, &rest);
        }
        host = host.vm(ABSENT, 99, "unix-socket = '@absent.sock'");
        host.write();
        let mut lab = Self { host, agents: BTreeMap::new() };
        for guest in &GUESTS {
            let directory = lab.host.path(guest.name);
            std::fs::create_dir_all(&directory).unwrap();
            let more = "method = \"none\"\n[csi]\nenabled = false\n";
            std::fs::write(directory.join("agent.toml"), launch::settings_with(&directory, more)).unwrap();
            guest.write(&directory);
            lab.start(guest.name);
            std::thread::spawn(move || guest.run(&directory));
        }
        lab.host.again();
        for guest in &GUESTS {
            lab.host.until_session(guest.name, "connected");
        }
        lab
    }

    /// Starts the agent of a guest.
    pub fn start(&mut self, name: &'static str) {
        let directory = self.host.path(name);
        let Guest { address, .. } = GUESTS.iter().find(|guest| guest.name == name).unwrap();
        let mut script = format!(
            "hostname {name}; ip link set lo up; ip link add eth0 type veth peer name peer0; ip link set peer0 up; \
             ip link set eth0 up; ip address add {address}/24 dev eth0\n"
        );
        for (file, place) in FILES {
            writeln!(script, "mount --bind {} {place}", directory.join(file).display()).unwrap();
        }
        let mut command = Command::new("unshare");
        command.args(["--mount", "--uts", "--net", "--propagation", "private", "sh", "-ec"]);
        command
            .arg(script + "exec \"$@\"")
            .args(["sh", launch::AGENT, "--settings"])
            .arg(directory.join("agent.toml"));
        let log = File::create(directory.join("log")).unwrap();
        let child = launch::without_the_machines(command).stderr(log).spawn().unwrap();
        if let Some(mut before) = self.agents.insert(name, child) {
            host::wait(&mut before);
        }
    }

    pub fn signal(&self, name: &str, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.agents[name].id()).unwrap()), signal).unwrap();
    }

    /// Runs a command where the agent of a guest runs.
    pub fn inside(&self, name: &str, script: &str) {
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(self.agents[name].id().to_string()).args(["--net", "sh", "-ec", script]);
        assert!(command.status().unwrap().success(), "{script}");
    }

    /// guestctl on a terminal with colours.
    pub fn screen(&self, arguments: &[&str], size: Size) -> Screen {
        Screen::of(with_colours(self.host.ctl_command(arguments)), size)
    }

    /// What guestctl shows on a terminal until it ends.
    pub fn run(&self, arguments: &[&str], rows: u16) -> Terminal {
        let size = Size { rows, columns: crate::COLUMNS };
        let ctl = self.host.ctl_command(arguments);
        let mut command = Command::new("sh");
        command
            .args(["-c", &format!("\"$@\"; echo '{END}'"), "sh"])
            .arg(ctl.get_program())
            .args(ctl.get_args());
        let screen = Screen::of(with_colours(command), size);
        screen.until(END);
        let seen = screen.seen();
        let shown = seen.replace(self.host.path("").to_str().unwrap(), "/etc/guestlet/");
        let mut terminal = Terminal::new(size);
        let said = arguments.join(" ");
        terminal.write(&format!("\x1b[1m# guestctl {said}\x1b[0m\n{}", shown.split(END).next().unwrap()));
        terminal.cut();
        terminal
    }
}

fn with_colours(mut command: Command) -> Command {
    command.env_remove("NO_COLOR").env_remove("GUESTLET_HOST_SOCKET").env("LC_ALL", "C.UTF-8");
    command
}

impl Drop for Lab {
    fn drop(&mut self) {
        for agent in self.agents.values_mut() {
            drop(agent.kill());
            drop(agent.wait());
        }
        if std::thread::panicking() {
            let log = |name| std::fs::read_to_string(self.host.path(name).join("log")).unwrap_or_default();
            eprintln!("agent: {}\nhost: {}", log("web-1"), self.host.log());
        }
    }
}

/// Waits until it is so.
pub fn until(what: &str, wanted: impl Fn() -> bool) {
    let end = std::time::Instant::now() + DEADLINE;
    while !wanted() {
        assert!(std::time::Instant::now() < end, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
