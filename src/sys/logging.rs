//! Destinations of the log: a file if one is configured, journald under systemd, otherwise standard error.
//!
//! While file systems are frozen, [`pause`] holds back all output to files and to standard error, which may be
//! a file.

mod file;
mod journal;

use std::io::{self, Write};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tracing::{Level, Metadata};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

pub use file::{Lines, finish, pause, resume, timestamp};

/// Bytes of a line on standard error: what a pipe that has room takes without waiting for more (pipe(7)).
const MAX_LINE: usize = 4096;

/// Starts logging for this process, under the name `identifier`; to `file`, if there is one.
///
/// # Errors
/// If the file cannot be opened, or logging was started before.
pub fn init(identifier: &'static str, verbose: bool, file: Option<&Path>) -> anyhow::Result<()> {
    let sink = match file {
        Some(path) => {
            let opened = file::Log::start(path);
            let opened = opened
                .map_err(|error| anyhow::anyhow!("cannot open the log file {}: {error}", path.display()));
            Sink::File(opened?)
        }
        None => match journal::Journal::connect(identifier) {
            Some(journal) => Sink::Journal(journal),
            None => Sink::StandardError(AtomicU64::new(0)),
        },
    };
    let level = if verbose { Level::DEBUG } else { Level::INFO };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_ansi(false);
    // A library's own lines are for its developers, and a peer can cause one with each frame that it sends.
    let own = Targets::new().with_target(env!("CARGO_CRATE_NAME"), level).with_default(Level::WARN);
    let again = || anyhow::anyhow!("cannot start logging: it was started before");
    SINK.set(sink).map_err(|_| again())?;
    let sink = SINK.get().ok_or_else(again)?;
    let started = builder.with_level(false).without_time().with_writer(sink).finish().with(own).try_init();
    started.map_err(|error| anyhow::anyhow!("cannot start logging: {error}"))
}

/// Destination of this process's log, set once at start.
static SINK: OnceLock<Sink> = OnceLock::new();

/// Logs one line, with `fields` where the journal takes it: upper-case names, and values that are one line each.
pub fn record(line: &str, fields: &[(&str, &str)]) {
    match SINK.get() {
        Some(Sink::Journal(journal)) => journal.send_with(Level::INFO, line.as_bytes(), fields),
        Some(sink) => sink.take(Level::INFO, format!("{line}\n").as_bytes()),
        // Tests, which have started none.
        None => tracing::info!("{line}"),
    }
}

enum Sink {
    File(file::Log),
    Journal(journal::Journal),
    /// Standard error, with the number of entries that were lost while logging was paused, or while no process
    /// read them.
    StandardError(AtomicU64),
}

impl Sink {
    fn take(&self, level: Level, text: &[u8]) {
        match self {
            Self::File(log) => log.take(level, text),
            Self::Journal(journal) => journal.send(level, text),
            Self::StandardError(lost) => {
                if file::is_paused() || !has_room() {
                    lost.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                let mut line = Vec::new();
                let lost = lost.swap(0, Ordering::Relaxed);
                if lost > 0 {
                    line.extend_from_slice(format!(" INFO {lost} entries were left out\n").as_bytes());
                }
                line.extend_from_slice(format!("{level:>5} ").as_bytes());
                line.extend_from_slice(text);
                if line.len() > MAX_LINE {
                    line.truncate(MAX_LINE - 1);
                    line.push(b'\n');
                }
                // A failure cannot be reported anywhere.
                let _ = io::stderr().write_all(&line);
            }
        }
    }
}

/// Returns whether a line can be written to standard error without blocking. A pipe that nobody reads from
/// blocks.
fn has_room() -> bool {
    let stderr = io::stderr();
    let mut descriptors = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    poll(&mut descriptors, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

struct Entry<'a> {
    sink: &'a Sink,
    level: Level,
}

impl Write for Entry<'_> {
    /// tracing-subscriber writes each event with one call.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.sink.take(self.level, text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for &'static Sink {
    type Writer = Entry<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        Entry { sink: self, level: Level::INFO }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Self::Writer {
        Entry { sink: self, level: *metadata.level() }
    }
}
