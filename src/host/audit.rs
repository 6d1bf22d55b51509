//! Audit log: a record of each call that changes something, that reaches into a guest, or that is denied. Records
//! go to the journal, with structured fields, and to a file of JSON lines if the settings name one.
//!
//! ```text
//!  call ──begin──▶ Entry ──end, or dropped (CANCELLED)──▶ record ──▶ journal
//!  denied ──▶ limited for each caller; the rest are counted ─┘  └──▶ file (by a thread; counted if its queue is full)
//! ```
//!
//! A record never contains data that is written or read, an environment, or secrets. No function here waits for
//! I/O.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::Instant;
use tonic::Code;

use super::caller::{Behalf, Caller};
use super::text;
use crate::access::Verb;
use crate::pace::{self, Held, Rate};
use crate::sys::logging::{self, Lines};

/// Rate of denials of one caller; for a guest, which repeats failed calls, the rate of all failed calls.
const IN_VAIN: Rate = Rate { burst: 20, again: Duration::from_secs(1) };
/// Rate of successful calls of one guest.
const OF_A_GUEST: Rate = Rate { burst: 256, again: Duration::from_millis(100) };
/// Number of callers with a rate limit of their own. Any others share one.
const MOST_CALLERS: usize = 1024;
/// Time after which the state of an idle caller is removed.
const IDLE: Duration = Duration::from_secs(60);
/// Records that wait to be written to the file.
const QUEUE: usize = 1024;
/// Time that the program waits at its end for the file to be written.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Writer of audit records; clones share its state.
#[derive(Debug, Clone)]
pub struct Audit(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    host: String,
    file: Option<(PathBuf, Lines)>,
    callers: Mutex<Callers>,
}

/// Rate limits, by caller and by whether the calls failed.
type Callers = BTreeMap<(String, bool), Held>;

/// Subject of an audit record.
#[derive(Debug)]
pub struct What {
    /// Verb of the request.
    pub verb: &'static Verb,
    /// Name of the VM; empty if the call is for none.
    pub vm: String,
    /// Disk or volume that the call is for; empty if it is for none.
    pub subject: String,
}

/// Call in progress. Its record is written when it ends; a dropped entry is recorded as `CANCELLED`.
#[derive(Debug)]
pub struct Entry {
    audit: Audit,
    behalf: Behalf,
    what: What,
    begun: Instant,
    is_over: bool,
}

impl Entry {
    /// Ends the call with this code, and writes its record.
    pub fn end(mut self, code: Code) {
        self.is_over = true;
        self.audit.record(&self.behalf, &self.what, Some(self.begun.elapsed()), code);
    }
}

impl Entry {
    /// Replaces the subject of the record, once it is known more precisely than at the beginning.
    pub fn about(&mut self, subject: String) {
        self.what.subject = subject;
    }

    /// Records the call as denied, where that was only decided after it had begun.
    pub fn denied(mut self) {
        self.is_over = true;
        self.audit.denied(&self.behalf, &self.what);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if !self.is_over {
            self.audit.record(&self.behalf, &self.what, Some(self.begun.elapsed()), Code::Cancelled);
        }
    }
}

