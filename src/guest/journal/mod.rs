//! Reads the systemd journal, by journalctl: from a place in it that an earlier answer named, so that nothing is left out or read
//! twice. Nothing is kept between calls.
//!
//! ```text
//! question, place ──▶ journalctl --output=export ──▶ export::Reader ──▶ entries, the next place
//!                       └─ waits with --follow, for as long as it is wanted
//! ```

mod export;

use std::time::{Duration, SystemTime};

use tokio::io::AsyncReadExt as _;
use tokio::time::Instant;

pub use export::Entry;

use crate::sys::program::{self, Reading};

/// The program.
const JOURNALCTL: &str = "/usr/bin/journalctl";
/// Most entries of an answer.
const MOST_ENTRIES: usize = 1000;
/// Bytes after which an answer has no further entry: with the last one it is still within what host halves take.
const MOST_BYTES: usize = 96 << 10;
/// Most units of a question, and bytes of each.
const MOST_UNITS: usize = 16;
const MOST_UNIT: usize = 256;
/// Bytes of a cursor.
const MOST_CURSOR: usize = 512;
/// Most entries that journalctl can be asked for.
const MOST_LINES: u32 = i32::MAX as u32;
/// How long may be looked for entries.
const LOOK: Duration = Duration::from_secs(30);
/// What is written together is read together: so long after an entry that was waited for.
const TOGETHER: Duration = Duration::from_millis(50);
/// How long at most may be waited.
pub const LONGEST_WAIT: Duration = Duration::from_secs(20);
/// The fields that are read, where journalctl can leave out others.
const FIELDS: &str = "--output-fields=MESSAGE,PRIORITY,SYSLOG_IDENTIFIER,_COMM,_PID,_SYSTEMD_UNIT,UNIT";

/// What to read.
#[derive(Debug, Clone, Default)]
pub struct Question {
    /// Only of these units.
    pub units: Vec<String>,
    /// Only after this place.
    pub cursor: String,
    /// Only from then on.
    pub since: Option<SystemTime>,
    /// Only so many of the newest.
    pub last: Option<u32>,
    /// Only so urgent ones.
    pub priority: Option<u32>,
    /// How long to wait for an entry.
    pub wait: Duration,
}

/// What was read.
#[derive(Debug, Default)]
pub struct Answer {
    /// The oldest first.
    pub entries: Vec<Entry>,
    /// Where to go on; empty if there are no entries at all.
    pub cursor: String,
    /// There are more already.
    pub has_more: bool,
    /// The entry of the question's place is gone.
    pub has_gap: bool,
}

/// Why nothing was read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A unit that cannot be one.
    #[error("{0:?} is not the name of a unit: use letters, digits and :-_.\\@")]
    Unit(String),
    /// Too many of them.
    #[error("{0} units are given; at most {MOST_UNITS} are allowed")]
    Units(usize),
    /// A cursor that no answer has had.
    #[error("the cursor is not one that ReadJournal returned")]
    Cursor,
    /// A priority that there is not.
    #[error("{0} is not a priority: use 0 to 7")]
    Priority(u32),
    /// A time that cannot be said.
    #[error("the time is before 1970")]
    Since,
    /// No systemd.
    #[error("the guest has no {JOURNALCTL}: its logs are not in a systemd journal")]
    Missing,
    /// Nothing was found in time.
    #[error("no entry was found within {} s: ask for a shorter time, or for other units", LOOK.as_secs())]
    Slow,
    /// journalctl failed.
    #[error(transparent)]
    Program(#[from] program::Error),
    /// It writes something else.
    #[error(transparent)]
    Malformed(#[from] export::Malformed),
    /// Its output cannot be read.
    #[error("cannot read the output of journalctl")]
    Read(#[source] std::io::Error),
}

/// A place in the journal.
#[derive(Debug, PartialEq, Eq)]
enum Place<'a> {
    /// After an entry that the question is about.
    Entry(&'a str),
    /// After an entry of any kind, which the question may pass over.
    Any(&'a str),
}

impl<'a> Place<'a> {
    /// As the answer said it.
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

/// The arguments that say which entries are meant.
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

/// Reads what there is, or waits for something.
///
/// # Errors
/// If the question is wrong, or the journal cannot be read.
pub async fn read(question: &Question) -> Result<Answer, Error> {
    let matches = matches(question)?;
    if question.cursor.is_empty() { begin(question, matches).await } else { go_on(question, matches).await }
}

/// Reads what comes after the place of the question.
async fn go_on(question: &Question, mut arguments: Vec<String>) -> Result<Answer, Error> {
    let place = Place::parse(&question.cursor)?;
    arguments.push(format!("--cursor={}", place.cursor()));
    let mut answer = collect(arguments, Some(&place), question.wait).await?;
    // A journal that was put back to what it was earlier has nothing after the place until it is past it.
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

/// Whether the journal has the entry of this place.
async fn is_there(place: &Place<'_>) -> Result<bool, Error> {
    let arguments = vec![format!("--cursor={}", place.cursor()), "--lines=1".to_owned()];
    let first = collect(arguments, None, Duration::ZERO).await?.entries.pop();
    Ok(first.is_some_and(|entry| is_same(&entry.cursor, place.cursor())))
}

/// Whether two cursors are of one entry. Where it stands in which file, which they begin with, changes when journald moves its journal
/// from memory to the disk.
fn is_same(one: &str, other: &str) -> bool {
    let [one, other] = [one, other].map(|cursor| cursor.split_once(";b=").map_or(cursor, |(_, rest)| rest));
    one == other
}

/// Reads what is asked for without a place.
async fn begin(question: &Question, mut arguments: Vec<String>) -> Result<Answer, Error> {
    // An answer without entries has a place, too: without one, what comes next could not be told from what was there.
    let end = end().await?;
    if question.last == Some(0) {
        return Ok(Answer { cursor: end, ..Answer::default() });
    }
    if let Some(since) = question.since {
        let since = since.duration_since(SystemTime::UNIX_EPOCH).map_err(|_| Error::Since)?;
        // journalctl before 254 takes the oldest entries since then, where both are said: the others are left out below.
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

/// The place of the newest entry of all, whatever that is about; empty if there is none.
async fn end() -> Result<String, Error> {
    let newest = collect(vec!["--lines=1".to_owned()], None, Duration::ZERO).await?.entries.pop();
    Ok(newest.map(|entry| format!("~{}", entry.cursor)).unwrap_or_default())
}

/// Runs journalctl until it ends, has said enough, or the time is over; so long it waits for an entry, if there is none.
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
            // The time is over. What follows goes on in the next call.
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

/// journalctl has ended by itself.
async fn ended(reading: Reading, answer: Answer, follows: bool) -> Result<Answer, Error> {
    reading.end(JOURNALCTL).await?;
    if follows && answer.entries.is_empty() {
        // It does so when its journal is taken away; who follows asks again.
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
        // journalctl looks only once which units a pattern means: what others log later would be left out.
        for wrong in ["", "getty@*", "a b", "a\0", "a/b"] {
            assert!(of(wrong).is_err(), "{wrong:?}");
        }
        let many = Question { units: vec!["a".to_owned(); 17], ..Question::default() };
        assert!(matches(&many).is_err());
        assert!(matches(&Question { priority: Some(8), ..Question::default() }).is_err());
    }
}
