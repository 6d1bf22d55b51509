//! A host half and one guest, whose settings let it run programs.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use crate::host::{self, DEADLINE};
use crate::launch;

/// What lets everybody run everything.
pub const ALL: &str =
    "[[grant]]\nhost = \"plain\"\nroles = [\"status\", \"disks\", \"topology\", \"exec\"]\n";

/// Both of them; the agent ends when this is dropped.
pub struct Lab {
    pub host: host::Lab,
    agent: Option<Child>,
    /// What is done in a mount namespace of the agent's before it starts there.
    setup: Option<String>,
}

/// What this machine says of itself, as its agent reads it.
fn dmi() -> String {
    let uuid = std::fs::read_to_string("/sys/class/dmi/id/product_uuid").unwrap_or_default();
    let uuid = uuid.trim().to_lowercase();
    if uuid.is_empty() { "none".to_owned() } else { uuid }
}

impl Lab {
    /// With these grants.
    pub fn with(grants: &str) -> Self {
        Self::within(grants, None)
    }

    /// The same, whose agent is in a mount namespace of its own, in which this script was run.
    pub fn within(grants: &str, setup: Option<String>) -> Self {
        let rest = format!("dmi-uuid = '{}'\nunix-socket = '@web/control.sock'", dmi());
        let mut lab = Self { host: host::Lab::new().vm("web", 1, &rest), agent: None, setup };
        let folder = lab.host.path("web");
        std::fs::create_dir_all(&folder).unwrap();
        let more = format!("method = \"none\"\n[csi]\nenabled = false\n{grants}");
        std::fs::write(folder.join("agent.toml"), launch::settings_with(&folder, &more)).unwrap();
        lab.start_agent();
        lab.host.write();
        lab.host.again();
        lab.host.until_session("web", "connected");
        lab
    }

    pub fn new() -> Self {
        Self::with(ALL)
    }

    pub fn start_agent(&mut self) {
        let folder = self.host.path("web");
        let log = File::options().create(true).append(true).open(folder.join("log")).unwrap();
        let mut command = match &self.setup {
            None => launch::guestlet(),
            Some(setup) => launch::in_namespace(&format!("{setup}exec \"$@\"")),
        };
        command.arg("--settings").arg(folder.join("agent.toml")).arg("--verbose").stderr(log);
        self.agent = Some(command.spawn().unwrap());
    }

    pub fn kill_agent(&mut self) {
        let mut agent = self.agent.take().unwrap();
        agent.kill().unwrap();
        agent.wait().unwrap();
    }

    pub fn agent_log(&self) -> String {
        std::fs::read_to_string(self.host.path("web/log")).unwrap_or_default()
    }

    /// What `guestlet status` says in the guest.
    pub fn status(&self) -> String {
        let mut command = launch::guestlet();
        command.arg("status").arg("--settings").arg(self.host.path("web/agent.toml"));
        text(&command.output().unwrap())
    }

    /// The memory of the agent in KiB.
    pub fn agent_memory(&self) -> u64 {
        let pid = self.agent.as_ref().unwrap().id();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// `guestctl exec` with these options and this command.
    pub fn command(&self, options: &[&str], command: &[&str]) -> Command {
        self.host.ctl_command(&[&["exec"], options, &["web", "--"], command].concat())
    }

    pub fn exec(&self, options: &[&str], command: &[&str]) -> Output {
        self.command(options, command).stdin(Stdio::null()).output().unwrap()
    }

    /// The same with input.
    pub fn exec_with(&self, options: &[&str], command: &[&str], input: &[u8]) -> Output {
        let mut command = self.command(options, command);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut sink = child.stdin.take().unwrap();
        let input = input.to_vec();
        let writer = std::thread::spawn(move || drop(sink.write_all(&input)));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        output
    }

    /// What `guestctl ps` says.
    pub fn programs(&self) -> Vec<serde_json::Value> {
        serde_json::from_str(&self.host.words(&["ps", "web", "-o", "json"])).unwrap()
    }

    /// The process of the one program that there is, or that there soon is.
    pub fn program_process(&self) -> u64 {
        until("there is a program", || !self.programs().is_empty());
        self.programs()[0]["process_id"].as_u64().unwrap()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.host.path(name)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Some(agent) = &mut self.agent {
            drop(agent.kill());
            drop(agent.wait());
        }
        if std::thread::panicking() {
            eprintln!("agent: {}\nhost: {}", self.agent_log(), self.host.log());
        }
    }
}

/// What a program printed, which has to have ended well.
pub fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("{output:?}"))
}

pub fn until(what: &str, wanted: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !wanted() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// Whether there is this process, and it has not ended.
pub fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z') && !rest.starts_with('X'))
}
