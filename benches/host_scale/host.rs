//! The host half: the real program, with guests in its settings.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Unless `HOST_HALF` names another one.
const OWN: &str = env!("CARGO_BIN_EXE_guestlet-host");
const DEADLINE: Duration = Duration::from_secs(120);

/// The host half's process.
pub struct Host {
    child: Child,
    folder: PathBuf,
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Host {
    /// Starts one without guests, in a directory of its own.
    pub fn start(folder: &Path) -> Self {
        Self::start_with(folder, &[], "")
    }

    /// The same with these arguments and further settings.
    pub fn start_with(folder: &Path, arguments: &[&str], lines: &str) -> Self {
        let settings = folder.join("host.toml");
        std::fs::write(&settings, format!("{}{lines}", usual(folder))).unwrap();
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let program = std::env::var_os("HOST_HALF").map_or_else(|| OWN.into(), PathBuf::from);
        let mut command = Command::new(program);
        let child = command
            .arg("--config")
            .arg(settings)
            .args(arguments)
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let host = Self { child, folder: folder.to_owned() };
        until("the host half answers", || UnixStream::connect(folder.join("metrics.sock")).is_ok());
        host
    }

    /// Names `guests` in the settings, on a host in this zone, which it has to notice.
    pub fn list(&self, guests: usize, zone: &str) {
        let mut text = format!("{}topology.zone = '{zone}'\n", usual(&self.folder));
        for number in 0..guests {
            let at = self.folder.display();
            write!(
                text,
                "[[vm]]\nname = '{}'\nuuid = '00000000-0000-4000-8000-{number:012}'\ndmi-uuid = 'none'\n\
                 unix-socket = '{at}/{number}'\n",
                name(number)
            )
            .unwrap();
        }
        std::fs::write(self.folder.join("new"), text).unwrap();
        std::fs::rename(self.folder.join("new"), self.folder.join("host.toml")).unwrap();
    }

    /// The values of its metrics.
    pub fn metrics(&self) -> HashMap<String, f64> {
        let mut stream = UnixStream::connect(self.folder.join("metrics.sock")).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("guestlet_host_")?.rsplit_once(' '));
        lines.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
    }

    /// The file of its key.
    pub fn key(&self) -> PathBuf {
        self.folder.join("trust/host.key")
    }

    /// The socket of its API.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("api.sock")
    }

    /// Waits until all are connected, in `sessions` sessions so far, and ask who they are.
    pub fn until_all(&self, guests: usize, sessions: usize) {
        until("all guests are connected", || {
            let metrics = self.metrics();
            metrics["virtual_machines{session=\"connected\"}"] as usize == guests
                && metrics["callbacks_open"] as usize == guests
                && metrics["sessions_total"] as usize >= sessions
        });
    }

    /// Kilobytes of memory that are its own.
    pub fn memory(&self) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// How many files it has open.
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }

    /// Seconds of processor time.
    pub fn processor(&self) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<_> = text.rsplit(')').next().unwrap().split_whitespace().collect();
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
    }
}

/// Settings that keep it to its directory.
fn usual(folder: &Path) -> String {
    format!(
        "socket = '{0}/api.sock'\nvolumes-dir = '{0}/volumes'\ntrust.state-dir = '{0}/trust'\n",
        folder.display()
    )
}

/// The name of a VM.
pub fn name(number: usize) -> String {
    format!("vm-{number:05}")
}

/// Waits until it is so.
pub fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !wanted() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
