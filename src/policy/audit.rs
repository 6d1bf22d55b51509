//! Audit records: which calls were made on this guest, by whom, and with which result. There is one record for
//! each verb that changes something, for each that is denied, and for each that would be denied.
//!
//! ```text
//! protocol ──▶ Record ──▶ the log, with fields for journald
//!                  └────▶ a file of JSON lines, if the settings name one
//! ```
//!
//! A record never contains the contents of a file, a program's output, arguments, environment or secrets. Calls
//! that were carried out are always recorded. Denials are recorded at a limited rate
//! ([`denials`](super::denials)); the next record of the same kind, or a line of its own, says how many were left
//! out.

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

/// Maximum number of characters of a client's text in a record.
const MAX_WORDS: usize = 256;
/// Maximum number of records that wait to be written to the file.
const QUEUE: usize = 256;
/// Role and verb in the record of a refused connection.
const SESSION: &str = "session";
const CONNECT: &str = "connect";
/// Maximum number of distinct uses that are remembered while nothing is enforced.
const MAX_USES: usize = 1024;

/// Identifier of a call, by which the records of both ends can be joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id(u128);

impl Id {
    /// Parses 32 hexadecimal digits.
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| u128::from_str_radix(text, 16).ok().map(Self)).flatten()
    }

    /// Generates a new identifier.
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        // The identifier protects nothing, so a failure is harmless: all records then have the same one.
        let _ = SystemRandom::new().fill(&mut bytes);
        Self(u128::from_be_bytes(bytes))
    }
}

impl std::fmt::Display for Id {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

/// Details of a call that are known only while it is carried out, and set by the code that does so.
#[derive(Debug, Default)]
pub struct Noted {
    /// Object of the call, such as the path of a program, as the client wrote it.
    pub subject: OnceLock<String>,
    /// Path with every link resolved.
    pub path: OnceLock<String>,
    /// Role that the call needed, if not that of its verb.
    pub role: OnceLock<Role>,
    /// Reason why the call was denied.
    pub denied: OnceLock<String>,
    /// Reason why the call would be denied if the grants were enforced.
    pub would_deny: OnceLock<String>,
}

/// Call that has ended, to be recorded.
#[derive(Debug)]
pub struct Record<'a> {
    /// Identifier of the call, if the host half gave it one.
    pub id: Option<Id>,
    /// Client that made the call.
    pub who: Who<'a>,
    /// User that the client acts for; for QGA, the client.
    pub caller: &'a str,
    /// Role of the verb.
    pub role: Role,
    /// Name of the verb.
    pub verb: &'a str,
    /// Details that were set while the call was carried out.
    pub noted: &'a Noted,
    /// Result in words; `done` on success.
    pub result: &'a str,
    /// Duration of the call.
    pub took: Duration,
}

impl Record<'_> {
    /// Returns the decision in one word: `allowed`, `denied` or `would-deny`.
    fn decision(&self) -> &'static str {
        match (self.noted.denied.get(), self.noted.would_deny.get()) {
            (Some(_), _) => "denied",
            (None, Some(_)) => "would-deny",
            (None, None) => "allowed",
        }
    }

    /// Formats the record as one line for users.
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

/// Escapes control characters and limits the length, so that a record stays one line of the log whatever a client
/// sends.
pub fn printable(words: &str) -> String {
    let mut text = String::new();
    for character in words.chars().take(MAX_WORDS) {
        if character.is_control() { text.extend(character.escape_default()) } else { text.push(character) }
    }
    text
}

/// Destinations of the records; clones share them.
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
    /// Uses seen at least once: host, caller and role.
    uses: BTreeSet<(String, String, Role)>,
}

/// Connection that was refused.
#[derive(Debug, Clone, Copy)]
pub struct Refusal<'a> {
    /// Name of the peer: the channel, and the address it connected from.
    pub peer: &'a str,
    /// Fingerprint of the key that the peer showed, or `plain` if it had none; empty if unknown.
    pub host: &'a str,
    /// Keyword for the reason; refusals are counted separately for each.
    pub kind: &'static str,
    /// Reason, as text for users.
    pub why: &'a str,
}

/// Fields of one record, of a call or of a connection.
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
    /// Number of earlier denials of the same kind that were not recorded.
    more: u64,
}

impl Audit {
    /// Starts recording, to the log and to `file` if there is one. The file is appended to; a new one is accessible to
    /// root only.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn start(mode: Mode, file: Option<&Path>) -> io::Result<Self> {
        let open = |file: &Path| io::Result::Ok((file.to_owned(), logging::Lines::start(file, QUEUE)?));
        let file = file.map(open).transpose()?;
        Ok(Self(Arc::new(Inner { mode, file, state: Mutex::default() })))
    }

    /// Returns whether a call that changes nothing is to be recorded as well. While nothing is enforced, the first one
    /// of each kind is, so that grants can be derived from the records.
    pub fn is_new(&self, who: &Who<'_>, caller: &str, role: Role) -> bool {
        if self.0.mode != Mode::Audit {
            return false;
        }
        let uses = &mut self.state().uses;
        uses.len() < MAX_USES && uses.insert((who.to_string(), caller.to_owned(), role))
    }

    /// Records a call that has ended.
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
        // The path as the client wrote it, if it resolves to a different one.
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

    /// Records that a connection was refused.
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

    /// Reports how many denials were left out and how many records were lost. Called regularly, because no further
    /// record may follow that would report it.
    pub fn tick(&self) {
        let left_out = self.state().denials.settle(Instant::now());
        for (of, more) in left_out {
            // Refused connections have the keyword of the reason in the place of the role.
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

    /// Writes a line that reports on `records` records; if the line is lost, that many count as lost.
    fn tell(&self, mut told: serde_json::Value, records: u64) {
        let Some((_, file)) = &self.0.file else { return };
        told["time"] = logging::timestamp(SystemTime::now()).into();
        file.append_counting(format!("{told}\n"), records);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No update under the lock can be left half done, so a poisoned lock is safe to use.
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

    /// With /dev/full each line is lost, and so is its report on the records before.
    #[test]
    fn records_that_are_lost_on_a_full_disk_are_all_counted() {
        let audit = Audit::start(Mode::Enforce, Some(Path::new("/dev/full"))).unwrap();
        let (_, file) = audit.0.file.as_ref().unwrap();
        let refusal = Refusal { peer: "vsock 2:1", host: "plain", kind: "plain", why: "it has no key" };
        for _ in 0..30 {
            audit.refused(&refusal);
            assert!(file.finish(Duration::from_secs(20)));
        }
        // The tick reports the denials that were left out, and that line is lost as well.
        audit.tick();
        assert!(file.finish(Duration::from_secs(20)));
        audit.tick();
        assert!(file.finish(Duration::from_secs(20)));
        assert_eq!(file.take_lost(), 30);
    }
}
