//! Reader of the systemd journal, through journalctl: it continues from a position that an earlier answer has
//! returned, so that nothing is left out or read twice. Nothing is kept between calls.
//!
//! ```text
//! question, place ──▶ journalctl --output=export ──▶ export::Reader ──▶ entries, the next place
//!                       └─ waits with --follow, for as long as requested
//! ```

mod export;

use std::time::{Duration, SystemTime};

use tokio::io::AsyncReadExt as _;
use tokio::time::Instant;

pub use export::Entry;

use crate::sys::program::{self, Reading};

/// Program that reads the journal.
const JOURNALCTL: &str = "/usr/bin/journalctl";
/// Maximum number of entries of an answer.
const MOST_ENTRIES: usize = 1000;
/// Number of bytes after which an answer gets no further entry. Together with the last entry it is still within
/// the limit of host halves.
const MOST_BYTES: usize = 96 << 10;
/// Maximum number of units of a question, and of bytes of each.
const MOST_UNITS: usize = 16;
const MOST_UNIT: usize = 256;
/// Maximum length of a cursor in bytes.
const MOST_CURSOR: usize = 512;
/// Maximum number of entries that journalctl accepts for `--lines`.
const MOST_LINES: u32 = i32::MAX as u32;
/// Timeout for finding entries when not waiting for new ones.
const LOOK: Duration = Duration::from_secs(30);
/// Time for which reading continues after a new entry has arrived, so that entries written together are returned
/// together.
const TOGETHER: Duration = Duration::from_millis(50);
/// Longest wait for new entries that a question may ask for.
pub const LONGEST_WAIT: Duration = Duration::from_secs(20);
/// Option that limits the output to these fields, for versions of journalctl that support it.
const FIELDS: &str = "--output-fields=MESSAGE,PRIORITY,SYSLOG_IDENTIFIER,_COMM,_PID,_SYSTEMD_UNIT,UNIT";

/// Selection of the entries to read.
#[derive(Debug, Clone, Default)]
pub struct Question {
    /// Units to select; all if empty.
    pub units: Vec<String>,
    /// Position to continue from; empty to begin.
    pub cursor: String,
    /// Earliest time of the entries.
    pub since: Option<SystemTime>,
    /// Maximum number of entries: only the newest ones are returned.
    pub last: Option<u32>,
    /// Least urgent priority to select, from 0 to 7.
    pub priority: Option<u32>,
    /// Time to wait for an entry if none is present; zero to return at once.
    pub wait: Duration,
}

/// Result of a read.
#[derive(Debug, Default)]
pub struct Answer {
    /// Entries, the oldest first.
    pub entries: Vec<Entry>,
    /// Position to continue from; empty if the journal has no entries at all.
    pub cursor: String,
    /// True if the journal already has more entries.
    pub has_more: bool,
    /// True if the journal no longer has the entry that the question continues from, so that others may be missing.
    pub has_gap: bool,
}

