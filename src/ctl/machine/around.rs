//! `guestctl freeze VM -- COMMAND`: freezes, runs a program on this machine, and thaws, whatever the result
//! of the program.
//!
//! ```text
//!  freeze ──▶ COMMAND ──ended──▶ thaw ──in time──▶ COMMAND's exit code
//!    │           │ signal: COMMAND gets it too      └─too late, or not known──▶ an error
//!    │ signal    └──────────────▶ thaw ──▶ 128 + its number
//!    └──▶ thaw
//! ```
//!
//! Each step uses a connection of its own, so guestlet-host may be restarted while COMMAND runs. A thaw that
//! fails is tried again until the time by which the guest has certainly thawed by itself. If this program is
//! killed, only that deadline thaws the guest.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::signal::unix::SignalKind;
use tokio::time::{Instant, sleep, timeout};
use tonic::Code;

use super::freeze::{Step, Stepped, receipt_words, why, words};
use crate::ctl::Error;
use crate::ctl::print::Printer;
use crate::ctl::signals::Signals;
use crate::wire::proto::v1::{SnapshotCut, ThawFileSystemsResponse};

/// Time for the program to end after it was sent a signal.
const TO_END: Duration = Duration::from_secs(10);
/// Pause before a thaw is tried again.
const AGAIN: Duration = Duration::from_millis(500);
/// Time after the deadline for which a thaw is tried. The guest thaws by itself at the deadline, and reports
/// that to the next call.
const AFTERWARDS: Duration = Duration::from_secs(10);

/// Command to run while file systems are frozen.
#[derive(Debug, Clone)]
pub struct Around {
    /// Mount points to freeze; empty for all.
    pub mounts: Vec<String>,
    /// Deadline of the freeze.
    pub within: Duration,
    /// Program, and its arguments.
    pub command: Vec<OsString>,
    /// Name of the snapshot for the receipt; may be empty.
    pub snapshot: String,
    /// Level of consistency that the snapshot must reach at least.
    pub require: Option<Require>,
}

/// Required level of consistency of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Require {
    /// File systems were frozen from before the snapshot until after it.
    FileSystem,
    /// Applications took part, too.
    Application,
}

impl Require {
    /// Returns whether the level that a guest reports is sufficient.
    fn is_met(self, level: &str) -> bool {
        match self {
            Self::FileSystem => matches!(level, "filesystem" | "application"),
            Self::Application => level == "application",
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::FileSystem => "filesystem",
            Self::Application => "application",
        }
    }
}

/// Signals that request the end of this program.
const TO_THIS_PROGRAM: [(Signal, fn() -> SignalKind); 3] = [
    (Signal::SIGINT, SignalKind::interrupt),
    (Signal::SIGTERM, SignalKind::terminate),
    (Signal::SIGHUP, SignalKind::hangup),
];

/// Freezes, runs the command, and thaws. `ask` carries out one step over a connection of its own.
///
/// # Errors
/// Fails with the exit code of the command if that failed; also if nothing was frozen, or the freeze ended
/// too soon.
pub async fn run(
    printer: &mut Printer,
    name: &str,
    around: &Around,
    ask: impl AsyncFn(Step) -> Result<Stepped, Error>,
) -> Result<(), Error> {
    let mut signals = Signals::hear(TO_THIS_PROGRAM.map(|(number, kind)| (number, kind())))
        .map_err(|error| Error::Read("signals".to_owned(), error))?;
    let freeze = Step::Freeze { mounts: around.mounts.clone(), within: around.within };
    let begun = Instant::now();
    let frozen = tokio::select! {
        frozen = ask(freeze) => frozen,
        signal = signals.next() => {
            // A thaw ends the freeze that is under way.
            let thawed = ask(Step::Thaw(None)).await;
            return ended_by(printer, signal, thawed.map(drop));
        }
    };
    let frozen = match frozen {
        Ok(Stepped::Frozen(frozen)) => frozen,
        Ok(Stepped::Thawed(_)) => return Err(Error::Closed),
        Err(error) => {
            // A freeze whose answer was lost may still have been carried out.
            if is_unknown(&error) {
                drop(thaw(name, &ask, None, Instant::now() + AFTERWARDS).await);
            }
            return Err(error);
        }
    };
    if frozen.mount_points.is_empty() {
        return Err(Error::Unmet(format!("{}; nothing was run", words(&frozen))));
    }
    printer.note(&words(&frozen));
    let until = begun + Duration::from_secs(frozen.seconds_left.into()) + AFTERWARDS;
    let from = SystemTime::now();
    let ran = work(printer, &around.command, &mut signals).await;
    let cut = cut(around, from, ran.as_ref().ok());
    let thawed = thaw(name, &ask, Some(cut), until).await;
    let thawed = thawed.and_then(|thawed| told(printer, &thawed, around.require));
    match ran {
        Ok(Ran::Ended(status)) if status.success() => thawed,
        Ok(Ran::Ended(status)) => {
            if let Err(error) = thawed {
                printer.warn(&error.to_string());
            }
            Err(Error::Ended(exit_code(status)))
        }
        Ok(Ran::Interrupted(signal)) => ended_by(printer, signal, thawed),
        Err(error) => {
            if let Err(error) = thawed {
                printer.warn(&error.to_string());
            }
            Err(error)
        }
    }
}

