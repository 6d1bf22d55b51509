//! Owns every program that the harness starts and every folder it works in: none outlives the test process.
//!
//! All of them are started from one thread that lives as long as the process, because a child's parent death
//! signal (set by `setpriv`, part of util-linux) is sent when the *thread* that started it ends.

use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, Once, OnceLock};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};

use super::wait_for;

/// A running program. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Mutex<Child>,
}

impl Process {
    /// Starts a program whose output goes to `log`.
    pub fn start(program: &Path, arguments: &[String], log: &Path) -> anyhow::Result<Self> {
        let output = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
        let errors = output.try_clone()?;
        Self::launch(program, arguments, output.into(), errors.into())
    }

    /// Starts a program whose standard output is read by the caller and whose errors go to `log`.
    pub fn start_piped(
        program: &Path,
        arguments: &[String],
        log: &Path,
    ) -> anyhow::Result<(Self, ChildStdout)> {
        let process = Self::launch(program, arguments, Stdio::piped(), File::create(log)?.into())?;
        let output = process.child().stdout.take().context("no standard output")?;
        Ok((process, output))
    }

    fn launch(program: &Path, arguments: &[String], output: Stdio, errors: Stdio) -> anyhow::Result<Self> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(arguments);
        // A group of its own: Ctrl-C is for the harness, which ends its programs in order.
        command.process_group(0).stdin(Stdio::null()).stdout(output).stderr(errors);
        let (answer, answered) = channel();
        spawner().send((command, answer)).ok().context("the thread that starts programs is gone")?;
        let child = answered.recv()?.with_context(|| format!("cannot start {}", program.display()))?;
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, child: Mutex::new(child) })
    }

    fn child(&self) -> std::sync::MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child().id()
    }

    /// Its exit status, once it has ended.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.child().try_wait().ok().flatten()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let id = i32::try_from(self.id())?;
        kill(Pid::from_raw(id), signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Waits for its end.
    pub fn wait(&self, limit: Duration) -> anyhow::Result<ExitStatus> {
        wait_for(&format!("end of {}", self.name), limit, || self.ended())
    }

    /// Sends SIGTERM and waits for its end.
    pub fn terminate(&self, limit: Duration) -> anyhow::Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        self.wait(limit)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let mut child = self.child();
        drop(child.kill());
        drop(child.wait());
    }
}

type Request = (Command, Sender<std::io::Result<Child>>);

fn spawner() -> Sender<Request> {
    static SPAWNER: OnceLock<Mutex<Sender<Request>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, requests) = channel::<Request>();
        std::thread::spawn(move || {
            for (mut command, answer) in requests {
                drop(answer.send(command.spawn()));
            }
        });
        Mutex::new(sender)
    });
    spawner.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
}

const PREFIX: &str = "gl-";

/// A working folder with a path short enough for unix sockets in it. Dropping it removes it.
#[derive(Debug)]
pub struct RunFolder(PathBuf);

impl RunFolder {
    /// Makes a new one.
    pub fn new() -> anyhow::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        static CLEAN: Once = Once::new();
        CLEAN.call_once(|| remove_folders(|owner| !Path::new("/proc").join(owner).exists()));
        let name = format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        if path.as_os_str().len() > 80 {
            bail!("{} is too long for unix sockets: set TMPDIR to a shorter path", path.display());
        }
        std::fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }

    /// The path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// Has `told` called when a signal asks this process to end, and ends it if it has not by itself after that time. Signals are
/// handled, not blocked: the programs that this process starts would not be ended by one that they inherit as blocked.
pub fn on_signal(grace: Duration, told: impl FnOnce() + Send + 'static) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let handler = |kind| {
        let _inside = runtime.enter();
        signal(kind).expect("a signal can be handled")
    };
    let [mut terminate, mut interrupt, mut hangup] =
        [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(handler);
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
                _ = hangup.recv() => {}
            }
        });
        told();
        std::thread::sleep(grace);
        remove_own_folders();
        std::process::exit(130);
    });
}

/// Removes the folders of this process; for a process that is about to exit without dropping anything.
pub fn remove_own_folders() {
    let own = std::process::id().to_string();
    remove_folders(|owner| owner == own);
}

fn remove_folders(which: impl Fn(&str) -> bool) {
    for entry in std::fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')).map(|(owner, _)| owner);
        if owner.is_some_and(|owner| owner.parse::<u32>().is_ok() && which(owner)) {
            drop(std::fs::remove_dir_all(entry.path()));
        }
    }
}
