//! What was asked of this guest, by whom, and what came of it: one record for each verb that changes something, for each
//! that is denied, and for each that would be.
//!
//! ```text
//! protocol ──▶ Record ──▶ the log, with fields for journald
//!                  └────▶ a file of JSON lines, if the settings name one
//! ```
//!
//! A record never has what a file or a program's output contains, no arguments, no environment and no secret. Records of
//! what was carried out are all written; of denials only so many ([`denials`](super::denials)), and the next one of the same kind, or a
//! line of its own, says how many were left out.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use ring::rand::{SecureRandom as _, SystemRandom};
use serde_json::json;
use tokio::time::Instant;

use crate::policy::denials::{Denials, Of};
use crate::policy::role::Role;
use crate::policy::rules::{Mode, Who};
use crate::sys::logging;

/// Characters of a client's words in a record.
const MAX_WORDS: usize = 256;
/// Records that wait to be written to the file.
const QUEUE: usize = 256;
/// In the place of a role and of a verb: a connection that was not let in.
const SESSION: &str = "session";
const CONNECT: &str = "connect";
/// Different uses that are told apart while nothing is enforced.
const MAX_USES: usize = 1024;

/// The number of a call, by which the records of both ends are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id(u128);

impl Id {
    /// Reads 32 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| u128::from_str_radix(text, 16).ok().map(Self)).flatten()
    }

    /// A new one.
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        // It names a record, and protects nothing: without random numbers all records have the same name.
        let _ = SystemRandom::new().fill(&mut bytes);
        Self(u128::from_be_bytes(bytes))
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

/// What a call turned out to be about; told by what carries it out.
#[derive(Debug, Default)]
pub struct Noted {
    /// Such as the path of a program, in the client's words.
    pub subject: OnceLock<String>,
    /// The path when every link is followed.
    pub path: OnceLock<String>,
    /// The role that it needed, if not that of its verb.
    pub role: OnceLock<Role>,
    /// Why it was denied.
    pub denied: OnceLock<String>,
    /// Why it would have been.
    pub would_deny: OnceLock<String>,
}

/// One call.
#[derive(Debug)]
pub struct Record<'a> {
    /// Its number, if the host half gave it one.
    pub id: Option<Id>,
    /// Who called.
    pub who: Who<'a>,
    /// For whom; of QGA the client.
    pub caller: &'a str,
    /// The role of the verb.
    pub role: Role,
    /// The verb.
    pub verb: &'a str,
    /// What it was about.
    pub noted: &'a Noted,
    /// How it ended, in words; `done` without a fault.
    pub result: &'a str,
    /// How long it took.
    pub took: Duration,
}

impl Record<'_> {
    /// `allowed`, `denied` or `would-deny`.
    fn decision(&self) -> &'static str {
        match (self.noted.denied.get(), self.noted.would_deny.get()) {
            (Some(_), _) => "denied",
            (None, Some(_)) => "would-deny",
            (None, None) => "allowed",
        }
    }

    /// For people: one line.
    fn line(&self, more: u64) -> String {
        let peer = match self.who {
            Who::Qga => printable(self.caller),
            Who::Plain { .. } => with_caller("the host half", self.caller),
            Who::Keyed(keyed) => with_caller(&format!("the host half {}", keyed.fingerprint), self.caller),
        };
        let subject = self.noted.subject.get();
        let subject = subject.map(|subject| format!(" ({})", printable(subject))).unwrap_or_default();
        let decision = match (self.noted.denied.get(), self.noted.would_deny.get()) {
            (Some(why), _) => format!("denied: {}", printable(why)),
            (None, Some(why)) => format!("would be denied: {}: {}", printable(why), printable(self.result)),
            (None, None) => printable(self.result),
        };
        format!("audit: {peer}: {}{subject}: {decision}{}", self.verb, denied_before(more))
    }
}

fn denied_before(more: u64) -> String {
    if more > 0 { format!(" (and {more} more were denied before)") } else { String::new() }
}

fn with_caller(host: &str, caller: &str) -> String {
    if caller.is_empty() { host.to_owned() } else { format!("{host} for {}", printable(caller)) }
}

/// A line of the log stays one line, and of a bounded length, whatever a client says.
pub fn printable(words: &str) -> String {
    let mut text = String::new();
    for character in words.chars().take(MAX_WORDS) {
        if character.is_control() { text.extend(character.escape_default()) } else { text.push(character) }
    }
    text
}

