//! A host half and two guests, both this machine, whose settings let files be copied.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use crate::host::{self, DEADLINE};
use crate::launch;

/// What lets everybody read and write everything.
pub const ALL: &str =
    "[[grant]]\nhost = \"plain\"\nroles = [\"status\", \"disks\", \"topology\", \"files-write\"]\n";

/// Both of them; the agent ends when this is dropped.
pub struct Lab {
    pub host: host::Lab,
    agents: Vec<Child>,
    /// What is done in a mount namespace of the agent's own before it starts.
    mounts: Option<String>,
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
        Self::with_mounts(grants, None)
    }

    /// The same, where the agent has mounts of its own; `@` is the folder of this lab.
    pub fn with_mounts(grants: &str, mounts: Option<&str>) -> Self {
        let mounts = mounts.map(str::to_owned);
        let rest = format!("dmi-uuid = '{}'\nunix-socket = '@web/control.sock'", dmi());
        let mut lab = Self {
            host: host::Lab::new().vm("web", 1, &rest).vm("db", 2, &rest.replace("web", "db")),
            agents: Vec::new(),
            mounts,
        };
        let more = format!("method = \"none\"\n[csi]\nenabled = false\n{grants}");
        for name in ["web", "db"] {
            let folder = lab.host.path(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("agent.toml"), launch::settings_with(&folder, &more)).unwrap();
        }
        lab.start_agent();
        lab.host.write();
        lab.host.again();
        lab.host.until_session("web", "connected");
        lab.host.until_session("db", "connected");
        lab
    }

    pub fn new() -> Self {
        Self::with(ALL)
    }

    pub fn start_agent(&mut self) {
        for name in ["web", "db"] {
            let folder = self.host.path(name);
            let log = File::options().create(true).append(true).open(folder.join("log")).unwrap();
            let mut command = match &self.mounts {
                None => launch::guestlet(),
                Some(mounts) => {
                    let mounts = mounts.replace('@', self.host.path("").to_str().unwrap());
                    let script = format!("{mounts}; exec \"$@\"");
                    let mut command = Command::new("unshare");
                    command.args(["--mount", "sh", "-ec", &script, "sh", launch::AGENT]);
                    launch::without_the_machines(command)
                }
            };
            command.arg("--settings").arg(folder.join("agent.toml")).arg("--verbose").stderr(log);
            self.agents.push(command.spawn().unwrap());
        }
    }

    pub fn kill_agent(&mut self) {
        for mut agent in self.agents.drain(..) {
            agent.kill().unwrap();
            agent.wait().unwrap();
        }
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
        let pid = self.agents[0].id();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// `guestctl cp` with these options; `@` is the folder of this lab.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let folder = self.host.path("");
        let folder = folder.to_str().unwrap();
        let arguments: Vec<_> = arguments.iter().map(|one| one.replace('@', folder)).collect();
        let words: Vec<_> = ["cp"].into_iter().chain(arguments.iter().map(String::as_str)).collect();
        let mut command = self.host.ctl_command(&words);
        command.stdin(Stdio::null()).env("XDG_STATE_HOME", self.host.path("state"));
        command
    }

    pub fn cp(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// The same, which has to succeed, and say nothing.
    pub fn copies(&self, arguments: &[&str]) {
        let output = self.cp(arguments);
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {output:?}");
    }

    /// The same, which has to fail so; what it says.
    pub fn fails(&self, arguments: &[&str], with: i32) -> String {
        let output = self.cp(arguments);
        assert_eq!(code(&output), with, "{arguments:?}: {output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.host.path(name)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for agent in &mut self.agents {
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

/// Bytes whose place can be told.
pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut all = Vec::with_capacity(length + 8);
    while all.len() < length {
        state = state.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23) ^ 0x5851_F42D;
        all.extend(state.to_le_bytes());
    }
    all.truncate(length);
    all
}
