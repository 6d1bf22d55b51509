//! A small machine in namespaces of its own: a root in memory, and file systems on loop devices, on each other. Nothing
//! of the machine that runs the tests is mounted there, so nothing of it can be frozen.

use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::mount::{MntFlags, umount2};
use nix::unistd::{chdir, pivot_root};
use serde_json::Value;

use crate::agent::{Client, PATIENCE};
use crate::namespace;

/// Runs the test that calls this again in new namespaces of mounts and processes; false in there, where the root is then that
/// of the small machine.
pub fn is_outside() -> bool {
    if let Some(folder) = namespace::inside() {
        enter(&folder);
        return false;
    }
    namespace::run_inside(&["--mount", "--pid", "--fork", "--kill-child"], &[])
}

/// `/a` ext4, `/b` xfs, `/inner` ext4 in a file of `/a`, `/bind` a folder of `/a`, `/ovl` an overlay that writes to `/b`,
/// and `/last` ext4 in a file of the overlay.
fn enter(folder: &Path) {
    let agent = crate::agent::launch::AGENT;
    let (host, ctl) = (crate::host::HOST, env!("CARGO_BIN_EXE_guestctl"));
    run(&format!(
        "cd {}; mount -t tmpfs lab .; cd .
         mkdir old proc sys dev run tmp bin a b inner bind ovl last lower
         cp {agent} guestlet; cp {host} guestlet-host; cp {ctl} guestctl; cp $(command -v busybox) bin/busybox
         for program in sh mount umount touch sleep sync cat dd; do ln -s busybox bin/$program; done
         for program in {agent} {host} {ctl}; do ldd $program; done | grep -o '/[^ ]*' | while read file; do mkdir -p .${{file%/*}}; cp $file .$file; done
         truncate -s 64M disk-a; mkfs.ext4 -q disk-a; truncate -s 320M disk-b; mkfs.xfs -q disk-b
         mount -o loop disk-a a; mount -o loop disk-b b; mkdir a/folder b/upper b/work
         truncate -s 16M a/disk; mkfs.ext4 -q a/disk; mount -o loop a/disk inner
         truncate -s 16M disk-last; mkfs.ext4 -q disk-last
         mount --bind a/folder bind; mount -t proc proc proc; mount -t sysfs sys sys; mount -t devtmpfs dev dev",
        folder.display()
    ));
    chdir(folder).unwrap();
    pivot_root(".", "old").unwrap();
    chdir("/").unwrap();
    umount2("/old", MntFlags::MNT_DETACH).unwrap();
    // Of a loop device that is free busybox does not make sure that nobody takes it before it does.
    inside(
        "mount -t overlay overlay -o lowerdir=/lower,upperdir=/b/upper,workdir=/b/work /ovl
         cat disk-last > /ovl/disk; tried=0
         until mount -o loop /ovl/disk /last; do tried=$((tried + 1)); [ $tried -lt 20 ]; sleep 1; done",
    );
    // Whatever went wrong, the machine's own disks must not be here.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    for mount in mounts.lines() {
        let device = mount.split(' ').nth(2).unwrap();
        assert!(device.starts_with("0:") || device.starts_with("7:"), "{mounts}");
    }
    assert_eq!(mounts.matches(" 7:").count(), 5, "{mounts}");
}

fn run(script: &str) {
    let status = Command::new("sh").args(["-ec", script]).status().unwrap();
    assert!(status.success(), "{script}");
}

/// Runs a script in the small machine.
pub fn inside(script: &str) {
    let status = Command::new("/bin/sh").args(["-ec", script]).env("PATH", "/bin").status().unwrap();
    assert!(status.success(), "{script}");
}

/// The places that are written to.
pub const PLACES: [&str; 5] = ["/a", "/b", "/inner", "/ovl", "/last"];
/// The file systems of the small machine, in the order in which they have to be frozen.
pub const FILE_SYSTEMS: u64 = 4;

/// A program that writes a file and ends.
pub struct Writer(Child);

impl Writer {
    pub fn to(place: &str) -> Self {
        let script = format!("echo data > {place}/written; sync {place}/written");
        Self(Command::new("/bin/sh").args(["-c", &script]).env("PATH", "/bin").spawn().unwrap())
    }

    /// It sleeps because what it writes to is frozen.
    pub fn is_blocked(&mut self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if self.0.try_wait().unwrap().is_some() {
                return false;
            }
            // Asleep, and not to be woken by signals.
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap_or_default();
            if stat.contains(") D ") {
                // Not for the time that a disk takes.
                std::thread::sleep(Duration::from_millis(200));
                return self.0.try_wait().unwrap().is_none();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("the writer neither ends nor waits");
    }

    pub fn finishes(self) {
        assert!(self.finishes_before(Instant::now() + PATIENCE), "a writer is still blocked");
    }

    pub fn finishes_before(mut self, deadline: Instant) -> bool {
        while self.0.try_wait().unwrap().is_none() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }
}

/// Something is still frozen, or nothing is.
pub fn nothing_is_frozen() {
    let writers: Vec<_> = PLACES.iter().map(|place| Writer::to(place)).collect();
    writers.into_iter().for_each(Writer::finishes);
}

/// What is not on a disk yet, so that a freeze has something to do.
pub fn make_dirty() {
    inside(
        "for place in /a /b /inner /last; do dd if=/dev/zero of=$place/dirty bs=64k count=16 2> /dev/null; done",
    );
}

/// The agent in the small machine.
pub struct Agent {
    pub child: Child,
}

impl Agent {
    /// Starts with these settings for `[qga]`.
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
        // A process that the killed one was about to start may hold its sockets open for a moment.
        for socket in ["/run/agent.sock", "/run/qga.sock", "/run/control.sock"] {
            let _ = std::fs::remove_file(socket);
        }
        let agent = Self::begin();
        let deadline = Instant::now() + PATIENCE;
        while UnixStream::connect("/run/agent.sock").is_err() {
            assert!(Instant::now() < deadline, "the agent does not answer: {}", Self::log());
            std::thread::sleep(Duration::from_millis(2));
        }
        agent
    }

    /// Starts with the same settings; it may not answer yet.
    pub fn begin() -> Self {
        Self::run("exec /guestlet --settings /run/agent.toml")
    }

    /// The same with a socket for QGA that is passed to it.
    pub fn begin_with(listener: &UnixListener) -> Self {
        fcntl(listener, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        Self::run(&format!(
            "exec 3<&{}; export LISTEN_FDS=1 LISTEN_PID=$$; exec /guestlet --settings /run/agent.toml",
            listener.as_raw_fd()
        ))
    }

    fn run(script: &str) -> Self {
        let log = std::fs::OpenOptions::new().create(true).append(true).open("/run/log").unwrap();
        let child =
            Command::new("/bin/sh").args(["-c", script]).stdin(Stdio::null()).stderr(log).spawn().unwrap();
        Self { child }
    }

    /// Connects at the first moment at which that can be done.
    pub fn first_stream() -> UnixStream {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok(stream) = UnixStream::connect("/run/qga.sock") {
                return stream;
            }
            assert!(Instant::now() < deadline, "nobody listens: {}", Self::log());
        }
    }

    pub fn log() -> String {
        std::fs::read_to_string("/run/log").unwrap_or_default()
    }

    pub fn client(&self) -> Client {
        assert!(Path::new("/proc").join(self.child.id().to_string()).exists(), "the agent has ended");
        Client::connect(Path::new("/run/qga.sock"))
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let _ = std::io::stderr().write_all(Self::log().as_bytes());
        }
    }
}

/// `guestlet` with these words; its success and what it said.
pub fn guestlet(words: &[&str]) -> (bool, String) {
    let output =
        Command::new("/guestlet").args(words).args(["--settings", "/run/agent.toml"]).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

/// What `guestlet status` says about freezes.
pub fn status() -> Value {
    let (_, said) = guestlet(&["status", "-o", "json"]);
    let status: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"));
    status["freeze"].clone()
}

/// The guardians that run.
pub fn guardians() -> Vec<i32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    ids.filter(|id| {
        let words = std::fs::read(PathBuf::from(format!("/proc/{id}/cmdline"))).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == b"--guard")
    })
    .collect()
}
