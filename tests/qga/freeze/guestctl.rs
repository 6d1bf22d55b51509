//! The same freezes, asked for by people on the host: `guestctl` and `guestlet-host` are in the small machine as well, and dial
//! its agent on a unix socket.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::lab::{Agent, FILE_SYSTEMS, Writer, inside, is_outside, nothing_is_frozen};
use crate::agent::PATIENCE;

/// guestlet-host, which knows the agent as the VM `a`.
pub struct Host(Child);

impl Host {
    pub fn start() -> Self {
        let dmi = std::fs::read_to_string("/sys/class/dmi/id/product_uuid").unwrap_or_default();
        let dmi = Some(dmi.trim().to_lowercase()).filter(|dmi| !dmi.is_empty());
        let settings = format!(
            "socket = '/run/host/api.sock'\nvolumes-dir = '/run/host/volumes'\ntrust.state-dir = '/run/host/trust'\n\
             [[vm]]\nname = 'a'\nuuid = '6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c01'\ndmi-uuid = '{}'\n\
             unix-socket = '/run/control.sock'\n",
            dmi.as_deref().unwrap_or("none")
        );
        std::fs::create_dir_all("/run/host").unwrap();
        std::fs::write("/run/host/host.toml", settings).unwrap();
        let host = Self(Self::begin());
        until("there is a session", || session() == "connected");
        host
    }

