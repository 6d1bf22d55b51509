//! The one place that writes to standard output, and warnings to standard error.

use std::io::{self, Write as _};
use std::os::fd::AsFd as _;

use serde::Serialize;
use tokio::io::Interest;
use tokio::net::unix::pipe;

/// For whom the output is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// People.
    Table,
    /// Programs.
    Json,
}

/// Writes in one format.
#[derive(Debug)]
pub struct Printer {
    format: Format,
}

impl Printer {
    /// Writes in `format`.
    pub fn new(format: Format) -> Self {
        Self { format }
    }

    /// Whether programs read it.
    pub fn is_for_programs(&self) -> bool {
        self.format == Format::Json
    }

    /// Writes `value` as indented JSON, or the lines that `table` makes.
    ///
    /// # Errors
    /// As write(2) gives them.
    pub fn value<T: Serialize>(&mut self, value: &T, table: impl FnOnce() -> String) -> io::Result<()> {
        let text = match self.format {
            Format::Table => table(),
            Format::Json => serde_json::to_string_pretty(value)? + "\n",
        };
        write(&text)
    }

    /// Writes what only people want to read.
    ///
    /// # Errors
    /// As write(2) gives them.
    pub fn remark(&mut self, words: &str) -> io::Result<()> {
        match self.format {
            Format::Table => write(&format!("{words}\n")),
            Format::Json => Ok(()),
        }
    }

    /// Writes `text` as it is, for people and programs alike.
    ///
    /// # Errors
    /// As write(2) gives them.
    pub fn text(&mut self, text: &str) -> io::Result<()> {
        write(text)
    }

    /// Completes when nobody reads what is written any more, as when `head` has seen enough: who waits for something to
    /// write would not notice. Never completes where that cannot be, as with a file.
    pub async fn unread() {
        let out = io::stdout().as_fd().try_clone_to_owned();
        // Nothing is written through this, so that it may be a pipe that blocks.
        let gone = async { pipe::Sender::from_owned_fd_unchecked(out?)?.ready(Interest::ERROR).await };
        if gone.await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Tells people something beside what is written, whatever programs read.
    pub fn note(&mut self, words: &str) {
        // Without a standard error there is nobody to tell.
        drop(writeln!(io::stderr().lock(), "guestctl: {words}"));
    }

    /// Warns people, whatever programs read.
    pub fn warn(&mut self, words: &str) {
        // Without a standard error there is nobody to warn.
        drop(writeln!(io::stderr().lock(), "guestctl: warning: {words}"));
    }

    /// Writes `value` as one line: JSON, or the words that `words` makes.
    ///
    /// # Errors
    /// As write(2) gives them.
    pub fn line<T: Serialize>(&mut self, value: &T, words: impl FnOnce() -> String) -> io::Result<()> {
        let text = match self.format {
            Format::Table => words(),
            Format::Json => serde_json::to_string(value)?,
        };
        write(&(text + "\n"))
    }
}

/// At once and whole, so that a reader sees it when it happens.
fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
