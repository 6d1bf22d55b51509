//! What people read and change of a guest: clock, processors, memory, network, users, passwords and keys. guestlet-host and
//! guestctl are real, and so are the services of the guest; its machine is a directory and a clock of the test's own.

mod accounts;
mod hardware;
mod trims;

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use guestlet::sys::calendar::Date;
use guestlet::sys::effects::{Effects, Trimmed};
use guestlet::sys::root::Root;
use serde_json::Value;

use crate::guest::{Door, Guest, Manner, info};
use crate::lab::{Lab, assert_fails, uuid};

const CPU: &str = "sys/devices/system/cpu";
const KEYS: &str = "home/me/.ssh/authorized_keys";

/// The clocks of the machine, and what becomes of its file systems that are trimmed.
#[derive(Debug, Default)]
struct Clocks {
    pub system: Mutex<Option<Duration>>,
    pub hardware: Mutex<Option<Date>>,
}

impl Effects for Clocks {
    fn set_clock(&self, time: Duration) -> std::io::Result<()> {
        *self.system.lock().unwrap() = Some(time);
        Ok(())
    }

    fn trim(&self, directory: &Path, minimum: u64) -> std::io::Result<Trimmed> {
        match directory.file_name().and_then(|name| name.to_str()) {
            Some("broken") => Err(nix::errno::Errno::EIO.into()),
            Some("old") => Err(nix::errno::Errno::EOPNOTSUPP.into()),
            _ => Ok(Trimmed { bytes: 1 << 20, minimum }),
        }
    }

    fn hardware_clock(&self, _: &Path) -> std::io::Result<Date> {
        self.hardware.lock().unwrap().ok_or_else(|| std::io::ErrorKind::NotFound.into())
    }

    fn set_hardware_clock(&self, _: &Path, date: Date) -> std::io::Result<()> {
        *self.hardware.lock().unwrap() = Some(date);
        Ok(())
    }
}

/// A host half, and the guest `a`.
struct Inside {
    pub lab: Lab,
    pub root: PathBuf,
    pub clocks: Arc<Clocks>,
    _guest: Guest,
}

impl Inside {
    pub fn new() -> Self {
        Self::with(Lab::new())
    }

    pub fn with(lab: Lab) -> Self {
        let lab = lab.guest("a", 1);
        let root = lab.path("inside");
        std::fs::create_dir(&root).unwrap();
        let mut said = info(&uuid(1), "boot-1");
        said.capabilities.push("machine".into());
        let guest = Guest::start(&lab.path("a.sock"), Door::Unix, Manner::Good, said);
        let clocks = Arc::new(Clocks::default());
        guest.machine().lock().laid_out = Some(guestlet::guest::Guest {
            root: Root::at(&root),
            effects: Arc::clone(&clocks) as Arc<dyn Effects>,
            ..guestlet::guest::Guest::default()
        });
        let inside = Self { lab: lab.start(), root, clocks, _guest: guest };
        inside.lab.until_session("a", "connected");
        inside
    }

    pub fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        let path = self.root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.root.join(path)).unwrap_or_default()
    }

    /// With the user `me`, whose home is there.
    pub fn with_user(self) -> Self {
        self.write("etc/passwd", "root:x:0:0::/root:/bin/sh\nme:x:54321:54322::/home/me:/bin/sh\n");
        std::fs::create_dir_all(self.root.join("home/me")).unwrap();
        chown(self.root.join("home/me"), Some(54_321), Some(54_322)).unwrap();
        self
    }

    /// With a chpasswd that does this in the machine's directory. Another process makes it one: what this one has open to be
    /// written, a child of another test could hold open, and then it cannot be run.
    pub fn chpasswd(&self, script: &str) {
        self.write("script", format!("#!/bin/sh\ncd '{}'\n{script}\n", self.root.display()));
        std::fs::create_dir_all(self.root.join("usr/sbin")).unwrap();
        let mut install = Command::new("install");
        install.args(["-m", "755"]).args([self.root.join("script"), self.root.join("usr/sbin/chpasswd")]);
        assert!(install.status().unwrap().success());
    }

    pub fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.lab.words(&[words, &["-o", "json"]].concat())).unwrap()
    }

    #[track_caller]
    pub fn fails(&self, words: &[&str], said: &str) {
        assert_fails(&self.lab.ctl(words), 1, said);
    }

    pub fn with_input(&self, words: &[&str], input: &[u8]) -> Output {
        let mut command = self.lab.ctl_command(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // One that has failed reads no more.
        drop(child.stdin.take().unwrap().write_all(input));
        child.wait_with_output().unwrap()
    }
}

#[test]
fn what_reads_needs_one_role_of_this_host_and_what_changes_others() {
    let rules = "[[access]]\nusers = ['4000001']\nroles = ['read']\n[[access]]\nusers = ['4000002']\nroles = ['accounts']\n\
                 [[access]]\nusers = ['4000003']\nroles = ['power']";
    let inside = Inside::with(Lab::new().set(rules)).with_user();
    inside.write(&format!("{CPU}/cpu1/online"), "1\n");
    let ask = |uid: u32, words: &[&str]| inside.lab.ctl_as(uid, words).stdin(Stdio::null()).output().unwrap();
    for words in [&["time", "a"][..], &["cpus", "a"], &["memory", "a"], &["network", "a"], &["users", "a"]] {
        let output = ask(4_000_001, words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        assert_fails(&ask(4_000_003, words), 1, &format!("verbs = [\"{}\"], vms = [\"a\"]", words[0]));
    }
    let key = inside.lab.path("key");
    std::fs::write(&key, "ssh-rsa A\n").unwrap();
    let key = key.to_str().unwrap();
    for (words, verb) in [
        (&["time", "a", "--set", "hardware"][..], "time --set"),
        (&["cpus", "a", "--offline", "1"], "cpus --online"),
        (&["memory", "a", "--offline", "1"], "memory --online"),
        (&["keys", "ls", "a", "me"], "keys ls"),
        (&["keys", "add", "a", "me", key], "keys add"),
        (&["keys", "rm", "a", "me", key], "keys rm"),
    ] {
        assert_fails(&ask(4_000_001, words), 1, &format!("verbs = [\"{verb}\"], vms = [\"a\"]"));
    }
    let mut command = inside.lab.ctl_as(4_000_001, &["passwd", "a", "me"]);
    command.stdin(Stdio::from(File::open(key).unwrap()));
    assert_fails(&command.output().unwrap(), 1, "verbs = [\"passwd\"], vms = [\"a\"]");
    assert!(!inside.root.join("home/me/.ssh").exists());
    assert_eq!(inside.read(&format!("{CPU}/cpu1/online")), "1\n");
    assert!(ask(4_000_002, &["keys", "add", "a", "me", key]).status.success());
    assert_eq!(inside.read(KEYS), "ssh-rsa A\n");
    assert_fails(&ask(4_000_002, &["cpus", "a", "--offline", "1"]), 1, "verbs = [\"cpus --online\"]");
    assert!(ask(4_000_003, &["cpus", "a", "--offline", "1"]).status.success());
    assert_eq!(inside.read(&format!("{CPU}/cpu1/online")), "0");
}