    fn begin() -> Child {
        let log = std::fs::File::options().create(true).append(true).open("/run/host.log").unwrap();
        let mut command = Command::new("/guestlet-host");
        command.args(["--config", "/run/host/host.toml", "--verbose"]).env_remove("NOTIFY_SOCKET");
        command.stdin(Stdio::null()).stderr(log).spawn().unwrap()
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn session() -> String {
    let output = ctl(&["info", "a", "-o", "json"]);
    let vm: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    vm["session"].as_str().unwrap_or_default().to_owned()
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new("/guestctl");
    command.args(["--socket", "/run/host/api.sock"]).args(words).env_remove("GUESTLET_HOST_SOCKET");
    command.env("PATH", "/bin").stdin(Stdio::null());
    command
}

pub fn ctl(words: &[&str]) -> Output {
    command(words).output().unwrap()
}

/// What guestctl says, which must succeed.
#[track_caller]
pub fn said(words: &[&str]) -> String {
    let output = ctl(words);
    assert!(output.status.success(), "{words:?}: {output:?} {}", Agent::log());
    String::from_utf8(output.stdout).unwrap()
}

/// The code with which guestctl fails, and what it says then.
#[track_caller]
pub fn fails(words: &[&str]) -> (i32, String) {
    let output = ctl(words);
    assert!(!output.status.success(), "{words:?}: {output:?}");
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

pub fn until(what: &str, wanted: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !wanted() {
        let log = std::fs::read_to_string("/run/host.log").unwrap_or_default();
        assert!(Instant::now() < end, "never: {what}\n{log}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn standing() -> Value {
    serde_json::from_str(&said(&["freeze", "a", "--status", "-o", "json"])).unwrap()
}

#[test]
fn people_on_the_host_freeze_thaw_and_trim() {
    if is_outside() {
        return;
    }
    let agent = Agent::start("");
    let _host = Host::start();
    assert_eq!(said(&["freeze", "a", "--status"]), "nothing is frozen\n");
    let frozen: Value = serde_json::from_str(&said(&["freeze", "a", "-o", "json"])).unwrap();
    assert_eq!(frozen["mount_points"].as_array().unwrap().len() as u64, FILE_SYSTEMS, "{frozen}");
    let left = frozen["seconds_left"].as_u64().unwrap();
    assert!((100..=120).contains(&left), "{frozen}");
    assert!(Writer::to("/a").is_blocked());
    let now = standing();
    assert_eq!((&now["frozen"], &now["stage"]), (&true.into(), &"frozen".into()));
    assert!(now["holder"].as_str().unwrap().starts_with("the host half for uid:0"), "{now}");
    // What may not be done meanwhile is refused, in both languages, and what is not known is an error.
    for words in [&["fs", "a"][..], &["trim", "a"], &["freeze", "a"], &["shutdown", "a"]] {
        let (code, why) = fails(words);
        assert!(
            code == 1 && why.contains("file systems are frozen: the host half for uid:0"),
            "{words:?}: {why}"
        );
    }
    let (_, why) = fails(&["qga", "a", r#"{"execute":"guest-get-host-name"}"#]);
    assert!(why.contains("CommandNotFound: Command guest-get-host-name has been disabled"), "{why}");
    let mut client = agent.client();
    assert_eq!(client.call("guest-fsfreeze-status"), "frozen", "it is the same freeze for QGA clients");
    let (_, why) = fails(&["thaw", "a", "--mount", "/a"]);
    assert!(why.contains("other file systems are frozen"), "{why}");
    assert!(said(&["thaw", "a"]).starts_with(&format!("thawed: {FILE_SYSTEMS} file systems\nreceipt ")));
    nothing_is_frozen();

    // Some of them.
    let words = said(&["freeze", "a", "--mount", "/b", "--mount", "/inner"]);
    assert!(words.starts_with("frozen: /") && words.contains("the guest thaws by itself after 1"), "{words}");
    Writer::to("/a").finishes();
    assert!(Writer::to("/b").is_blocked());
    let thaw = ["thaw", "a", "--mount", "/inner", "--mount", "/b"];
    assert!(said(&thaw).starts_with("thawed: 2 file systems\nreceipt "));
    let (_, why) = fails(&["freeze", "a", "--mount", "/nowhere"]);
    assert!(why.contains("\"/nowhere\" is not a mount point"), "{why}");

    let list: Value = serde_json::from_str(&said(&["fs", "a", "-o", "json"])).unwrap();
    let mounts: Vec<_> =
        list.as_array().unwrap().iter().map(|one| one["mount_point"].as_str().unwrap()).collect();
    assert!(mounts.contains(&"/a") && mounts.contains(&"/b") && mounts.contains(&"/inner"), "{mounts:?}");
    let (code, why) = fails(&["trim", "a", "--mount", "/nowhere"]);
    assert!(code == 1 && why.contains("not trimmed: /nowhere"), "{why}");
    assert!(said(&["trim", "a", "--mount", "/a"]).contains("/a "));
}

#[test]
fn a_thaw_that_is_late_is_an_error_whoever_asks() {
    if is_outside() {
        return;
    }
    let _agent = Agent::start("[qga.freeze]\ndeadline = 3");
    let _host = Host::start();
    said(&["freeze", "a"]);
    until("the guest has thawed by itself", || standing()["frozen"] == false);
    assert!(standing()["spoiled"].as_str().unwrap().contains("ended by itself"), "{}", standing());
    let (code, why) = fails(&["thaw", "a"]);
    assert!(code == 1 && why.contains("the snapshot is not consistent"), "{why}");
    assert_eq!(said(&["thaw", "a"]), "thawed: 0 file systems\n", "it is said once");

    // Around a command it is said whatever that says.
    let (code, why) = fails(&["freeze", "a", "--", "sleep", "5"]);
    assert!(code == 1 && why.contains("the snapshot is not consistent"), "{why}");
    assert!(why.contains("guestctl: frozen: ") && why.contains("thaws by itself after "), "{why}");
    let (code, why) = fails(&["freeze", "a", "--", "sh", "-c", "sleep 5; exit 7"]);
    assert!(code == 7 && why.contains("warning: the freeze ended by itself"), "{why}");
    nothing_is_frozen();
}

#[test]
fn a_command_runs_while_file_systems_are_frozen_and_they_are_thawed_however_it_ends() {
    if is_outside() {
        return;
    }
    let _agent = Agent::start("[qga.freeze]\ndeadline = 30");
    let mut host = Host::start();
    let during = "guestctl --socket /run/host/api.sock freeze a --status; echo seen";
    inside("ln -s /guestctl /bin/guestctl");
    let words = said(&["freeze", "a", "--", "sh", "-c", during]);
    assert!(words.starts_with("frozen, for the host half for uid:0") && words.ends_with("seen\n"), "{words}");
    nothing_is_frozen();

    for (command, code) in [
        (&["sh", "-c", "exit 3"][..], 3),
        (&["sh", "-c", "kill -9 $$"], 137),
        (&["nothing"], 127),
        (&["/run"], 126),
    ] {
        let (found, why) = fails(&[&["freeze", "a", "--"], command].concat());
        assert_eq!(found, code, "{command:?}: {why}");
        assert_eq!(standing()["frozen"], false, "{command:?}");
    }
    // Without a freeze it does not run.
    let (_, why) = fails(&["freeze", "a", "--mount", "/nowhere", "--", "touch", "/run/ran"]);
    assert!(why.contains("is not a mount point"), "{why}");
    assert!(!std::path::Path::new("/run/ran").exists());

    // Signals: the command gets them, too, and the file systems are thawed.
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let mut child =
            command(&["freeze", "a", "--", "sleep", "1000"]).stderr(Stdio::null()).spawn().unwrap();
        until("it is frozen", || standing()["frozen"] == true);
        kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert_eq!(standing()["frozen"], false, "{signal}");
        assert!(!running("sleep\x001000"), "{signal}: the command is left behind");
    }

    // Somebody else thaws: nobody takes the snapshot for consistent.
    let (code, why) =
        fails(&["freeze", "a", "--", "guestctl", "--socket", "/run/host/api.sock", "thaw", "a"]);
    assert!(code == 1 && why.contains("already thawed by somebody else"), "{why}");

    // guestlet-host is killed and started again meanwhile: the thaw gets through all the same.
    let mut child = command(&["freeze", "a", "--", "sleep", "3"]).stderr(Stdio::piped()).spawn().unwrap();
    until("it is frozen", || standing()["stage"] == "frozen");
    host.kill();
    std::thread::sleep(Duration::from_secs(4));
    assert!(child.try_wait().unwrap().is_none(), "it tries on");
    host.0 = Host::begin();
    let ended = child.wait().unwrap();
    let why = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
    assert!(ended.success(), "{why}");
    nothing_is_frozen();

    // guestctl is killed: the deadline ends the freeze.
    until("there is a session", || session() == "connected");
    let mut child = command(&["freeze", "a", "--", "sleep", "2"]).stderr(Stdio::null()).spawn().unwrap();
    until("it is frozen", || standing()["stage"] == "frozen");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(standing()["frozen"], true);
    let left = standing()["seconds_left"].as_u64().unwrap();
    assert!(left <= 30, "{left}");
    said(&["thaw", "a"]);
    nothing_is_frozen();
}

/// Whether a process has such a command line.
fn running(words: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes.filter(|entry| entry.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok())).any(
        |entry| {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(words)
        },
    )
}

#[test]
fn no_program_is_started_while_file_systems_are_frozen_and_those_that_run_can_be_ended() {
    if is_outside() {
        return;
    }
    let _agent = Agent::start("[[grant]]\nhost = 'plain'\nprofile = 'qemu-ga'");
    let _host = Host::start();
    std::fs::create_dir_all("/etc").unwrap();
    std::fs::write("/etc/passwd", "root:x:0:0:root:/:/bin/sh\n").unwrap();
    let exec = &["exec", "a", "--", "/bin/sh", "-c", "echo ran > /run/ran"][..];
    said(exec);
    std::fs::remove_file("/run/ran").unwrap();
    let id = said(&["exec", "-d", "a", "--", "/bin/sleep", "1000"]);
    said(&["freeze", "a"]);
    let (code, why) = fails(exec);
    let words = "no program can be started while file systems are frozen: the host half for uid:0";
    assert!(code == 125 && why.contains(words), "{code}: {why}");
    let list = said(&["ps", "a"]);
    assert!(list.contains(id.trim()) && list.contains("running"), "{list}");
    said(&["kill", "a", id.trim(), "--signal", "KILL"]);
    until("it has ended", || said(&["ps", "a"]).contains("signal 9"));
    said(&["thaw", "a"]);
    assert!(!std::path::Path::new("/run/ran").exists());
    said(exec);
    assert!(std::path::Path::new("/run/ran").exists());
}
