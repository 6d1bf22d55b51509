//! The guest's serial console: its log, and commands run by the root shell that every test guest has there.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::wait_for;

/// Lines longer than this are cut by the guest's terminal.
const LONGEST: usize = 4000;

/// The console of one VM.
#[derive(Debug)]
pub struct Console {
    socket: PathBuf,
    log: PathBuf,
    next: Mutex<u32>,
}

impl Console {
    /// The console with that socket and log.
    pub fn new(socket: PathBuf, log: PathBuf) -> Self {
        Self { socket, log, next: Mutex::new(1) }
    }

    /// All that the guest wrote.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).replace('\r', "")
    }

    /// The last `count` lines that the guest wrote.
    pub fn tail(&self, count: usize) -> String {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(count)..].join("\n")
    }

    /// Waits until `text` has been written `times` times since the VM started.
    pub fn wait(&self, text: &str, times: usize, limit: Duration) -> anyhow::Result<()> {
        wait_for(&format!("{text:?} on the console"), limit, || {
            (self.log().matches(text).count() >= times).then_some(())
        })
    }

    /// Runs a command line in the guest: its status and what it printed.
    pub fn run(&self, command: &str, limit: Duration) -> anyhow::Result<(i32, String)> {
        if command.len() > LONGEST {
            bail!("a command line of {} bytes is too long for the console", command.len());
        }
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let mut link = Link { stream: UnixStream::connect(&self.socket)?, seen: String::new() };
        let deadline = Instant::now() + limit;
        // Nobody may be reading yet, and what is sent before a shell runs is lost.
        loop {
            *next += 1;
            if link.exchange(":", *next, deadline.min(Instant::now() + Duration::from_secs(1)))?.is_some() {
                break;
            }
            if Instant::now() >= deadline {
                bail!("no shell answers on the console within {} s", limit.as_secs_f32());
            }
        }
        *next += 1;
        link.exchange(command, *next, deadline)?
            .with_context(|| format!("{command:?} does not end within {} s", limit.as_secs_f32()))
    }
}

struct Link {
    stream: UnixStream,
    seen: String,
}

impl Link {
    /// The quotes keep the terminal's echo of the command from looking like its output.
    fn exchange(
        &mut self,
        command: &str,
        number: u32,
        deadline: Instant,
    ) -> anyhow::Result<Option<(i32, String)>> {
        let line = format!("echo '@@'B{number}@; ( {command} ) < /dev/null 2>&1; echo '@@'E{number}:$?@\n");
        self.stream.write_all(line.as_bytes())?;
        let (begin, end) = (format!("@@B{number}@\n"), format!("@@E{number}:"));
        loop {
            if let Some((output, rest)) =
                self.seen.split_once(&begin).and_then(|(_, rest)| rest.split_once(&end))
                && let Some((status, _)) = rest.split_once('@')
            {
                return Ok(Some((status.parse()?, output.to_owned())));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => bail!("QEMU closed the console"),
                Ok(length) => {
                    self.seen += &String::from_utf8_lossy(&chunk[..length]).replace('\r', "");
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
