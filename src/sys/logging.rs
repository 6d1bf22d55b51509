//! Where the log goes: to a file if one is named, to journald under systemd, else to standard error.
//!
//! While file systems are frozen, [`pause`] keeps everything from files and from standard error, which may be one.

mod file;
mod journal;

use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::{Level, Metadata};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

pub use file::{finish, pause, resume};

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
    let started = builder.with_level(false).without_time().with_writer(sink).finish().with(own).try_init();
    started.map_err(|error| anyhow::anyhow!("cannot start logging: {error}"))
}

enum Sink {
    File(file::Log),
    Journal(journal::Journal),
    /// With the number of entries that were lost while logging was paused.
    StandardError(AtomicU64),
}

impl Sink {
    fn take(&self, level: Level, text: &[u8]) {
        match self {
            Self::File(log) => log.take(level, text),
            Self::Journal(journal) => journal.send(level, text),
            Self::StandardError(lost) => {
                if file::is_paused() {
                    lost.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                let mut line = format!("{level:>5} ").into_bytes();
                line.extend_from_slice(text);
                let lost = lost.swap(0, Ordering::Relaxed);
                if lost > 0 {
                    line.extend_from_slice(format!(" INFO {lost} entries were left out\n").as_bytes());
                }
                // There is nowhere to say that it failed.
                let _ = io::stderr().write_all(&line);
            }
        }
    }
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

impl<'a> MakeWriter<'a> for Sink {
    type Writer = Entry<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        Entry { sink: self, level: Level::INFO }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Self::Writer {
        Entry { sink: self, level: *metadata.level() }
    }
}