/// Describes the run of the command for the receipt; its end is the end of the snapshot. Its arguments are
/// withheld from the guest, because they may contain secrets.
fn cut(around: &Around, from: SystemTime, ran: Option<&Ran>) -> SnapshotCut {
    let program = around.command.first().map(|program| program.to_string_lossy().into_owned());
    SnapshotCut {
        id: around.snapshot.clone(),
        text: program.unwrap_or_default(),
        begun: Some(from.into()),
        // The recorded end must not precede the start if the clock is set back meanwhile.
        ended: Some(SystemTime::now().max(from).into()),
        exit_status: match ran {
            Some(Ran::Ended(status)) if status.success() => 0,
            Some(Ran::Ended(status)) => exit_code(*status).into(),
            Some(Ran::Interrupted(signal)) => 128 + *signal as i32,
            None => 127,
        },
    }
}

/// Shows the receipt, and checks that its level is sufficient.
fn told(
    printer: &mut Printer,
    thawed: &ThawFileSystemsResponse,
    require: Option<Require>,
) -> Result<(), Error> {
    if let Some(words) = receipt_words(thawed) {
        printer.note(&words);
    }
    let why = why(thawed);
    let Some(require) = require.filter(|require| !require.is_met(&thawed.level)) else {
        if let Some(why) = why {
            printer.note(&why);
        }
        return Ok(());
    };
    let wanted = require.word();
    Err(Error::Unmet(if thawed.receipt.is_empty() {
        format!(
            "{wanted} is required, but the agent in the guest makes no receipts; update guestlet in the guest"
        )
    } else {
        format!("{wanted} is required, but the snapshot is {}", why.unwrap_or_else(|| thawed.level.clone()))
    }))
}

fn ended_by(printer: &mut Printer, signal: Signal, thawed: Result<(), Error>) -> Result<(), Error> {
    if let Err(error) = thawed {
        printer.warn(&error.to_string());
    }
    Err(Error::Ended(u8::try_from(128 + signal as i32).unwrap_or(1)))
}

/// Returns the exit code that a shell would return.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0).unwrap_or(1)
}

/// Returns whether an error leaves open if the call was carried out.
fn is_unknown(error: &Error) -> bool {
    match error {
        Error::Silent | Error::Late(_) => true,
        Error::Call(status) => matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded),
        error => error.is_of_connection(),
    }
}

/// Returns whether a call with this failure may succeed later.
fn may_pass(error: &Error) -> bool {
    match error {
        // These errors also occur while guestlet-host, or the session, is starting again.
        Error::NoSocket(_) | Error::NobodyAnswers(_) | Error::UnknownVm(_) => true,
        Error::Call(status) if status.code() == Code::FailedPrecondition => {
            status.message().contains("there is no session")
        }
        Error::Call(status) if status.code() == Code::ResourceExhausted => true,
        Error::Cluster(error) => error.may_pass(),
        error => is_unknown(error),
    }
}