/// Reason why nothing was read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name of a unit is malformed.
    #[error("{0:?} is not the name of a unit: use letters, digits and :-_.\\@")]
    Unit(String),
    /// The question has too many units.
    #[error("{0} units are given; at most {MOST_UNITS} are allowed")]
    Units(usize),
    /// The cursor is malformed: no answer has returned it.
    #[error("the cursor is not one that ReadJournal returned")]
    Cursor,
    /// The priority is above 7.
    #[error("{0} is not a priority: use 0 to 7")]
    Priority(u32),
    /// The time is before 1970, which journalctl does not accept.
    #[error("the time is before 1970")]
    Since,
    /// The guest has no journalctl, and so no journal.
    #[error("the guest has no {JOURNALCTL}: its logs are not in a systemd journal")]
    Missing,
    /// No entry was found before the timeout.
    #[error("no entry was found within {} s: ask for a shorter time, or for other units", LOOK.as_secs())]
    Slow,
    /// journalctl could not be started, or failed.
    #[error(transparent)]
    Program(#[from] program::Error),
    /// The output of journalctl is not in the export format.
    #[error(transparent)]
    Malformed(#[from] export::Malformed),
    /// The output of journalctl cannot be read.
    #[error("cannot read the output of journalctl")]
    Read(#[source] std::io::Error),
}

/// Position in the journal.
#[derive(Debug, PartialEq, Eq)]
enum Place<'a> {
    /// Position after an entry that matches the question.
    Entry(&'a str),
    /// Position after an entry of any kind, which need not match the question.
    Any(&'a str),
}

impl<'a> Place<'a> {
    /// Parses a position in the form that an answer returns.
    fn parse(text: &'a str) -> Result<Self, Error> {
        let (kind, cursor) = text.split_at_checked(1).ok_or(Error::Cursor)?;
        let is_sound = (1..=MOST_CURSOR).contains(&cursor.len())
            && cursor.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"=;-:".contains(&byte));
        match kind {
            "=" if is_sound => Ok(Self::Entry(cursor)),
            "~" if is_sound => Ok(Self::Any(cursor)),
            _ => Err(Error::Cursor),
        }
    }

    fn cursor(&self) -> &'a str {
        match self {
            Self::Entry(cursor) | Self::Any(cursor) => cursor,
        }
    }
}

/// Returns the arguments of journalctl that select entries.
fn matches(question: &Question) -> Result<Vec<String>, Error> {
    if question.units.len() > MOST_UNITS {
        return Err(Error::Units(question.units.len()));
    }
    let mut arguments = Vec::new();
    for unit in &question.units {
        let is_sound = (1..=MOST_UNIT).contains(&unit.len())
            && unit.bytes().all(|byte| byte.is_ascii_alphanumeric() || b":-_.\\@".contains(&byte));
        if !is_sound {
            return Err(Error::Unit(unit.chars().take(MOST_UNIT).collect()));
        }
        arguments.push(format!("--unit={unit}"));
    }
    match question.priority {
        Some(level) if level > 7 => return Err(Error::Priority(level)),
        Some(level) => arguments.push(format!("--priority={level}")),
        None => {}
    }
    Ok(arguments)
}

/// Reads the entries that match, or waits for one if none does yet.
///
/// # Errors
/// If the question is invalid, or the journal cannot be read.
pub async fn read(question: &Question) -> Result<Answer, Error> {
    let matches = matches(question)?;
    if question.cursor.is_empty() { begin(question, matches).await } else { go_on(question, matches).await }
}

/// Reads the entries after the position of the question.
async fn go_on(question: &Question, mut arguments: Vec<String>) -> Result<Answer, Error> {
    let place = Place::parse(&question.cursor)?;
    arguments.push(format!("--cursor={}", place.cursor()));
    let mut answer = collect(arguments, Some(&place), question.wait).await?;
    // A journal that was restored from a backup has no entries after the position until it has grown past it. So check
    // that the entry at the position still exists.
    let is_unsure = answer.entries.is_empty() || matches!(place, Place::Any(_));
    if is_unsure && !is_there(&place).await? {
        answer.has_gap = true;
        if answer.entries.is_empty() {
            answer.cursor = end().await?;
        }
    }
    if answer.cursor.is_empty() && !answer.has_gap {
        answer.cursor.clone_from(&question.cursor);
    }
    Ok(answer)
}

/// Returns whether the journal still has the entry at this position.
async fn is_there(place: &Place<'_>) -> Result<bool, Error> {
    let arguments = vec![format!("--cursor={}", place.cursor()), "--lines=1".to_owned()];
    let first = collect(arguments, None, Duration::ZERO).await?.entries.pop();
    Ok(first.is_some_and(|entry| is_same(&entry.cursor, place.cursor())))
}

/// Returns whether two cursors denote the same entry. The part before the boot ID names the file and the position
/// in it: that changes when journald moves its journal from memory to the disk, so it is not compared.
fn is_same(one: &str, other: &str) -> bool {
    let [one, other] = [one, other].map(|cursor| cursor.split_once(";b=").map_or(cursor, |(_, rest)| rest));
    one == other
}

/// Answers a question without a position.
async fn begin(question: &Question, mut arguments: Vec<String>) -> Result<Answer, Error> {
    // Taken first, so that an answer without entries has a position as well: without one, the next call could not tell
    // new entries from those that were present.
    let end = end().await?;
    if question.last == Some(0) {
        return Ok(Answer { cursor: end, ..Answer::default() });
    }
    if let Some(since) = question.since {
        let since = since.duration_since(SystemTime::UNIX_EPOCH).map_err(|_| Error::Since)?;
        // Given both options, journalctl before 254 returns the oldest entries since that time. So pass only one here, and
        // drop the older entries below.
        if question.last.is_none() {
            arguments.push(format!("--since=@{}.{:06}", since.as_secs(), since.subsec_micros()));
        }
    }
    if let Some(last) = question.last {
        arguments.push(format!("--lines={}", last.min(MOST_LINES)));
    }
    let wait = if end.is_empty() { question.wait } else { Duration::ZERO };
    let mut answer = collect(arguments, None, wait).await?;
    if question.last.is_some() {
        answer.entries.retain(|entry| question.since.is_none_or(|since| entry.time >= Some(since)));
    }
    if answer.cursor.is_empty() {
        answer.cursor = end;
    }
    Ok(answer)
}

/// Returns the position of the newest entry of any unit; empty if the journal has no entries.
async fn end() -> Result<String, Error> {
    let newest = collect(vec!["--lines=1".to_owned()], None, Duration::ZERO).await?.entries.pop();
    Ok(newest.map(|entry| format!("~{}", entry.cursor)).unwrap_or_default())
}

/// Runs journalctl until it ends, has returned enough entries, or the time is over. Without matching entries it
/// waits for one, for up to `wait`.
async fn collect(arguments: Vec<String>, place: Option<&Place<'_>>, wait: Duration) -> Result<Answer, Error> {
    let follows = !wait.is_zero();
    let limit = if follows { wait.min(LONGEST_WAIT) } else { LOOK };
    let mut all = vec!["--no-pager", "--quiet", "--all", "--output=export", FIELDS];
    all.extend(arguments.iter().map(String::as_str));
    if follows {
        all.extend(["--follow", "--no-tail"]);
    }
    let mut reading = program::start_reading(JOURNALCTL, &all).await.map_err(|error| match error {
        program::Error::Start { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            Error::Missing
        }
        error => Error::Program(error),
    })?;
    let (mut answer, mut bytes, mut is_first) = (Answer::default(), 0, true);
    let mut until = Instant::now() + limit;
    let mut reader = export::Reader::default();
    let mut buffer = vec![0; 32 << 10];
    loop {
        let read = match tokio::time::timeout_at(until, reading.output.read(&mut buffer)).await {
            Ok(read) => read.map_err(Error::Read)?,
            // Timeout: the next call continues from the last entry.
            Err(_) if follows || !answer.entries.is_empty() => {
                answer.has_more = !follows;
                return Ok(answer);
            }
            Err(_) => return Err(Error::Slow),
        };
        if read == 0 {
            return ended(reading, answer, follows).await;
        }
        let mut rest = &buffer[..read];
        while !rest.is_empty() {
            let (taken, entry) = reader.read(rest)?;
            rest = &rest[taken..];
            let Some(entry) = entry else { continue };
            if std::mem::take(&mut is_first)
                && let Some(place) = place
            {
                if is_same(&entry.cursor, place.cursor()) {
                    continue;
                }
                answer.has_gap = matches!(place, Place::Entry(_));
            }
            if answer.entries.len() >= MOST_ENTRIES || bytes >= MOST_BYTES {
                answer.has_more = true;
                return Ok(answer);
            }
            bytes += entry.message.len() + entry.identifier.len() + entry.unit.len() + 64;
            answer.cursor = format!("={}", entry.cursor);
            answer.entries.push(entry);
            if follows {
                until = until.min(Instant::now() + TOGETHER);
            }
        }
    }
}

/// Returns the answer after journalctl has ended by itself.
async fn ended(reading: Reading, answer: Answer, follows: bool) -> Result<Answer, Error> {
    reading.end(JOURNALCTL).await?;
    if follows && answer.entries.is_empty() {
        // journalctl ends by itself when its journal is deleted. The client will ask again: do not let it do so in a tight
        // loop.
        tokio::time::sleep(TOGETHER).await;
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_what_an_answer_has_said() {
        assert_eq!(Place::parse("=s=ab;i=1").unwrap(), Place::Entry("s=ab;i=1"));
        assert_eq!(Place::parse("~s=ab").unwrap(), Place::Any("s=ab"));
        for wrong in ["", "=", "s=ab", "=--since=x y", "~a\n", "é"] {
            assert!(Place::parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_entry_is_the_same_in_another_file() {
        let [a, b] = ["s=1a;i=2f;b=c0;m=4;t=5;x=6", "s=77;i=1;b=c0;m=4;t=5;x=6"];
        assert!(is_same(a, b) && is_same("s=ab", "s=ab"));
        assert!(!is_same(a, "s=1a;i=2f;b=c0;m=4;t=6;x=6") && !is_same(a, "s=1a;i=2f"));
    }

    #[test]
    fn units_are_no_options() {
        let of = |unit: &str| matches(&Question { units: vec![unit.to_owned()], ..Question::default() });
        assert_eq!(of("ssh.service").unwrap(), ["--unit=ssh.service"]);
        // Patterns are refused: journalctl resolves one only once, so that entries of units added later would be missed.
        for wrong in ["", "getty@*", "a b", "a\0", "a/b"] {
            assert!(of(wrong).is_err(), "{wrong:?}");
        }
        let many = Question { units: vec!["a".to_owned(); 17], ..Question::default() };
        assert!(matches(&many).is_err());
        assert!(matches(&Question { priority: Some(8), ..Question::default() }).is_err());
    }
}
