//! What was asked of this guest, by whom, and what came of it: one record for each verb that changes something, for each
//! that is denied, and for each that would be.
//!
//! ```text
//! protocol ──▶ Record ──▶ the log, with fields for journald
//!                  └────▶ a file of JSON lines, if the settings name one
//! ```
//!
//! A record never has what a file or a program's output contains, no arguments, no environment and no secret. Records of
//! what was carried out are all written; of denials only so many, and the next one says how many were left out.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use ring::rand::{SecureRandom as _, SystemRandom};
use serde_json::json;

use crate::policy::role::Role;
use crate::policy::rules::{Mode, Who};
use crate::sys::logging;

/// Characters of a client's words in a record.
const MAX_WORDS: usize = 256;
/// Records that wait to be written to the file.
const QUEUE: usize = 256;
/// Denials that are written down at once, and how long it takes until there may be one more.
const BURST: u32 = 20;
const AGAIN: Duration = Duration::from_secs(1);
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
        let more = if more > 0 { format!(" (and {more} more were denied before)") } else { String::new() };
        format!("audit: {peer}: {}{subject}: {decision}{more}", self.verb)
    }
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
    file: Option<logging::Lines>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    denials: Denials,
    /// Denials that the file does not have, and records that it has lost.
    more: u64,
    lost: u64,
    /// What was done at least once.
    uses: BTreeSet<(String, String, Role)>,
}

/// How many denials were written down, and how many were not.
#[derive(Debug, Default)]
struct Denials {
    since: Option<Instant>,
    written: u32,
    unsaid: u64,
}

impl Denials {
    /// Whether one more is written down.
    fn admit(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        let passed =
            u32::try_from(now.duration_since(since).as_millis() / AGAIN.as_millis()).unwrap_or(u32::MAX);
        if passed > 0 {
            self.written = self.written.saturating_sub(passed);
            self.since = Some(now);
        }
        if self.written < BURST {
            self.written += 1;
            return true;
        }
        self.unsaid += 1;
        false
    }
}

impl Audit {
    /// Records go to the log, and to `file` if there is one: appended, for root alone if it is new.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn start(mode: Mode, file: Option<&Path>) -> io::Result<Self> {
        let file = file.map(|file| logging::Lines::start(file, QUEUE)).transpose()?;
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
        let mut state = self.state();
        if record.noted.denied.get().is_some() && !state.denials.admit(Instant::now()) {
            state.more += 1;
            return;
        }
        let more = std::mem::take(&mut state.denials.unsaid);
        let id = record.id.unwrap_or_else(Id::random);
        let subject = record.noted.path.get().or(record.noted.subject.get());
        let subject = subject.map(|subject| printable(subject)).unwrap_or_default();
        // What was asked for, if that is not what it turned out to be.
        let given = record.noted.path.get().and(record.noted.subject.get());
        let given = given.map(|given| printable(given)).filter(|given| *given != subject).unwrap_or_default();
        let role = record.noted.role.get().copied().unwrap_or(record.role);
        let reason = record.noted.denied.get().or(record.noted.would_deny.get());
        let (host, caller, result) =
            (record.who.to_string(), printable(record.caller), printable(record.result));
        let micro = u64::try_from(record.took.as_micros()).unwrap_or(u64::MAX);
        if let Some(file) = &self.0.file {
            let line = json!({
                "time": logging::timestamp(SystemTime::now()),
                "id": id.to_string(),
                "host": host,
                "caller": caller,
                "role": role.word(),
                "verb": record.verb,
                "subject": subject,
                "given": given,
                "decision": record.decision(),
                "reason": reason.map(|reason| printable(reason)).unwrap_or_default(),
                "result": result,
                "duration_usec": micro,
                "more_denied_before": state.more,
                "lost_before": state.lost,
            });
            if file.append(format!("{line}\n")) {
                (state.more, state.lost) = (0, 0);
            } else {
                state.lost += 1;
            }
        }
        drop(state);
        logging::record(
            &record.line(more),
            &[
                ("GUESTLET_AUDIT_ID", &id.to_string()),
                ("GUESTLET_HOST", &host),
                ("GUESTLET_CALLER", &caller),
                ("GUESTLET_ROLE", role.word()),
                ("GUESTLET_VERB", record.verb),
                ("GUESTLET_SUBJECT", &subject),
                ("GUESTLET_GIVEN", &given),
                ("GUESTLET_DECISION", record.decision()),
                ("GUESTLET_RESULT", &result),
                ("GUESTLET_DURATION_USEC", &micro.to_string()),
            ],
        );
    }

    /// Says how many denials were left out, if there were any: nothing may follow them.
    pub fn tick(&self) {
        let mut state = self.state();
        let more = std::mem::take(&mut state.denials.unsaid);
        drop(state);
        if more > 0 {
            logging::record(&format!("audit: {more} more calls were denied"), &[]);
        }
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

    #[test]
    fn of_many_denials_some_are_written_and_the_others_counted() {
        let mut denials = Denials::default();
        let now = Instant::now();
        let admitted = (0..1000).filter(|_| denials.admit(now)).count();
        assert_eq!((admitted, denials.unsaid), (20, 980));
        let later = now + 3 * AGAIN;
        assert_eq!((0..10).filter(|_| denials.admit(later)).count(), 3);
    }
}
