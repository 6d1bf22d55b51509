//! A running agent of its own for each test, and a plain QGA client.

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/launch.rs"]
pub mod launch;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

#[allow(unused_imports, reason = "each test program uses a part of it")]
pub use launch::settings_in;
use launch::settings_with;

/// The socket that the agent makes last.
const LAST_SOCKET: &str = "agent.sock";

/// Longer than anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A process that ends with the test.
pub struct Agent {
    pub child: Child,
    pub folder: TempDir,
}

impl Agent {
    /// The agent with QGA on a unix socket, and its control channel on another.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    pub fn start_with(arguments: &[&str]) -> Self {
        Self::start_set(arguments, "")
    }

    /// With further tables of settings.
    pub fn start_set(arguments: &[&str], settings: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let all = settings_with(folder.path(), settings);
        std::fs::write(folder.path().join("agent.toml"), all).unwrap();
        let child = spawn(folder.path(), arguments);
        let agent = Self { child, folder };
        agent.wait_for(LAST_SOCKET);
        agent
    }

    /// Ends the agent as hard as can be, and starts it again.
    pub fn kill_and_start(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = spawn(self.folder.path(), &[]);
        self.wait_for(LAST_SOCKET);
    }

    /// Another agent program, given its arguments but for the channel's. It finds no settings at the usual places.
    pub fn start_other(program: &Path, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let child = launch::without_usual_files(program)
            .args(["-m", "unix-listen", "-p"])
            .arg(folder.path().join("qga.sock"))
            .arg("-t")
            .arg(folder.path())
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let agent = Self { child, folder };
        agent.wait_for("qga.sock");
        agent
    }

    /// Waits until somebody listens on a socket of the agent's folder.
    fn wait_for(&self, socket: &str) {
        let deadline = Instant::now() + PATIENCE;
        while UnixStream::connect(self.folder.path().join(socket)).is_err() {
            assert!(Instant::now() < deadline, "the agent does not answer; its log:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("qga.sock")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.socket())
    }

    /// Resident memory in KiB that is the agent's own, and not pages of its program's file; and the number of open
    /// descriptors.
    pub fn footprint(&self) -> (u64, usize) {
        let descriptors = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count();
        (self.status("RssAnon:"), descriptors)
    }

    /// The most memory in KiB that was ever resident.
    pub fn peak(&self) -> u64 {
        self.status("VmHWM:")
    }

    /// A line of `proc_pid_status(5)`, in KiB.
    pub fn status(&self, key: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let value = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        value.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

fn spawn(folder: &Path, arguments: &[&str]) -> Child {
    let log = std::fs::OpenOptions::new().create(true).append(true).open(folder.join("log")).unwrap();
    launch::guestlet()
        .args(["-m", "unix-listen", "-p"])
        .arg(folder.join("qga.sock"))
        .arg("-t")
        .arg(folder)
        .arg("--settings")
        .arg(folder.join("agent.toml"))
        .args(arguments)
        // There relative paths begin.
        .current_dir(folder)
        // As guestlet.service has it.
        .env("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the agent's log:\n{}", self.log());
        }
    }
}

/// One connection.
pub struct Client(BufReader<UnixStream>);

impl Client {
    pub fn connect(socket: &Path) -> Self {
        Self::over(UnixStream::connect(socket).unwrap())
    }

    pub fn over(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self(BufReader::new(stream))
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.get_mut().write_all(bytes).unwrap();
    }

    /// Whether the agent takes it.
    pub fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.0.get_mut().write_all(bytes).is_ok()
    }

    /// The next line as it came, without its end.
    pub fn line(&mut self) -> Vec<u8> {
        let mut line = Vec::new();
        self.0.read_until(b'\n', &mut line).unwrap();
        assert_eq!(line.pop(), Some(b'\n'), "the agent closed the stream");
        line
    }

    /// The first bytes of the next answer, most of which stays unread.
    pub fn begins(&mut self) -> String {
        String::from_utf8_lossy(self.0.fill_buf().unwrap()).into_owned()
    }

    /// As [`Client::line`]; nothing if the agent closed the stream instead.
    pub fn try_line(&mut self) -> Option<Vec<u8>> {
        let mut line = Vec::new();
        self.0.read_until(b'\n', &mut line).ok()?;
        line.pop().map(|_| line)
    }

    pub fn answer(&mut self) -> Value {
        let line = self.line();
        serde_json::from_slice(&line)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&line)))
    }

    /// Sends one message and reads one answer.
    pub fn ask(&mut self, message: &str) -> Value {
        self.send(message.as_bytes());
        self.answer()
    }

    /// The result of a command without arguments.
    pub fn call(&mut self, command: &str) -> Value {
        let answer = self.ask(&format!("{{\"execute\":\"{command}\"}}"));
        answer.get("return").unwrap_or_else(|| panic!("{command}: {answer}")).clone()
    }

    /// Everything up to the end of the stream, after this side has said its last.
    pub fn finish(mut self) -> Vec<u8> {
        self.0.get_ref().shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        self.0.read_to_end(&mut rest).unwrap();
        rest
    }
}
