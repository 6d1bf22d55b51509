//! Lines from a stream, each within a deadline: what QMP and QGA clients read.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::wait_for;

/// A connection to a unix socket.
#[derive(Debug)]
pub struct Lines {
    stream: UnixStream,
    pending: Vec<u8>,
}

impl Lines {
    /// Connects, waiting for the socket to appear.
    pub fn connect(socket: &Path, limit: Duration) -> anyhow::Result<Self> {
        let what = format!("listener at {}", socket.display());
        let stream = wait_for(&what, limit, || UnixStream::connect(socket).ok())?;
        Ok(Self::over(stream))
    }

    /// The lines of a connection that is there already.
    pub fn over(stream: UnixStream) -> Self {
        Self { stream, pending: Vec::new() }
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.stream.set_write_timeout(Some(Duration::from_secs(10)))?;
        self.stream.write_all(bytes).context("cannot write")
    }

    /// The next line without its end; `None` if none came within `limit`.
    ///
    /// # Errors
    /// If the other side closed the connection.
    pub fn next(&mut self, limit: Duration) -> anyhow::Result<Option<Vec<u8>>> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<u8> = self.pending.drain(..=end).collect();
                line.pop();
                return Ok(Some(line));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => bail!("the other side closed the connection"),
                Ok(length) => self.pending.extend_from_slice(&chunk[..length]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error).context("cannot read"),
            }
        }
    }
}
