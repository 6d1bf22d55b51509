//! The real programs in a folder of their own.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Long enough for a machine that is busy; no test waits for it to pass.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// The host half's program.
pub const HOST: &str = env!("CARGO_BIN_EXE_guestlet-host");

/// The UUID that the settings of [`Lab::vm`] give to the VM with this number.
pub fn uuid(number: u8) -> String {
    format!("6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c{number:02x}")
}

/// A folder with settings, and the daemon over them. Ends the daemon when it is dropped.
pub struct Lab {
    folder: tempfile::TempDir,
    settings: String,
    arguments: Vec<String>,
    daemon: Option<Child>,
}

impl Lab {
    /// A folder whose settings have no VM yet.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().display();
        let settings = format!(
            "socket = '{at}/run/api.sock'\nvolumes-dir = '{at}/volumes'\ntrust.state-dir = '{at}/trust'\n"
        );
        Self { folder, settings, arguments: Vec::new(), daemon: None }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("run/api.sock")
    }

    pub fn settings(&self) -> PathBuf {
        self.path("host.toml")
    }

    /// Adds a setting that is of no VM; comes before all VMs.
    pub fn set(mut self, line: &str) -> Self {
        writeln!(self.settings, "{line}").unwrap();
        self
    }

    /// Replaces a part of the settings, as an editor does: writes another file and renames it.
    pub fn edit(&mut self, from: &str, to: &str) {
        assert!(self.settings.contains(from), "{}", self.settings);
        self.settings = self.settings.replacen(from, to, 1);
        let beside = self.path("host.toml.new");
        std::fs::write(&beside, &self.settings).unwrap();
        std::fs::rename(beside, self.settings()).unwrap();
    }

    /// The daemon is started with these arguments as well.
    #[allow(dead_code, reason = "tests of the other role use it")]
    pub fn with_arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments.extend(arguments.iter().map(|&argument| argument.to_owned()));
        self
    }

    /// Adds a VM whose agent is at `<name>.sock`.
    pub fn guest(self, name: &str, number: u8) -> Self {
        self.vm(name, number, &format!("unix-socket = '@{name}.sock'"))
    }

    /// Adds a VM; `rest` are further lines with paths in this folder written as `@name`.
    pub fn vm(mut self, name: &str, number: u8, rest: &str) -> Self {
        let rest = rest.replace('@', &format!("{}/", self.folder.path().display()));
        let uuid = uuid(number);
        write!(self.settings, "[[vm]]\nname = '{name}'\nuuid = '{uuid}'\n{rest}\n").unwrap();
        self
    }

    /// Writes the settings.
    pub fn write(&self) {
        std::fs::write(self.settings(), &self.settings).unwrap();
    }

    /// A daemon that has not been started, whose words go to `log`.
    pub fn daemon(&self, log: &str) -> Command {
        let mut command = Command::new(HOST);
        let log = std::fs::File::create(self.path(log)).unwrap();
        command.arg("--config").arg(self.settings()).arg("--verbose").args(&self.arguments).stderr(log);
        command.env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC").env_remove("JOURNAL_STREAM");
        command
    }

    /// Writes the settings, starts the daemon and waits until it answers.
    pub fn start(mut self) -> Self {
        self.write();
        self.again();
        self
    }

    /// Starts the daemon and waits until it answers.
    pub fn again(&mut self) {
        self.begin();
        self.until_answers();
    }

    /// Starts the daemon.
    pub fn begin(&mut self) {
        self.daemon = Some(self.daemon("log").spawn().unwrap());
    }

    pub fn until_answers(&self) {
        self.until("the daemon answers", || self.ctl(&["ls"]).status.success());
    }

    /// Kills the daemon.
    pub fn kill(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    /// Sends the daemon a signal.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn signal(&self, signal: Signal) {
        let pid = self.daemon.as_ref().unwrap().id();
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
    }

    /// The daemon's process.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn id(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    /// How many threads the daemon has.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn threads(&self) -> usize {
        let pid = self.daemon.as_ref().unwrap().id();
        std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count()
    }

    /// Waits until the daemon has ended by itself.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn ended(&mut self) -> ExitStatus {
        wait(&mut self.daemon.take().unwrap())
    }

    /// Starts the daemon again if it has ended, as kubelet and systemd do.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn revive(&mut self) {
        if self.daemon.as_mut().is_none_or(|daemon| daemon.try_wait().unwrap().is_some()) {
            self.begin();
        }
    }

    /// Ends the daemon with SIGTERM.
    pub fn stop(&mut self) -> ExitStatus {
        let mut daemon = self.daemon.take().unwrap();
        terminate(&daemon);
        wait(&mut daemon)
    }

    pub fn ctl_command(&self, arguments: &[&str]) -> Command {
        Self::ctl_over(&self.socket(), arguments)
    }

    /// A guestctl that reaches a host half by this socket.
    pub fn ctl_over(socket: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_guestctl"));
        command.arg("--socket").arg(socket).args(arguments).env_remove("GUESTLET_HOST_SOCKET");
        command
    }

    pub fn ctl(&self, arguments: &[&str]) -> Output {
        self.ctl_command(arguments).output().unwrap()
    }

    /// A guestctl of another user, who can reach the socket if its mode allows it.
    pub fn ctl_as(&self, uid: u32, arguments: &[&str]) -> Command {
        let everybody = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(self.folder.path(), everybody).unwrap();
        // Where programs are built others may not go.
        let program = self.path("guestctl");
        if !program.exists() {
            // By another process: what this one has open to be written, programs that other tests start at that moment have
            // open as well, and then it cannot be run.
            let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_guestctl")).arg(&program).status();
            assert!(copied.unwrap().success());
        }
        let mut command = Command::new(program);
        command.arg("--socket").arg(self.socket()).args(arguments).env_remove("GUESTLET_HOST_SOCKET");
        command.uid(uid).gid(uid);
        command
    }

    /// What guestctl prints, which must succeed.
    pub fn words(&self, arguments: &[&str]) -> String {
        let output = self.ctl(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}\n{}", self.log());
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn info(&self, name: &str) -> Value {
        serde_json::from_str(&self.words(&["info", name, "-o", "json"])).unwrap()
    }

    /// Waits until what is known of a VM is as wanted, and returns it.
    pub fn until_vm(&self, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + DEADLINE;
        loop {
            let output = self.ctl(&["info", name, "-o", "json"]);
            // It may be about to come.
            let is_unknown = String::from_utf8_lossy(&output.stderr).contains("knows no VM named");
            assert!(output.status.success() || is_unknown, "{name}: {output:?}\n{}", self.log());
            let vm = serde_json::from_slice(&output.stdout).unwrap_or_default();
            if wanted(&vm) {
                return vm;
            }
            assert!(Instant::now() < end, "{name} stays as it is: {vm:#}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Waits until the session of a VM is in `state`, and returns the VM.
    pub fn until_session(&self, name: &str, state: &str) -> Value {
        self.until_vm(name, |vm| vm["session"] == state)
    }

    pub fn until(&self, what: &str, wanted: impl Fn() -> bool) {
        let end = Instant::now() + DEADLINE;
        while !wanted() {
            assert!(Instant::now() < end, "never: {what}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Bytes that the daemon has in memory: by this line of its status, such as `VmRSS`.
    #[allow(dead_code, reason = "each test program uses a part of it")]
    pub fn memory(&self, line: &str) -> usize {
        let pid = self.daemon.as_ref().unwrap().id();
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let found = status.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(':'));
        found.unwrap().trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() << 10
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            drop(daemon.kill());
            drop(daemon.wait());
        }
    }
}

pub fn terminate(child: &Child) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
}

/// The end of a process, which must come before the deadline.
pub fn wait(child: &mut Child) -> ExitStatus {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("a process does not end: {:?}", child.wait());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A running `guestctl watch`.
pub struct Watch {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl Watch {
    /// Starts to watch, with heartbeats, and returns once the first one came: nothing is missed from then on.
    /// At least one guest has to be connected.
    pub fn start(lab: &Lab, arguments: &[&str]) -> Self {
        let watch = Self::quiet(lab, &[&["--heartbeats"], arguments].concat());
        watch.until(|line| line.contains("heartbeat"));
        watch
    }

    /// Starts to watch, and begins to see events some time later.
    pub fn quiet(lab: &Lab, arguments: &[&str]) -> Self {
        Self::of(lab.ctl_command(&[&["watch"], arguments].concat()))
    }

    /// Runs a command that watches.
    pub fn of(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = mpsc::channel();
        let reader = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            reader.lines().map_while(Result::ok).all(|line| sender.send(line).is_ok());
        });
        Self { child, lines }
    }

    /// The lines that have come since they were last asked for.
    pub fn so_far(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    /// The next line that is wanted.
    pub fn until(&self, wanted: impl Fn(&str) -> bool) -> String {
        let end = Instant::now() + DEADLINE;
        let mut seen = Vec::new();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if wanted(&line) => return line,
                Ok(line) => seen.push(line),
                Err(error) => panic!("{error}; seen: {seen:#?}"),
            }
        }
    }

    /// The next JSON event of this kind of this VM.
    pub fn event(&self, name: &str, kind: &str) -> Value {
        let parse = |line: &str| serde_json::from_str::<Value>(line).unwrap();
        parse(&self.until(|line| {
            let event = parse(line);
            event["name"] == name && event["event"] == kind
        }))
    }

    /// Ends it. Not as Ctrl-C does, which programs ignore that a shell has started in the background.
    #[allow(dead_code, reason = "some test programs only watch until the end")]
    pub fn stop(&self) {
        terminate(&self.child);
    }

    /// The end of the program, and its complaint.
    pub fn end(mut self) -> (ExitStatus, String) {
        let status = wait(&mut self.child);
        let complaint = std::io::read_to_string(self.child.stderr.take().unwrap()).unwrap();
        (status, complaint)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Asserts that a program failed with this code, saying this.
#[track_caller]
pub fn assert_fails(output: &Output, code: i32, words: &str) {
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{complaint}");
    assert!(complaint.contains(words), "{complaint}");
}

/// The path as text.
pub fn text(path: &Path) -> String {
    path.display().to_string()
}