/// Thaws, with as many attempts as necessary until the given time.
async fn thaw(
    name: &str,
    ask: &impl AsyncFn(Step) -> Result<Stepped, Error>,
    cut: Option<SnapshotCut>,
    until: Instant,
) -> Result<ThawFileSystemsResponse, Error> {
    let mut is_first = true;
    loop {
        match ask(Step::Thaw(cut.clone())).await {
            Ok(Stepped::Thawed(thawed)) if thawed.thawed > 0 => return Ok(thawed),
            Ok(_) if is_first => {
                return Err(Error::Unmet(format!(
                    "the file systems of {name} were already thawed by somebody else: the snapshot is not consistent"
                )));
            }
            Ok(_) => {
                return Err(Error::Unmet(format!(
                    "the file systems of {name} are thawed, but it is not known whether they were frozen \
                     until now: treat the snapshot as inconsistent"
                )));
            }
            Err(error) if may_pass(&error) && Instant::now() < until => {
                is_first = false;
                sleep(AGAIN).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// End of the command.
enum Ran {
    Ended(ExitStatus),
    Interrupted(Signal),
}

/// Runs the program until it ends, or until a signal requests the end of this one.
async fn work(
    printer: &mut Printer,
    command: &[OsString],
    signals: &mut Signals<Signal>,
) -> Result<Ran, Error> {
    let Some((program, arguments)) = command.split_first() else {
        return Ok(Ran::Ended(ExitStatus::default()));
    };
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::inherit())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| Error::Run(program.clone(), error))?;
    let signal = tokio::select! {
        ended = child.wait() => {
            return ended.map(Ran::Ended).map_err(|error| Error::Run(program.clone(), error));
        }
        signal = signals.next() => signal,
    };
    printer.note(&format!("{signal}: waiting for the command to end, then thawing"));
    pass(&child, signal);
    if timeout(TO_END, child.wait()).await.is_err() {
        drop(child.start_kill());
    }
    Ok(Ran::Interrupted(signal))
}

/// Sends a signal to the program. It has received the signal already if it came from the terminal.
fn pass(child: &Child, signal: Signal) {
    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
        // The process may just have ended.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        for (raw, code) in [(3 << 8, 3), (9, 137), (15, 143)] {
            assert_eq!(exit_code(ExitStatus::from_raw(raw)), code);
        }
    }

    #[test]
    fn a_program_that_failed_is_no_snapshot() {
        let around = Around {
            mounts: Vec::new(),
            within: Duration::ZERO,
            command: ["lvcreate", "--secret"].map(OsString::from).into(),
            snapshot: "snap".to_owned(),
            require: None,
        };
        let from = SystemTime::now() + Duration::from_secs(60);
        let ended = |raw| Ran::Ended(ExitStatus::from_raw(raw));
        let made = cut(&around, from, Some(&ended(0)));
        assert_eq!((made.exit_status, &*made.text, &*made.id), (0, "lvcreate", "snap"));
        assert_eq!(made.begun, made.ended);
        assert_eq!(cut(&around, from, Some(&ended(3 << 8))).exit_status, 3);
        assert_eq!(cut(&around, from, Some(&Ran::Interrupted(Signal::SIGINT))).exit_status, 130);
        assert_eq!(cut(&around, from, None).exit_status, 127);
    }

    #[test]
    fn what_is_required_is_worth_at_least_as_much() {
        let met =
            |require: Require| ["crash", "filesystem", "application", ""].map(|level| require.is_met(level));
        assert_eq!(met(Require::FileSystem), [false, true, true, false]);
        assert_eq!(met(Require::Application), [false, false, true, false]);
    }

    #[test]
    fn only_what_may_get_through_is_tried_again() {
        assert!(may_pass(&Error::Closed));
        assert!(may_pass(&Error::Call(tonic::Status::unavailable("the session with the guest ended"))));
        assert!(may_pass(&Error::Call(tonic::Status::failed_precondition("there is no session with it"))));
        assert!(!may_pass(&Error::Call(tonic::Status::aborted("the snapshot is not consistent"))));
        assert!(!may_pass(&Error::Call(tonic::Status::permission_denied("no grant"))));
        let ended = crate::ctl::cluster::Error::Inside {
            pod: "p".into(),
            node: "n".into(),
            message: String::new(),
            code: 137,
        };
        assert!(may_pass(&Error::Cluster(crate::ctl::cluster::Error::NoHost("a/b".into()))));
        let ended = Error::Cluster(ended);
        assert!(may_pass(&ended) && is_unknown(&ended));
        assert!(!may_pass(&Error::Cluster(crate::ctl::cluster::Error::NoKind)));
    }
}
