//! What tests of single clients stand on: a disk that is frozen and copied, and the process of a client, which the test speaks
//! with in place of the agent. All of it in namespaces of the test's own.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Longer than anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// As whom servers and clients run.
pub const USER: &str = "nobody";
/// Where everything is, for every user to see.
const TOP: &str = "/mnt";

nix::ioctl_write_int_bad!(fifreeze, 0xc004_5877);
nix::ioctl_write_int_bad!(fithaw, 0xc004_5878);

/// Runs the test that calls this again in namespaces of mounts, processes and networks; false in there.
pub fn is_outside() -> bool {
    if crate::namespace::inside().is_none() {
        return crate::namespace::run_inside(&["--mount", "--net", "--pid", "--fork", "--kill-child"], &[]);
    }
    let agent = crate::agent::launch::AGENT;
    run(&format!(
        "mount -t proc proc /proc; mount -t tmpfs -o mode=755 stand {TOP}; ip link set lo up; cp {agent} {TOP}/guestlet"
    ));
    false
}

/// How many rounds of freezes there are.
pub fn rounds() -> u32 {
    if std::env::var_os("GUESTLET_SOAK").is_some() { 50 } else { 6 }
}

/// A command line that has to succeed.
pub fn run(script: &str) {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A command that runs as the user of the servers.
pub fn as_user(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", USER, "--regid", "nogroup", "--clear-groups", "--", program]);
    command
}

/// Waits until it is so.
#[track_caller]
pub fn until<T>(what: &str, mut is_so: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = is_so() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A program that ends with this value.
pub struct Running(Child);

impl Running {
    pub fn start(command: &mut Command, log: &Path) -> Self {
        let file = std::fs::File::create(log).unwrap();
        let command = command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
        Self(command.spawn().unwrap())
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }

    pub fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    pub fn kill(&mut self) {
        let _ = self.0.kill();
        self.0.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A file system on a loop device.
pub struct Disk {
    name: String,
}

impl Disk {
    pub fn new(name: &str, megabytes: u32) -> Self {
        let disk = Self { name: name.to_owned() };
        let image = disk.image();
        run(&format!("truncate -s {megabytes}M {image}; mkfs.ext4 -q -m 0 {image}"));
        disk.mount();
        run(&format!("chown {USER} {}", disk.path().display()));
        disk
    }

    fn image(&self) -> String {
        format!("{TOP}/{}.image", self.name)
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        Path::new(TOP).join(&self.name)
    }

    fn mount(&self) {
        run(&format!("mkdir -p {0}; mount -o loop {1} {0}", self.path().display(), self.image()));
    }

    pub fn freeze(&self) {
        let file = std::fs::File::open(self.path()).unwrap();
        // SAFETY: FIFREEZE takes no argument that the kernel would read.
        unsafe { fifreeze(file.as_raw_fd(), 0) }.unwrap();
    }

    pub fn thaw(&self) {
        let file = std::fs::File::open(self.path()).unwrap();
        // SAFETY: the same of FITHAW.
        unsafe { fithaw(file.as_raw_fd(), 0) }.unwrap();
    }

    /// Freezes it, copies it, and thaws it; the copy is mounted.
    pub fn cut(&self) -> Self {
        let copy = Self { name: "copy".to_owned() };
        self.freeze();
        run(&format!("cp --sparse=always {} {}", self.image(), copy.image()));
        self.thaw();
        copy.mount();
        copy
    }

    pub fn remove(self) {
        run(&format!("umount {}; rm {}", self.path().display(), self.image()));
    }
}

/// The process of a client.
pub struct Client {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Client {
    pub fn start(kind: &str, target: &str) -> Self {
        Self::start_by(&mut as_user(&format!("{TOP}/guestlet")), kind, target)
    }

    /// As root, whom the test's own servers run as.
    pub fn start_as_root(kind: &str, target: &str) -> Self {
        Self::start_by(&mut Command::new(format!("{TOP}/guestlet")), kind, target)
    }

    fn start_by(command: &mut Command, kind: &str, target: &str) -> Self {
        let command = command.args(["application", kind, target]).current_dir("/").env_clear();
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    fn ask(&mut self, what: &str, limit: Duration) {
        let milliseconds = u64::try_from(limit.as_millis()).unwrap();
        writeln!(self.input.as_mut().unwrap(), "{}", json!({ what: milliseconds })).unwrap();
    }

    /// What it says next.
    pub fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// Asks it to hold, and gives its answer.
    pub fn ask_to_hold(&mut self, limit: Duration) -> Value {
        self.ask("hold", limit);
        self.answer()
    }

    /// What it says once it holds.
    pub fn hold(&mut self) -> Value {
        let answer = self.ask_to_hold(PATIENCE);
        assert!(answer["held"].is_object(), "{answer}");
        answer["held"].clone()
    }

    /// Why it does not hold.
    pub fn does_not_hold(&mut self, limit: Duration) -> String {
        let answer = self.ask_to_hold(limit);
        answer["failed"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    /// The positions that it says after the release.
    pub fn release(&mut self) -> Value {
        self.ask("release", PATIENCE);
        let answer = self.answer();
        assert!(answer["released"].is_object(), "{answer}");
        answer["released"].clone()
    }

    /// What it says by itself when its session ends.
    pub fn loses(&mut self) -> String {
        let answer = self.answer();
        answer["failed"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// As if the agent had ended: the process has to end by itself.
    pub fn hang_up(&mut self) {
        self.input = None;
        until("the client does not end", || self.child.try_wait().unwrap());
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writers that write numbers from 1 on, each the next one once the one before was acknowledged.
pub struct Load {
    is_over: Arc<AtomicBool>,
    acknowledged: Vec<Arc<AtomicU64>>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Each writer is made by `make`, with its number; it writes a number, and says whether that was acknowledged.
    pub fn start<W: FnMut(u64) -> bool + Send + 'static>(
        count: usize,
        mut make: impl FnMut(usize) -> W,
    ) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let acknowledged: Vec<_> = (0..count).map(|_| Arc::new(AtomicU64::new(0))).collect();
        let begin = |(writer, acknowledged): (usize, &Arc<AtomicU64>)| {
            let (mut write, is_over, acknowledged) = (make(writer), is_over.clone(), acknowledged.clone());
            std::thread::spawn(move || {
                for number in 1.. {
                    if is_over.load(Ordering::Relaxed) || !write(number) {
                        break;
                    }
                    acknowledged.store(number, Ordering::SeqCst);
                    // What is written has to have room in its disk.
                    std::thread::sleep(Duration::from_millis(1));
                }
            })
        };
        let threads = acknowledged.iter().enumerate().map(begin).collect();
        Self { is_over, acknowledged, threads }
    }

    /// The last number of each writer that was acknowledged.
    pub fn acknowledged(&self) -> Vec<u64> {
        self.acknowledged.iter().map(|number| number.load(Ordering::SeqCst)).collect()
    }

    /// Waits until each writer has written more.
    #[track_caller]
    pub fn goes_on(&self) {
        let before = self.acknowledged();
        until("the writers do not go on", || {
            self.acknowledged().iter().zip(&before).all(|(now, then)| *now > then + 5).then_some(())
        });
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
