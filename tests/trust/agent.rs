//! A running agent whose control channel is a unix socket, and its keys.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::time::{Duration, Instant};

use crate::host::Lab;
use crate::launch;

/// What only a fault reaches.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// The agent. Its folder stays when it ends, until this is dropped.
pub struct Agent {
    folder: PathBuf,
    child: Option<Child>,
    token: bool,
}

impl Agent {
    /// One in the folder of this name in the lab, where the lab dials it as `<name>/control.sock`; not started.
    pub fn new(lab: &Lab, name: &str) -> Self {
        let folder = lab.path(name);
        std::fs::create_dir_all(&folder).unwrap();
        let agent = Self { folder, child: None, token: false };
        let settings = launch::settings_with(agent.path(), "method = \"none\"\n[csi]\nenabled = false");
        std::fs::write(agent.file("agent.toml"), settings).unwrap();
        agent
    }

    pub fn path(&self) -> &Path {
        &self.folder
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.file("control.sock")
    }

    /// Starts it, and waits until it listens.
    pub fn start(&mut self) -> &mut Self {
        let log = std::fs::File::options().create(true).append(true).open(self.file("log")).unwrap();
        let mut command = launch::guestlet();
        command.arg("--settings").arg(self.file("agent.toml")).arg("--verbose").stderr(log);
        command.env_remove("CREDENTIALS_DIRECTORY");
        if self.token {
            command.env("CREDENTIALS_DIRECTORY", self.file("credentials"));
        }
        self.child = Some(command.spawn().unwrap());
        until("the agent listens", || UnixStream::connect(self.socket()).is_ok());
        self
    }

    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub fn restart(&mut self) {
        self.stop();
        self.start();
    }

    /// Writes a file of keys, as whoever sets the guest up does: whole, or not at all.
    pub fn give(&self, name: &str, text: &str) {
        let hosts = self.file("hosts.d");
        std::fs::create_dir_all(&hosts).unwrap();
        let beside = hosts.join(format!("{name}.new"));
        std::fs::write(&beside, text).unwrap();
        std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(0o644)).unwrap();
        std::fs::rename(beside, hosts.join(name)).unwrap();
    }

    /// Gives it the key of a host half, as guestctl prints it.
    pub fn know(&self, lab: &Lab) {
        self.give("host.pub", &(bootstrap(lab, &[])["key_line"].as_str().unwrap().to_owned() + "\n"));
    }

    /// One that was given the key of the lab's host half, and has a session with it.
    pub fn keyed(lab: &Lab, name: &str) -> Self {
        let mut agent = Self::new(lab, name);
        agent.know(lab);
        agent.start();
        until_speaks(lab, name, "keyed");
        agent
    }

    /// Gives it a token, from its next start on.
    pub fn token(&mut self, token: &str) {
        std::fs::create_dir_all(self.file("credentials")).unwrap();
        std::fs::write(self.file("credentials/guestlet.enroll"), token).unwrap();
        self.token = true;
    }

    /// `guestlet trust …` in the guest.
    pub fn trust(&self, words: &[&str]) -> Output {
        let mut command = launch::guestlet();
        command.arg("trust").args(words).arg("--settings").arg(self.file("agent.toml"));
        command.output().unwrap()
    }

    /// What `guestlet trust ls -o json` says.
    pub fn keys(&self) -> serde_json::Value {
        let output = self.trust(&["ls", "-o", "json"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The fingerprint of its own key.
    pub fn own(&self) -> String {
        self.keys()["own"].as_str().unwrap_or_default().to_owned()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.file("log")).unwrap_or_default()
    }

    /// Waits until the log says so.
    pub fn until_it_says(&self, words: &str) {
        let end = Instant::now() + DEADLINE;
        while !self.log().contains(words) {
            assert!(Instant::now() < end, "it never says {words:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// The DMI UUID that an agent on this machine reads, as settings have it.
pub fn dmi() -> String {
    let found = std::fs::read_to_string("/sys/class/dmi/id/product_uuid").unwrap_or_default();
    match found.trim() {
        "" => "none".to_owned(),
        uuid => uuid.to_ascii_lowercase(),
    }
}

/// A host half whose VMs have agents of these names.
pub fn lab(names: &[&str]) -> Lab {
    listed(Lab::new(), names)
}

/// The same of a lab that has settings already.
pub fn listed(mut lab: Lab, names: &[&str]) -> Lab {
    for (number, name) in (1..).zip(names) {
        let mut rest = String::new();
        writeln!(rest, "dmi-uuid = '{}'\nunix-socket = '@{name}/control.sock'", dmi()).unwrap();
        lab = lab.vm(name, number, &rest);
    }
    lab
}

/// The line that guests need to know this host half, from `guestctl trust bootstrap`, without any role.
pub fn key_line(lab: &Lab) -> String {
    bootstrap(lab, &[])["key_line"].as_str().unwrap().replace(" role=volumes", "") + "\n"
}

/// What `guestctl trust bootstrap` says of the first VM.
pub fn bootstrap(lab: &Lab, more: &[&str]) -> serde_json::Value {
    let list = keys(lab);
    let name = list["guests"][0]["name"].as_str().unwrap().to_owned();
    let mut words = vec!["trust", "bootstrap", &name, "-o", "json"];
    words.extend(more);
    serde_json::from_str(&lab.words(&words)).unwrap()
}

/// What `guestctl trust ls` says.
pub fn keys(lab: &Lab) -> serde_json::Value {
    serde_json::from_str(&lab.words(&["trust", "ls", "-o", "json"])).unwrap()
}

/// What `guestctl trust show` says of a VM.
pub fn key(lab: &Lab, name: &str) -> serde_json::Value {
    serde_json::from_str(&lab.words(&["trust", "show", name, "-o", "json"])).unwrap()
}

/// Waits until the session of a VM is open, and speaks so.
pub fn until_speaks(lab: &Lab, name: &str, how: &str) {
    lab.until(&format!("{name} speaks {how}"), || key(lab, name)["session"] == how);
}

/// Waits until the VM's session is refused, and returns why.
pub fn until_refused(lab: &Lab, name: &str) -> String {
    let vm = lab.until_session(name, "refused");
    vm["reason"].as_str().unwrap().to_owned()
}

pub fn until(what: &str, wanted: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !wanted() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
