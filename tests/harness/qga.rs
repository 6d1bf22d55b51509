//! A QGA client as libvirt is one: at the host's end of the guest's virtio-serial port.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::lines::Lines;

/// How long an agent may take in an emulated guest.
const ANSWER: Duration = Duration::from_secs(20);

/// One connection to the port. QEMU takes one at a time.
#[derive(Debug)]
pub struct QgaClient(Lines);

impl QgaClient {
    /// Connects to the port, without a word to the agent.
    pub fn connect(socket: &Path) -> anyhow::Result<Self> {
        Ok(Self(Lines::connect(socket, Duration::from_secs(10))?))
    }

    /// A client on a connection that is there already.
    pub fn over(stream: UnixStream) -> Self {
        Self(Lines::over(stream))
    }

    /// Sends bytes as they are.
    pub fn send(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.0.send(bytes)
    }

    /// The next line, without the 0xFF that may stand before it; `None` if none came within `limit`.
    pub fn receive(&mut self, limit: Duration) -> anyhow::Result<Option<Value>> {
        let Some(line) = self.0.next(limit)? else { return Ok(None) };
        let start = line.iter().rposition(|byte| *byte == 0xFF).map_or(0, |at| at + 1);
        let text = String::from_utf8_lossy(&line[start..]);
        serde_json::from_str(&text).with_context(|| format!("the agent sent {text:?}")).map(Some)
    }

    /// Discards whatever was left in the port by clients before: guest-sync-delimited.
    pub fn synchronize(&mut self) -> anyhow::Result<()> {
        static NEXT: AtomicU32 = AtomicU32::new(7000);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let request = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
        let mut bytes = vec![0xFF];
        bytes.extend(format!("{request}\n").bytes());
        self.send(&bytes)?;
        loop {
            let answer = self.receive(ANSWER)?.context("no answer to guest-sync-delimited")?;
            if answer["return"] == id {
                return Ok(());
            }
        }
    }

    /// Runs a command and gives what it returns.
    pub fn execute(&mut self, command: &str, arguments: Value) -> anyhow::Result<Value> {
        let mut request = json!({ "execute": command });
        if arguments.as_object().is_some_and(|map| !map.is_empty()) {
            request["arguments"] = arguments;
        }
        self.send(format!("{request}\n").as_bytes())?;
        let mut answer = self.receive(ANSWER)?.with_context(|| format!("{command}: no answer"))?;
        if let Some(error) = answer.get("error") {
            bail!("{command}: {error}");
        }
        Ok(answer["return"].take())
    }
}
