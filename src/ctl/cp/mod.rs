//! `guestctl cp`: files from here to a guest, from a guest to here, and from guest to guest.
//!
//! ```text
//! reading end ──▶ pass ──▶ writing end      here: a thread of this process; in a guest: a call of `guestlet.v1.Files`
//!                  │ lost: connect again, and go through everything once more; what is there already is not copied again
//! ```
//!
//! `place` says what was typed, `ends` are the two ends, `tree` goes through what is to be copied, and `file` copies one file.
//! A copy is done when one pass has found everything in place without losing a connection: whatever a guest forgets when it is reset,
//! or put back to a snapshot, breaks the connection first.

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

/// Exit code after the connection was lost for good.
const LOST: u8 = 255;
/// How long it is tried to connect again.
const PATIENCE: Duration = Duration::from_secs(300);
/// How often everything is gone through.
const PASSES: u32 = 1000;

/// What to copy.
#[derive(Debug, Clone)]
pub struct Job {
    /// From where.
    pub sources: Vec<Place>,
    /// To where.
    pub destination: Place,
    /// How.
    pub options: Options,
}

/// How to copy.
#[derive(Debug, Clone, Copy, Default)]
#[allow(clippy::struct_excessive_bools, reason = "flags of a command line")]
pub struct Options {
    /// Directories as well.
    pub recursive: bool,
    /// Owner, group, mode and time of change stay what they are.
    pub preserve: bool,
    /// With extended attributes.
    pub attributes: bool,
    /// What is there is not replaced.
    pub keep: bool,
    /// No progress is shown.
    pub no_progress: bool,
    /// Only errors are shown.
    pub quiet: bool,
}

/// What was copied.
#[derive(Debug, Default, Serialize)]
struct Summary {
    files: u64,
    bytes: u64,
    failed: u64,
}

/// Copies, with the daemons behind these doors.
///
/// # Errors
/// If something could not be copied; with 255 if a connection was lost for good.
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

/// As many connections as it takes.
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
        // What has got further was connected.
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
    /// Everything that is copied from or to.
    pub fn places(&self) -> impl Iterator<Item = &Place> {
        self.sources.iter().chain([&self.destination])
    }

    /// The same, to be changed.
    pub fn places_mut(&mut self) -> impl Iterator<Item = &mut Place> {
        self.sources.iter_mut().chain([&mut self.destination])
    }

    /// Whether it can be done at all.
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
