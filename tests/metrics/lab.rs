//! A host half and guests, all this machine.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::host::{self, DEADLINE};
use crate::launch;
pub use crate::samples::{Sample, find, value};

/// Both; the agents end when this is dropped.
pub struct Lab {
    pub host: host::Lab,
    agents: BTreeMap<String, Child>,
}

/// What this machine says of itself, as its agents read it.
fn dmi() -> String {
    let uuid = std::fs::read_to_string("/sys/class/dmi/id/product_uuid").unwrap_or_default();
    let uuid = uuid.trim().to_lowercase();
    if uuid.is_empty() { "none".to_owned() } else { uuid }
}

impl Lab {
    /// With the guests `web` and `db`, whose settings have these lines beside the usual ones.
    pub fn with(settings: &str) -> Self {
        Self::made(settings, "", host::Lab::new())
    }

    pub fn new() -> Self {
        Self::with("")
    }

    /// The agents run in a mount namespace in which this was done before; `@` is the folder of the lab.
    pub fn made(settings: &str, mounts: &str, host: host::Lab) -> Self {
        let rest = |name: &str| format!("dmi-uuid = '{}'\nunix-socket = '@{name}/control.sock'", dmi());
        let host = host.vm("web", 1, &rest("web")).vm("db", 2, &rest("db"));
        let mut lab = Self { host, agents: BTreeMap::new() };
        for name in ["web", "db"] {
            let folder = lab.host.path(name);
            std::fs::create_dir_all(&folder).unwrap();
            let more = format!("method = \"none\"\n[csi]\nenabled = false\n{settings}");
            std::fs::write(folder.join("agent.toml"), launch::settings_with(&folder, &more)).unwrap();
            let log = File::create(folder.join("log")).unwrap();
            let mut command = if mounts.is_empty() {
                launch::guestlet()
            } else {
                let mounts = mounts.replace('@', lab.host.path("").to_str().unwrap().trim_end_matches('/'));
                let script = format!("{mounts}; exec \"$@\"");
                let mut command = Command::new("unshare");
                command.args(["--mount", "sh", "-ec", &script, "sh", launch::AGENT]);
                launch::without_the_machines(command)
            };
            command.arg("--settings").arg(folder.join("agent.toml")).arg("--verbose").stderr(log);
            lab.agents.insert(name.to_owned(), command.spawn().unwrap());
        }
        lab.host.write();
        lab.host.again();
        lab.host.until_session("web", "connected");
        lab.host.until_session("db", "connected");
        lab
    }

    /// Sends the agent of a guest a signal.
    pub fn signal(&self, name: &str, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.agent_id(name)).unwrap()), signal).unwrap();
    }

    /// The process of the agent of a guest.
    #[allow(dead_code, reason = "what measures it uses it")]
    pub fn agent_id(&self, name: &str) -> u32 {
        self.agents[name].id()
    }

    pub fn agent_log(&self, name: &str) -> String {
        std::fs::read_to_string(self.host.path(name).join("log")).unwrap_or_default()
    }

    /// The head and the body of what the host half answers to a client that accepts these.
    pub fn get(&self, path: &str, accept: &str) -> (String, String) {
        let mut stream = UnixStream::connect(self.host.path("run/metrics.sock")).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: guestlet\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_owned(), body.to_owned())
    }

    /// The samples of the page there, which has to be there.
    pub fn scrape(&self, path: &str) -> Vec<Sample> {
        let (head, body) = self.get(path, "text/plain");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}\n{body}");
        Sample::of_page(&body)
    }

    /// What `guestctl metrics` gives to programs.
    pub fn metrics(&self, name: &str) -> Vec<Sample> {
        let values: Vec<Value> =
            serde_json::from_str(&self.host.words(&["metrics", name, "-o", "json"])).unwrap();
        let sample = |value: &Value| Sample {
            name: value["name"].as_str().unwrap().to_owned(),
            labels: serde_json::from_value(value["labels"].clone()).unwrap(),
            value: value["value"].as_f64().unwrap(),
        };
        values.iter().map(sample).collect()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for agent in self.agents.values_mut() {
            drop(agent.kill());
            drop(agent.wait());
        }
        if std::thread::panicking() {
            eprintln!("agent: {}\nhost: {}", self.agent_log("web"), self.host.log());
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