/// Where records go; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Audit(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    mode: Mode,
    file: Option<(PathBuf, logging::Lines)>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    denials: Denials,
    /// What was done at least once.
    uses: BTreeSet<(String, String, Role)>,
}

/// A connection that was not let in.
#[derive(Debug, Clone, Copy)]
pub struct Refusal<'a> {
    /// Its name: the channel, and where it came from.
    pub peer: &'a str,
    /// The fingerprint of the key that it showed, or `plain` if it had none; empty if that is not known.
    pub host: &'a str,
    /// A word for why, which tells refusals apart that are counted by themselves.
    pub kind: &'static str,
    /// Why, for people.
    pub why: &'a str,
}

/// What is written of one call, or of one connection.
struct Entry<'a> {
    id: Id,
    host: &'a str,
    caller: &'a str,
    role: &'static str,
    verb: &'a str,
    subject: &'a str,
    given: &'a str,
    decision: &'static str,
    reason: &'a str,
    result: &'a str,
    took: Duration,
    /// So many of the same kind were denied before, and are not recorded.
    more: u64,
}

impl Audit {
    /// Records go to the log, and to `file` if there is one: appended, for root alone if it is new.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn start(mode: Mode, file: Option<&Path>) -> io::Result<Self> {
        let open = |file: &Path| io::Result::Ok((file.to_owned(), logging::Lines::start(file, QUEUE)?));
        let file = file.map(open).transpose()?;
        Ok(Self(Arc::new(Inner { mode, file, state: Mutex::default() })))
    }

    /// Whether a call that changes nothing is written down, too: while nothing is enforced, the first of each kind is, so
    /// that grants can be made from the records.
    pub fn is_new(&self, who: &Who<'_>, caller: &str, role: Role) -> bool {
        if self.0.mode != Mode::Audit {
            return false;
        }
        let uses = &mut self.state().uses;
        uses.len() < MAX_USES && uses.insert((who.to_string(), caller.to_owned(), role))
    }

    /// Writes down a call that has ended.
    pub fn record(&self, record: &Record<'_>) {
        let role = record.noted.role.get().copied().unwrap_or(record.role);
        let (host, caller, result) =
            (record.who.to_string(), printable(record.caller), printable(record.result));
        let more = match record.noted.denied.get() {
            None => 0,
            Some(_) => match self.admit(Of::new(&host, &caller, role.word())) {
                Some(more) => more,
                None => return,
            },
        };
        let subject = record.noted.path.get().or(record.noted.subject.get());
        let subject = subject.map(|subject| printable(subject)).unwrap_or_default();
        // What was asked for, if that is not what it turned out to be.
        let given = record.noted.path.get().and(record.noted.subject.get());
        let given = given.map(|given| printable(given)).filter(|given| *given != subject).unwrap_or_default();
        let reason = record.noted.denied.get().or(record.noted.would_deny.get());
        let entry = Entry {
            id: record.id.unwrap_or_else(Id::random),
            host: &host,
            caller: &caller,
            role: role.word(),
            verb: record.verb,
            subject: &subject,
            given: &given,
            decision: record.decision(),
            reason: &reason.map(|reason| printable(reason)).unwrap_or_default(),
            result: &result,
            took: record.took,
            more,
        };
        self.write(&record.line(more), &entry);
    }

    /// Writes down that a connection was not let in.
    pub fn refused(&self, refusal: &Refusal<'_>) {
        let Refusal { peer, host, kind, why } = *refusal;
        let (caller, reason) = (printable(peer), printable(why));
        let Some(more) = self.admit(Of::new(SESSION, host, kind)) else { return };
        let entry = Entry {
            id: Id::random(),
            host,
            caller: &caller,
            role: SESSION,
            verb: CONNECT,
            subject: "",
            given: "",
            decision: "denied",
            reason: &reason,
            result: "not begun",
            took: Duration::ZERO,
            more,
        };
        self.write(&format!("audit: {caller} is refused: {reason}{}", denied_before(more)), &entry);
    }

    fn admit(&self, of: Of) -> Option<u64> {
        self.state().denials.admit(of, Instant::now())
    }

    fn write(&self, line: &str, entry: &Entry<'_>) {
        let Entry { id, host, caller, role, verb, subject, given, decision, reason, result, took, more } =
            *entry;
        let micro = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        if let Some((_, file)) = &self.0.file {
            let lost = file.take_lost();
            let line = json!({
                "time": logging::timestamp(SystemTime::now()),
                "id": id.to_string(),
                "host": host,
                "caller": caller,
                "role": role,
                "verb": verb,
                "subject": subject,
                "given": given,
                "decision": decision,
                "reason": reason,
                "result": result,
                "duration_usec": micro,
                "more_denied_before": more,
                "lost_before": lost,
            });
            file.append_counting(format!("{line}\n"), 1 + more + lost);
        }
        logging::record(
            line,
            &[
                ("GUESTLET_AUDIT_ID", &id.to_string()),
                ("GUESTLET_HOST", host),
                ("GUESTLET_CALLER", caller),
                ("GUESTLET_ROLE", role),
                ("GUESTLET_VERB", verb),
                ("GUESTLET_SUBJECT", subject),
                ("GUESTLET_GIVEN", given),
                ("GUESTLET_DECISION", decision),
                ("GUESTLET_RESULT", result),
                ("GUESTLET_DURATION_USEC", &micro.to_string()),
            ],
        );
    }

    /// Says how many denials were left out and how many records were lost, if there were any: nothing may follow them.
    pub fn tick(&self) {
        let left_out = self.state().denials.settle(Instant::now());
        for (of, more) in left_out {
            // Of connections, what was denied is told apart by why.
            let (host, caller, role) = match (of.who.as_str(), of.caller.as_str()) {
                (SESSION, host) => (host, "", SESSION),
                (host, caller) => (host, caller, of.role),
            };
            let whom = if caller.is_empty() { host.to_owned() } else { format!("{host} for {caller}") };
            let words = format!("audit: {whom}: {more} more calls were denied ({})", of.role);
            logging::record(&words, &[("GUESTLET_HOST", host), ("GUESTLET_CALLER", caller)]);
            let told = json!({"host": host, "caller": caller, "role": role, "more_denied_before": more});
            self.tell(told, more);
        }
        let Some((path, file)) = &self.0.file else { return };
        let lost = file.take_lost();
        if lost > 0 {
            tracing::warn!("{lost} audit records could not be written to {}", path.display());
            self.tell(json!({"lost_before": lost}), lost);
        }
    }

    /// Writes a line that is no record; if it is lost, so many records are.
    fn tell(&self, mut told: serde_json::Value, records: u64) {
        let Some((_, file)) = &self.0.file else { return };
        told["time"] = logging::timestamp(SystemTime::now()).into();
        file.append_counting(format!("{told}\n"), records);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under the lock leaves it half changed.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_words_cannot_begin_a_line_of_the_log() {
        assert_eq!(printable("/bin/ls\naudit: root: fine"), "/bin/ls\\naudit: root: fine");
        assert_eq!(printable(&"x".repeat(1000)).len(), 256);
    }

    #[test]
    fn numbers_of_calls() {
        let id = Id::parse("00112233445566778899aabbccddeeFF").unwrap();
        assert_eq!(id.to_string(), "00112233445566778899aabbccddeeff");
        for wrong in ["", "0011", "+0112233445566778899aabbccddeeff", "00112233445566778899aabbccddeeff0"] {
            assert_eq!(Id::parse(wrong), None, "{wrong}");
        }
        assert_ne!(Id::random(), Id::random());
    }

    /// With /dev/full each line is lost, and so is what it says of those before.
    #[test]
    fn records_that_are_lost_on_a_full_disk_are_all_counted() {
        let audit = Audit::start(Mode::Enforce, Some(Path::new("/dev/full"))).unwrap();
        let (_, file) = audit.0.file.as_ref().unwrap();
        let refusal = Refusal { peer: "vsock 2:1", host: "plain", kind: "plain", why: "it has no key" };
        for _ in 0..30 {
            audit.refused(&refusal);
            assert!(file.finish(Duration::from_secs(20)));
        }
        // Those that were left out, too, once they are told.
        audit.tick();
        assert!(file.finish(Duration::from_secs(20)));
        audit.tick();
        assert!(file.finish(Duration::from_secs(20)));
        assert_eq!(file.take_lost(), 30);
    }
}
