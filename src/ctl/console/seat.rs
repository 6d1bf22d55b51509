//! Whoever sits at a console: the terminal, what is typed at it, what is shown at it, and the wish to leave.

use std::io::{self, Write as _};

use tokio::signal::unix::SignalKind;
use tokio::sync::mpsc;

use crate::ctl::Error;
use crate::ctl::exec::local::{self, Outputs, Written};
use crate::ctl::signals::Signals;
use crate::sys::terminal::Changed;

/// Ctrl-], as with other programs for consoles.
const ESCAPE: u8 = 0x1d;
/// Bytes that wait to be written here, at most: beyond that no more is taken.
const MAX_WAITING: u64 = 1 << 20;

/// The seat. Until it begins, nothing is read, and the terminal is left as it is.
#[derive(Default)]
pub struct Seat {
    /// What is typed is passed on key by key.
    raw: Option<Changed>,
    /// What comes from standard input; nothing any more after its end.
    input: Option<mpsc::Receiver<io::Result<Vec<u8>>>>,
    /// Bytes of output that came, and those of them that were written.
    received: u64,
    written: u64,
}

impl Seat {
    /// Reads standard input from now on; a terminal passes on each key.
    ///
    /// # Errors
    /// If the terminal cannot be changed, or nothing be read.
    pub fn begin(&mut self) -> Result<(), Error> {
        self.raw = local::raw().map_err(|error| Error::Read("the terminal".to_owned(), error))?;
        self.input = Some(local::input().map_err(|error| Error::Read("standard input".to_owned(), error))?);
        Ok(())
    }

    /// The terminal becomes as it was.
    pub fn end(&mut self) {
        if self.raw.take().is_some() {
            // What the guest wrote last may not have ended its line. There is nobody else to tell.
            let _ = io::stderr().write_all(b"\n");
        }
    }

    /// Whether a terminal passes on each key.
    pub fn is_raw(&self) -> bool {
        self.raw.is_some()
    }

    /// Says something to whoever sits here.
    pub fn say(&self, words: &str) {
        local::say(words, self.is_raw());
    }

    /// Says that the console is open, and how it is left.
    pub fn greet(&self, name: &str, place: &str) {
        let end = if self.is_raw() { "Ctrl-] leaves it" } else { "a signal such as SIGINT disconnects" };
        self.say(&format!("connected to the console of {name} at {place}; {end}"));
    }

    /// The next part of the input, while there is any; of an end, an empty one.
    ///
    /// # Errors
    /// If standard input cannot be read.
    pub async fn next_part(&mut self) -> io::Result<Vec<u8>> {
        match &mut self.input {
            // Nothing comes after an error.
            Some(parts) => parts.recv().await.unwrap_or(Ok(Vec::new())),
            None => std::future::pending().await,
        }
    }

    /// What of a part of the input is for the guest, and whether whoever sits here leaves.
    ///
    /// # Errors
    /// If the input cannot be read.
    pub fn read(&mut self, part: io::Result<Vec<u8>>) -> Result<(Vec<u8>, bool), Error> {
        let mut bytes = part.map_err(|error| Error::Read("standard input".to_owned(), error))?;
        if bytes.is_empty() {
            self.input = None;
            // A terminal that has ended is one that nobody sits at.
            return Ok((bytes, self.is_raw()));
        }
        let escape = bytes.iter().position(|byte| *byte == ESCAPE).filter(|_| self.is_raw());
        bytes.truncate(escape.unwrap_or(bytes.len()));
        Ok((bytes, escape.is_some()))
    }

    /// Has output of the guest written; up to where that reaches.
    pub fn show(&mut self, bytes: Vec<u8>, outputs: &Outputs) -> u64 {
        let offset = self.received;
        self.received += bytes.len() as u64;
        outputs.write(0, offset, bytes);
        self.received
    }

    /// Up to where output came.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Up to where output was written.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Whether more output may be taken.
    pub fn has_room(&self) -> bool {
        self.received - self.written < MAX_WAITING
    }

    /// Something was written; whether nobody reads it any more.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn has_written(&mut self, written: Option<Written>) -> Result<bool, Error> {
        match written {
            Some(Written::Up(0, before)) => self.written = before,
            Some(Written::NoReader) | None => return Ok(true),
            Some(Written::Failed(_, error)) => return Err(Error::Print(error)),
            Some(Written::Up(..)) => {}
        }
        Ok(false)
    }

    /// Until all that came is written, or nobody reads it.
    ///
    /// # Errors
    /// If it cannot be written; if a signal ends this first.
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

/// Signals that end this program, by their numbers.
///
/// # Errors
/// If they cannot be heard.
pub fn signals() -> io::Result<Signals<u8>> {
    let kinds = [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit(), SignalKind::terminate()];
    Signals::hear(kinds.map(|kind| (u8::try_from(kind.as_raw_value()).unwrap_or_default(), kind)))
}
