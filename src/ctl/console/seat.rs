//! Local side of a console: the terminal, its input and output, and the request to leave.

use std::io::{self, Write as _};

use tokio::signal::unix::SignalKind;
use tokio::sync::mpsc;

use crate::ctl::Error;
use crate::ctl::exec::local::{self, Outputs, Written};
use crate::ctl::signals::Signals;
use crate::sys::terminal::Changed;

/// Ctrl-], as with other programs for consoles.
const ESCAPE: u8 = 0x1d;
/// Limit of the bytes that wait to be written here. No further output is accepted beyond it.
const MAX_WAITING: u64 = 1 << 20;

/// Terminal of the user. Until `begin`, nothing is read, and the terminal is left as it is.
#[derive(Default)]
pub struct Seat {
    /// Changed terminal settings, while keys are passed on one by one.
    raw: Option<Changed>,
    /// Parts read from standard input; `None` after its end.
    input: Option<mpsc::Receiver<io::Result<Vec<u8>>>>,
    /// Bytes of output received, and those of them that were written.
    received: u64,
    written: u64,
}

impl Seat {
    /// Starts to read standard input; a terminal passes on each key.
    ///
    /// # Errors
    /// Fails if the terminal cannot be changed, or standard input cannot be read.
    pub fn begin(&mut self) -> Result<(), Error> {
        self.raw = local::raw().map_err(|error| Error::Read("the terminal".to_owned(), error))?;
        self.input = Some(local::input().map_err(|error| Error::Read("standard input".to_owned(), error))?);
        Ok(())
    }

    /// Restores the terminal.
    pub fn end(&mut self) {
        if self.raw.take().is_some() {
            // The last output of the guest may not have ended its line. A failure of standard error cannot be reported
            // anywhere.
            let _ = io::stderr().write_all(b"\n");
        }
    }

    /// Returns whether a terminal passes on each key.
    pub fn is_raw(&self) -> bool {
        self.raw.is_some()
    }

    /// Shows a message to the user.
    pub fn say(&self, words: &str) {
        local::say(words, self.is_raw());
    }

    /// Informs the user that the console is open, and how to leave it.
    pub fn greet(&self, name: &str, place: &str) {
        let end = if self.is_raw() { "Ctrl-] leaves it" } else { "a signal such as SIGINT disconnects" };
        self.say(&format!("connected to the console of {name} at {place}; {end}"));
    }

    /// Waits for the next part of the input; an empty one marks the end.
    ///
    /// # Errors
    /// Fails if standard input cannot be read.
    pub async fn next_part(&mut self) -> io::Result<Vec<u8>> {
        match &mut self.input {
            // Nothing follows an error.
            Some(parts) => parts.recv().await.unwrap_or(Ok(Vec::new())),
            None => std::future::pending().await,
        }
    }

    /// Splits a part of the input into the bytes for the guest, and whether the user leaves.
    ///
    /// # Errors
    /// Fails if the input cannot be read.
    pub fn read(&mut self, part: io::Result<Vec<u8>>) -> Result<(Vec<u8>, bool), Error> {
        let mut bytes = part.map_err(|error| Error::Read("standard input".to_owned(), error))?;
        if bytes.is_empty() {
            self.input = None;
            // The end of a terminal means that the user has left.
            return Ok((bytes, self.is_raw()));
        }
        let escape = bytes.iter().position(|byte| *byte == ESCAPE).filter(|_| self.is_raw());
        bytes.truncate(escape.unwrap_or(bytes.len()));
        Ok((bytes, escape.is_some()))
    }

    /// Queues output of the guest for writing; returns the position of its end.
    pub fn show(&mut self, bytes: Vec<u8>, outputs: &Outputs) -> u64 {
        let offset = self.received;
        self.received += bytes.len() as u64;
        outputs.write(0, offset, bytes);
        self.received
    }

    /// Returns the number of output bytes received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns the number of output bytes written.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Returns whether more output may be accepted.
    pub fn has_room(&self) -> bool {
        self.received - self.written < MAX_WAITING
    }

    /// Records a result of writing; returns whether the reader of the output has closed it.
    ///
    /// # Errors
    /// Fails if the output cannot be written.
    pub fn has_written(&mut self, written: Option<Written>) -> Result<bool, Error> {
        match written {
            Some(Written::Up(0, before)) => self.written = before,
            Some(Written::NoReader) | None => return Ok(true),
            Some(Written::Failed(_, error)) => return Err(Error::Print(error)),
            Some(Written::Up(..)) => {}
        }
        Ok(false)
    }

    /// Waits until all output that was received is written, or its reader has closed it.
    ///
    /// # Errors
    /// Fails if it cannot be written, or a signal arrives first.
    pub async fn show_rest(&mut self, outputs: &mut Outputs, signals: &mut Signals<u8>) -> Result<(), Error> {
        while self.written < self.received {
            tokio::select! {
                biased;
                signal = signals.next() => return Err(Error::Ended(128 + signal)),
                written = outputs.written.recv() => if self.has_written(written)? { break },
            }
        }
        Ok(())
    }
}

/// Handles the signals that end this program, by their numbers.
///
/// # Errors
/// Fails if the handlers cannot be installed.
pub fn signals() -> io::Result<Signals<u8>> {
    let kinds = [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit(), SignalKind::terminate()];
    Signals::hear(kinds.map(|kind| (u8::try_from(kind.as_raw_value()).unwrap_or_default(), kind)))
}