/// Line of the file. Keys are part of the interface: they may be added, but never changed. Guests write the same
/// keys.
#[derive(Debug, Serialize)]
struct Line<'l> {
    time: String,
    side: &'static str,
    host: &'l str,
    #[serde(flatten)]
    told: Told<'l>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Told<'l> {
    Record {
        id: &'l str,
        caller: &'l str,
        role: &'l str,
        verb: &'l str,
        subject: &'l str,
        vm: &'l str,
        decision: &'l str,
        result: &'l str,
        duration_usec: u64,
    },
    /// Number of records of one caller that were left out by its rate limit.
    More { caller: &'l str, more: u64 },
    /// Number of records that could not be written to the file.
    Lost { lost: u64 },
}

impl Audit {
    /// Creates an audit log of the host with this name, in the journal alone.
    pub fn new(host: &str) -> Self {
        Self(Arc::new(Inner { host: host.to_owned(), file: None, callers: Mutex::default() }))
    }

    /// Creates an audit log of the host with this name, in the journal and in a file.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn with_file(host: &str, path: &Path) -> io::Result<Self> {
        let file = Some((path.to_owned(), Lines::start(path, QUEUE)?));
        Ok(Self(Arc::new(Inner { host: host.to_owned(), file, callers: Mutex::default() })))
    }

    /// Returns the path of the file, if there is one.
    pub fn file(&self) -> Option<&Path> {
        self.0.file.as_ref().map(|(path, _)| path.as_path())
    }

    /// Begins the record of a call. It is written when the entry ends or is dropped.
    pub fn begin(&self, behalf: &Behalf, what: What) -> Entry {
        let (audit, behalf) = (self.clone(), behalf.clone());
        Entry { audit, behalf, what, begun: Instant::now(), is_over: false }
    }

    /// Records that a call was denied.
    pub fn denied(&self, behalf: &Behalf, what: &What) {
        self.record(behalf, what, None, Code::PermissionDenied);
    }

    /// Writes a record, unless the rate limit of its caller is exceeded. A call without a duration was denied.
    fn record(&self, behalf: &Behalf, what: &What, took: Option<Duration>, code: Code) {
        let caller = text::clean(&behalf.caller().to_string());
        let is_guest = matches!(behalf.caller(), Caller::Guest(_) | Caller::Told(_));
        let is_in_vain = took.is_none() || is_guest && code != Code::Ok;
        if !self.admit(behalf.caller(), &caller, is_in_vain, Instant::now()) {
            return;
        }
        let (vm, subject) = (text::clean(&what.vm), text::clean(&what.subject));
        let (decision, result) = (if took.is_some() { "allowed" } else { "denied" }, name(code));
        let Verb { words, role, .. } = what.verb;
        let duration_usec = u64::try_from(took.unwrap_or_default().as_micros()).unwrap_or(u64::MAX);
        let uid = match behalf.caller() {
            Caller::User { uid, .. } => uid.to_string(),
            Caller::Guest(_) | Caller::Told(_) => String::new(),
        };
        let about =
            [&vm, &subject].into_iter().filter(|part| !part.is_empty()).map(|part| format!(" {part:?}"));
        let line = format!("audit: {caller}: {words}{}: {decision}, {result}", about.collect::<String>());
        logging::record(
            &line,
            &[
                ("GUESTLET_AUDIT_ID", behalf.id()),
                ("GUESTLET_CALLER", &caller),
                ("GUESTLET_UID", &uid),
                ("GUESTLET_VM", &vm),
                ("GUESTLET_ROLE", role.name()),
                ("GUESTLET_VERB", words),
                ("GUESTLET_SUBJECT", &subject),
                ("GUESTLET_DECISION", decision),
                ("GUESTLET_RESULT", result),
                ("GUESTLET_DURATION_USEC", &duration_usec.to_string()),
            ],
        );
        let (caller, subject, vm) = (caller.as_str(), subject.as_str(), vm.as_str());
        let (id, role, verb) = (behalf.id(), role.name(), *words);
        self.write(Told::Record { id, caller, role, verb, subject, vm, decision, result, duration_usec });
    }

    fn write(&self, told: Told<'_>) {
        let Some((_, file)) = &self.0.file else { return };
        let time = logging::timestamp(SystemTime::now());
        let line = Line { time, side: "host", host: &self.0.host, told };
        // Serialization cannot fail: a line consists of strings and numbers only.
        if let Ok(line) = serde_json::to_string(&line) {
            // Lines that do not fit into the queue are counted there.
            file.append(line + "\n");
        }
    }

    /// Returns whether the rate limit of this caller allows one more record. Successful calls of users are never
    /// limited.
    fn admit(&self, caller: &Caller, name: &str, is_in_vain: bool, now: Instant) -> bool {
        let rate = match caller {
            _ if is_in_vain => IN_VAIN,
            Caller::User { .. } => return true,
            Caller::Guest(_) | Caller::Told(_) => OF_A_GUEST,
        };
        let mut callers = self.callers();
        let key = (name.to_owned(), is_in_vain);
        let is_known = callers.contains_key(&key) || callers.len() < MOST_CALLERS;
        let held = callers.entry(if is_known { key } else { ("others".to_owned(), is_in_vain) });
        held.or_insert_with(|| Held::new(now)).admit(rate, now)
    }

    /// Reports the records that were left out or lost since the last time; returns how many were lost.
    pub fn settle(&self) -> u64 {
        let left_out = pace::settle(&mut self.callers(), IDLE, Instant::now());
        for ((caller, _), more) in left_out {
            let words =
                format!("audit: {caller}: {more} more were denied, or were too many, and are not recorded");
            logging::record(&words, &[("GUESTLET_CALLER", &caller)]);
            self.write(Told::More { caller: &caller, more });
        }
        let Some((path, file)) = &self.0.file else { return 0 };
        let lost = file.take_lost();
        if lost > 0 {
            tracing::warn!(lost, file = %path.display(), "audit records could not be written to their file");
            self.write(Told::Lost { lost });
        }
        lost
    }

    /// Waits for a moment until the queued records are written. Blocks; for the end of the program.
    pub fn finish(&self) {
        self.settle();
        if let Some((_, file)) = &self.0.file {
            file.finish(LAST_WORDS);
        }
    }

    fn callers(&self) -> MutexGuard<'_, Callers> {
        // A panic under the lock cannot leave the map half changed.
        self.0.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the name of a gRPC code.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denials_of_a_user_are_bounded_and_what_is_done_is_not() {
        let (audit, now) = (Audit::new("host"), Instant::now());
        let user = |uid| Caller::User { uid, name: None };
        let admitted = |uid: u32, is_denied| {
            (0..100).filter(|_| audit.admit(&user(uid), &uid.to_string(), is_denied, now)).count()
        };
        assert_eq!((admitted(1, true), admitted(1, false), admitted(2, true)), (20, 100, 20));
        let left_out = || audit.callers().get_mut(&("1".to_owned(), true)).unwrap().take_left_out();
        assert_eq!(left_out(), 80);
        admitted(1, true);
        audit.settle();
        assert_eq!(left_out(), 0);
        let guest = Caller::Guest("a".into());
        let of_guest =
            |is_in_vain| (0..1000).filter(|_| audit.admit(&guest, "vm:a", is_in_vain, now)).count();
        assert_eq!((of_guest(false), of_guest(true)), (256, 20));
    }

    #[test]
    fn many_callers_cost_little() {
        let (audit, now) = (Audit::new("host"), Instant::now());
        for uid in 0..5000 {
            audit.admit(&Caller::User { uid, name: None }, &uid.to_string(), true, now);
        }
        assert_eq!(audit.callers().len(), MOST_CALLERS + 1);
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn a_caller_cannot_forge_a_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.json");
        let audit = Audit::with_file("host", &path).unwrap();
        let behalf = Behalf::of(Caller::User { uid: 1, name: Some("me\n{}".into()) });
        let subject = format!("a\n{{\"id\":\"forged\"}}{}", "x".repeat(10_000));
        audit
            .begin(&behalf, What { verb: &crate::access::verb::PING, vm: "b\u{1b}[31m".into(), subject })
            .end(Code::Ok);
        audit.finish();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.len() < 2000 && !text.contains('\u{1b}'), "{text}");
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&line["id"], &line["vm"]), (&behalf.id().into(), &"b\u{fffd}[31m".into()));
    }
}
