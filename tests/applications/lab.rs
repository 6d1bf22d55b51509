//! A small machine in namespaces of its own: a root in memory, `/data` and `/wal` on loop devices, and a real agent. Nothing of the
//! machine that runs the tests is mounted there, so nothing of it can be frozen.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use nix::unistd::{chdir, pivot_root};
use serde_json::{Value, json};

use crate::agent::{Client, PATIENCE};
use crate::namespace;

/// The user of the databases.
pub const USER: u32 = 5432;
/// The file systems of the small machine.
pub const FILE_SYSTEMS: u64 = 2;
/// Where the agent keeps receipts.
const KEPT: &str = "/var/lib/guestlet/receipts";

/// Runs the test that calls this again in new namespaces of mounts and processes; false in there, where the root is then that
/// of the small machine. `fill` copies into it what a test needs: it is called in the new root.
pub fn is_outside(fill: &str) -> bool {
    if let Some(folder) = namespace::inside() {
        enter(&folder, fill);
        return false;
    }
    namespace::run_inside(&["--mount", "--pid", "--fork", "--kill-child"], &[])
}

fn enter(folder: &Path, fill: &str) {
    let agent = crate::agent::launch::AGENT;
    namespace::run(&format!(
        "cd {}; mount -t tmpfs -o mode=755 lab .; cd .
         mkdir -p old proc sys dev run/db tmp bin data wal etc usr/bin srv
         chmod 1777 tmp
         bring() {{ for program; do
             ldd $program | grep -o '/[^ ]*' | while read file; do [ -e .$file ] || {{ mkdir -p .${{file%/*}}; cp $file .$file; }}; done
         done; }}
         tool() {{ for name; do cp $(command -v $name) usr/bin/; bring $(command -v $name); done; }}
         cp {agent} guestlet; bring {agent}
         tool busybox mount setpriv socat unshare
         for name in sh umount cat chmod chown cp id mkdir printf rm sleep sync tr true yes; do ln -s ../usr/bin/busybox bin/$name; done
         printf 'root:x:0:0::/:/bin/sh\\npostgres:x:{USER}:{USER}::/:/bin/sh\\nnobody:x:65534:65534::/:/bin/sh\\n' > etc/passwd
         printf 'root:x:0:\\npostgres:x:{USER}:\\nnogroup:x:65534:\\n' > etc/group
         {fill}
         for name in data wal; do
             truncate -s 192M disk-$name; mkfs.ext4 -q -m 0 disk-$name; mount -o loop disk-$name $name; chown {USER}:{USER} $name
         done
         mount -t proc proc proc; mount -t sysfs sys sys; mount -t devtmpfs dev dev; mount -t tmpfs -o mode=755 run run",
        folder.display()
    ));
    chdir(folder).unwrap();
    pivot_root(".", "old").unwrap();
    chdir("/").unwrap();
    umount2("/old", MntFlags::MNT_DETACH).unwrap();
    // Whatever went wrong, the machine's own disks must not be here.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    for mount in mounts.lines() {
        let device = mount.split(' ').nth(2).unwrap();
        assert!(device.starts_with("0:") || device.starts_with("7:"), "{mounts}");
    }
    assert_eq!(mounts.matches(" 7:").count() as u64, FILE_SYSTEMS, "{mounts}");
}

/// A program of the small machine, as this user.
pub fn as_user(uid: u32, program: &str) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", "/usr/bin:/bin").env("LC_ALL", "C").current_dir("/");
    // Before the group could be left no more.
    command.gid(uid).uid(uid);
    command
}

/// Runs a script in the small machine.
pub fn inside(script: &str) {
    let status = as_user(0, "/bin/sh").args(["-ec", script]).status().unwrap();
    assert!(status.success(), "{script}");
}

/// Waits for something.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}; the agent's log:\n{}", Agent::log());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process that ends with the test.
pub struct Process(pub Child);

impl Process {
    /// Starts a server, whose words go to the log of the small machine.
    pub fn server(command: &mut Command) -> Self {
        let log = std::fs::OpenOptions::new().create(true).append(true).open("/run/log").unwrap();
        let command = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        Self(command.spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The agent in the small machine.
pub struct Agent(Child);

impl Agent {
    /// Starts with these tables of settings after `[qga]`.
    pub fn start(settings: &str) -> Self {
        let text = format!(
            "runtime-dir = '/run'\nqemu-ga-files = false\n[control]\nlisten = 'unix:/run/control.sock'\n\
             [csi]\nenabled = false\n[trust]\nstate-dir = '/run/trust'\n[topology]\nkubeconfig = '/run/none'\n\
             [cloud]\nsocket = '/run/cloud.sock'\n[qga]\nmethod = 'unix-listen'\npath = '/run/qga.sock'\nstatedir = '/run'\n{settings}\n"
        );
        std::fs::write("/run/agent.toml", text).unwrap();
        Self::again()
    }

    /// Starts with the same settings.
    pub fn again() -> Self {
        for socket in ["/run/agent.sock", "/run/qga.sock", "/run/control.sock"] {
            let _ = std::fs::remove_file(socket);
        }
        let log = std::fs::OpenOptions::new().create(true).append(true).open("/run/log").unwrap();
        let child = as_user(0, "/guestlet")
            .args(["--settings", "/run/agent.toml"])
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let agent = Self(child);
        until("the agent answers", || UnixStream::connect("/run/agent.sock").is_ok());
        agent
    }

    pub fn log() -> String {
        std::fs::read_to_string("/run/log").unwrap_or_default()
    }

    pub fn client(&self) -> Client {
        assert!(Path::new("/proc").join(self.0.id().to_string()).exists(), "the agent has ended");
        Client::connect(Path::new("/run/qga.sock"))
    }

    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Freezes and thaws at once, and gives the receipt.
    pub fn freeze_and_thaw(&self) -> Value {
        let mut client = self.client();
        assert_eq!(client.call("guest-fsfreeze-freeze"), FILE_SYSTEMS, "{}", Self::log());
        thaw(&mut client)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        if std::thread::panicking() {
            let _ = std::io::stderr().write_all(Self::log().as_bytes());
        }
    }
}

/// Thaws, and gives the receipt.
pub fn thaw(client: &mut Client) -> Value {
    let before = kept();
    assert_eq!(client.call("guest-fsfreeze-thaw"), FILE_SYSTEMS, "{}", Agent::log());
    newest(&before)
}

/// The receipts that are kept.
pub fn kept() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(KEPT).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .collect()
}

/// The receipt that was not among these.
pub fn newest(before: &[PathBuf]) -> Value {
    let mut found = None;
    until("a receipt", || {
        found = kept().into_iter().find(|path| !before.contains(path));
        found.is_some()
    });
    let envelope: Value = serde_json::from_slice(&std::fs::read(found.unwrap()).unwrap()).unwrap();
    serde_json::from_str(envelope["document"].as_str().unwrap()).unwrap()
}

/// What a receipt says of the application with this instance.
#[track_caller]
pub fn told<'a>(receipt: &'a Value, instance: &str) -> &'a Value {
    let all = receipt["applications"].as_array().unwrap();
    all.iter().find(|one| one["instance"] == instance).unwrap_or_else(|| panic!("{instance}: {receipt:#}"))
}

/// The level and the problem of an application.
#[track_caller]
pub fn level<'a>(receipt: &'a Value, instance: &str) -> (&'a str, &'a str) {
    let one = told(receipt, instance);
    (one["level"].as_str().unwrap(), one["problem"].as_str().unwrap_or_default())
}

/// Evidence of an application.
#[track_caller]
pub fn evidence(receipt: &Value, instance: &str, name: &str) -> String {
    let one = told(receipt, instance);
    let pair = one["evidence"].as_array().unwrap().iter().find(|pair| pair[0] == name);
    pair.unwrap_or_else(|| panic!("{name}: {one:#}"))[1].as_str().unwrap().to_owned()
}

/// What the agent says to a command that it refuses.
pub fn refusal(answer: &Value) -> &str {
    answer["error"]["desc"].as_str().unwrap_or_else(|| panic!("{answer}"))
}

pub const FREEZE: &str = r#"{"execute":"guest-fsfreeze-freeze"}"#;
pub const THAW: &str = r#"{"execute":"guest-fsfreeze-thaw"}"#;

/// A freeze of what is mounted there.
pub fn freeze_list(mount_points: &[&str]) -> String {
    json!({"execute": "guest-fsfreeze-freeze-list", "arguments": {"mountpoints": mount_points}}).to_string()
}

/// Nothing is frozen: what is written gets to the disk.
pub fn nothing_is_frozen() {
    for place in ["/data", "/wal"] {
        let script = format!("echo data > {place}/written; sync {place}/written");
        let mut writer = Process(as_user(0, "/bin/sh").args(["-ec", &script]).spawn().unwrap());
        until("a writer ends", || writer.0.try_wait().unwrap().is_some());
    }
}

/// Whether a process of a program with this name runs.
pub fn runs(program: &str) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    // Those that have ended, and whom nobody has asked how, have no command line.
    processes
        .map(|entry| entry.path())
        .any(|path| read(path.join("comm")).trim() == program && !read(path.join("cmdline")).is_empty())
}

/// The processes whose command line has this word.
pub fn processes_with(word: &str) -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    ids.filter(|id| {
        let words = std::fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|one| one == word.as_bytes())
    })
    .collect()
}
