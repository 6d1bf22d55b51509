//! `guestctl cp`: copies files from this machine to a guest, from a guest to this machine, and from guest to
//! guest.
//!
//! ```text
//! reading end ──▶ pass ──▶ writing end      here: a thread of this process; in a guest: a call of `guestlet.v1.Files`
//!                  │ lost: connect again, and go through everything once more; what is there already is not copied again
//! ```
//!
//! `place` parses what was typed, `ends` are the two ends, `tree` walks through what is to be copied, and
//! `file` copies one file. A copy is done when one pass has found everything in place without losing a
//! connection. Whenever a guest loses data because it is reset or reverted to a snapshot, the connection
//! breaks first.

mod ends;
mod file;
mod names;
mod open;
mod pass;
mod place;
mod progress;
mod standard;
mod state;
mod tree;
mod trouble;

use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::signal::unix::SignalKind;

use super::Error;
use super::door::Door;
use super::outage::Outage;
use super::print::Printer;
use super::signals::Signals;

pub use names::entries;
pub use place::{Place, shown};
use state::State;
use trouble::Trouble;

/// Exit code after the connection was finally lost.
const LOST: u8 = 255;
/// Time for which reconnecting is tried.
const PATIENCE: Duration = Duration::from_secs(300);
/// Limit of passes through everything that is to be copied.
const PASSES: u32 = 1000;

/// Copy to be made.
#[derive(Debug, Clone)]
pub struct Job {
    /// Sources of the copy.
    pub sources: Vec<Place>,
    /// Destination of the copy.
    pub destination: Place,
    /// Options of the copy.
    pub options: Options,
}

/// Options of a copy.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub struct Options {
    /// True to copy directories as well.
    pub recursive: bool,
    /// True to preserve owner, group, mode and modification time.
    pub preserve: bool,
    /// True to copy extended attributes.
    pub attributes: bool,
    /// True to leave existing files as they are.
    pub keep: bool,
    /// True to show no progress.
    pub no_progress: bool,
    /// True to show only errors.
    pub quiet: bool,
}

/// Summary of what was copied, for programs.
#[derive(Debug, Default, Serialize)]
struct Summary {
    files: u64,
    bytes: u64,
    failed: u64,
}

/// Carries out a copy, with the daemons behind these doors.
///
/// # Errors
/// Fails if something could not be copied; with 255 if a connection was finally lost.
pub async fn run(doors: &dyn Fn(&str) -> Door, printer: &mut Printer, job: &Job) -> Result<(), Error> {
    job.check()?;
    let failed = |error| Error::Read("signals".to_owned(), error);
    let kinds = [(1, SignalKind::hangup()), (2, SignalKind::interrupt()), (15, SignalKind::terminate())];
    let mut signals: Signals<u8> = Signals::hear(kinds).map_err(failed)?;
    let mut summary = Summary::default();
    for source in &job.sources {
        let mut state = State::new(job, source);
        let done = tokio::select! {
            biased;
            heard = signals.next() => {
                state.progress.clear();
                return Err(interrupted(heard, &state));
            }
            done = until_done(doors, job, source, &mut state) => done,
        };
        state.progress.clear();
        summary.files += state.files;
        summary.bytes += state.bytes;
        summary.failed += state.failures();
        done?;
    }
    if printer.is_for_programs() {
        printer.value(&summary, String::new)?;
    }
    if summary.failed == 0 { Ok(()) } else { Err(Error::Ended(1)) }
}

fn interrupted(signal: u8, state: &State) -> Error {
    let words =
        if state.can_go_on { "interrupted; run the same command again to resume" } else { "interrupted" };
    Error::NotRun(words.to_owned(), 128 + signal)
}

/// Makes as many connections as necessary.
async fn until_done(
    doors: &dyn Fn(&str) -> Door,
    job: &Job,
    source: &Place,
    state: &mut State,
) -> Result<(), Error> {
    let mut outage = Outage::none(PATIENCE);
    for _ in 0..PASSES {
        let before = state.steps;
        let done = open::with_both(doors, job, source, state).await;
        // Progress shows that there was a connection.
        if state.steps != before {
            outage.ends();
        }
        let was_begun = state.was_begun;
        match done {
            Ok(()) => return Ok(()),
            Err(Trouble::Again) => continue,
            Err(Trouble::Fatal(error)) => return Err(error),
            Err(Trouble::Failed(failure)) => return Err(Error::Program(failure.message)),
            Err(Trouble::Refused(error)) if !was_begun => return Err(error),
            Err(Trouble::Refused(error)) => {
                if !outage.may_be_early(error.to_string(), Instant::now()) {
                    return Err(error);
                }
            }
            Err(Trouble::Lost(error)) if !was_begun => return Err(error),
            Err(Trouble::Lost(error)) => outage.goes_on(error.to_string(), Instant::now()),
        }
        state.was_lost = true;
        if outage.is_too_long(Instant::now()) {
            let why = outage.why();
            return Err(Error::NotRun(
                format!("lost the connection: {why}; run the same command again to resume"),
                LOST,
            ));
        }
        if outage.tell_at().is_some_and(|at| at <= Instant::now()) {
            let why = outage.tell().to_owned();
            state.say(&format!("lost the connection ({why}); reconnecting"));
        }
        tokio::time::sleep(pause(doors, job, source)).await;
    }
    Err(Error::NotRun(format!("the connection was lost {PASSES} times"), LOST))
}

fn pause(doors: &dyn Fn(&str) -> Door, job: &Job, source: &Place) -> Duration {
    let pauses = [source, &job.destination].into_iter().filter_map(Place::vm);
    pauses.map(|name| doors(name).pause()).max().unwrap_or(Duration::from_millis(100))
}

impl Job {
    /// Returns the sources and the destination.
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        self.sources.iter().chain([&self.destination])
    }

    /// Returns the sources and the destination, mutably.
    pub fn places_mut(&mut self) -> impl Iterator<Item = &mut Place> {
        self.sources.iter_mut().chain([&mut self.destination])
    }

    /// Checks that the sources and the destination can be combined.
    fn check(&self) -> Result<(), Error> {
        let wrong = |words: &str| Err(Error::Program(words.to_owned()));
        for source in &self.sources {
            if source.vm().is_none() && self.destination.vm().is_none() {
                return wrong(
                    "the source or the destination must be in a guest: write VM:PATH, such as web-1:/etc/hosts",
                );
            }
            if *source == Place::Standard && self.sources.len() > 1 {
                return wrong("standard input cannot be combined with other sources");
            }
        }
        if self.sources.len() > 1 && self.destination == Place::Standard {
            return wrong("only one file can be copied to standard output");
        }
        Ok(())
    }
}
