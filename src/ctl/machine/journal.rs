//! `guestctl logs`: entries of a guest's journal, up to now or as they are written.
//!
//! Each call has a connection of its own, and begins where the last one has ended: a restart of guestlet-host, of the agent or of
//! the guest leaves nothing out.

use std::pin::pin;
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use tokio::time::sleep;
use tonic::Code;

use super::{SOON, answer};
use crate::ctl::client::Daemon;
use crate::ctl::outage::{self, Outage};
use crate::ctl::print::Printer;
use crate::ctl::{Error, words};
use crate::text;
use crate::wire::proto::v1::{JournalEntry, ReadJournalRequest, ReadJournalResponse};

/// How long the guest may wait for an entry, in seconds.
const WAIT: u32 = 20;
/// The shortest time between two calls that follow: each of them leaves a record on the host.
const PACE: Duration = Duration::from_secs(1);
/// How soon it is tried again to reach a guest.
const AGAIN: Duration = Duration::from_millis(500);
/// For how long a host half that has just started may not know its VMs yet.
const SETTLED: Duration = Duration::from_secs(30);
/// The words for priorities, as in syslog(3).
const PRIORITIES: [&str; 8] = ["emerg", "alert", "crit", "err", "warning", "notice", "info", "debug"];

/// What to show.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    /// Only of these units.
    pub units: Vec<String>,
    /// Only what was written in so long.
    pub since: Option<Duration>,
    /// Only so many of the newest entries.
    pub last: Option<u32>,
    /// Only so urgent ones.
    pub priority: Option<u32>,
    /// Go on with what is written.
    pub follow: bool,
}

/// What programs read of an entry.
#[derive(Debug, Serialize)]
struct Entry<'a> {
    time: String,
    identifier: &'a str,
    process_id: Option<u32>,
    unit: &'a str,
    priority: Option<&'static str>,
    message: &'a str,
    left_out_bytes: u64,
}

/// The number of a priority, by its word or itself.
///
/// # Errors
/// If it is none, in words.
pub fn parse_priority(text: &str) -> Result<u32, String> {
    let of_word = (0..).zip(PRIORITIES).find(|(_, word)| *word == text).map(|(level, _)| level);
    let level = of_word.or_else(|| text.parse().ok().filter(|level| *level < 8));
    level
        .ok_or_else(|| format!("{text:?} is not a priority: use one of {}, or 0 to 7", PRIORITIES.join(", ")))
}

/// Asks once.
///
/// # Errors
/// If the guest cannot be asked.
pub async fn read(
    daemon: &Daemon,
    name: &str,
    request: ReadJournalRequest,
) -> Result<ReadJournalResponse, Error> {
    answer(daemon.journal().read_journal(request), name, SOON).await
}

/// Shows entries; `ask` has one call done, over a connection of its own.
///
/// # Errors
/// If the guest cannot be asked, or standard output cannot be written. While following, a guest that was reached once may be away for
/// as long as it likes.
pub async fn run(
    printer: &mut Printer,
    name: &str,
    wish: &Wish,
    ask: impl AsyncFn(ReadJournalRequest) -> Result<ReadJournalResponse, Error>,
) -> Result<(), Error> {
    let mut left = wish.last.filter(|_| !wish.follow);
    let mut request = ReadJournalRequest {
        name: name.to_owned(),
        units: wish.units.clone(),
        since: wish
            .since
            .map(|span| SystemTime::now().checked_sub(span).unwrap_or(SystemTime::UNIX_EPOCH).into()),
        last: wish.last,
        priority: wish.priority,
        ..ReadJournalRequest::default()
    };
    let mut unread = pin!(Printer::unread());
    let mut was_reached = false;
    let mut outage = Outage::none(Duration::MAX);
    loop {
        let begun = Instant::now();
        let read = tokio::select! {
            read = ask(request.clone()) => read,
            () = &mut unread => return Ok(()),
        };
        let read = match read {
            Ok(read) => read,
            Err(error) if wish.follow && was_reached && may_pass(&error, outage.lasts(Instant::now())) => {
                outage.goes_on(error.to_string(), begun);
                if outage.tell_at().is_some_and(|at| at <= Instant::now()) {
                    printer.note(&format!("{}; the journal continues when the guest is back", outage.tell()));
                }
                tokio::select! {
                    () = sleep(AGAIN) => continue,
                    () = &mut unread => return Ok(()),
                }
            }
            Err(error) => return Err(error),
        };
        was_reached = true;
        outage.ends();
        if read.has_gap {
            printer.warn("entries may be missing here: the guest's journal no longer has the last one");
        }
        for entry in &read.entries {
            if left == Some(0) {
                return Ok(());
            }
            left = left.map(|left| left - 1);
            show(printer, entry)?;
        }
        // What is asked for by a place has entries, if there are more.
        let is_at_end = !read.has_more || (read.entries.is_empty() && !request.cursor.is_empty());
        if !read.cursor.is_empty() {
            request.cursor = read.cursor;
        } else if read.has_gap {
            // There is no entry at all: whatever comes is new.
            request = ReadJournalRequest { cursor: String::new(), since: None, last: None, ..request };
        }
        if is_at_end {
            if !wish.follow {
                return Ok(());
            }
            request.wait_seconds = WAIT;
            sleep(PACE.saturating_sub(begun.elapsed())).await;
        }
    }
}

/// Whether a guest that could not be asked for so long may be asked later.
fn may_pass(error: &Error, away: Duration) -> bool {
    match error {
        Error::NoSocket(_) | Error::NobodyAnswers(_) | Error::Closed | Error::Silent | Error::Late(_) => true,
        Error::Cluster(error) => error.may_pass(),
        // A host half that has just started knows its VMs a little later.
        Error::UnknownVm(_) => away < SETTLED,
        // journalctl may fail while journald is restarted.
        Error::Call(status) if status.code() == Code::Internal => away < SETTLED,
        Error::Call(status) => status.code() == Code::Cancelled || outage::may_pass(status.code(), false),
        _ => false,
    }
}

fn show(printer: &mut Printer, entry: &JournalEntry) -> Result<(), Error> {
    let value = Entry {
        time: words::time(entry.time.as_ref()),
        identifier: &entry.identifier,
        process_id: Some(entry.process_id).filter(|pid| *pid != 0),
        unit: &entry.unit,
        priority: entry.priority.and_then(|level| PRIORITIES.get(level as usize).copied()),
        message: &entry.message,
        left_out_bytes: entry.left_out,
    };
    Ok(printer.line(&value, || line(&value))?)
}

/// As journalctl shows it, but for the name of the host.
fn line(entry: &Entry<'_>) -> String {
    let pid = entry.process_id.map(|pid| format!("[{pid}]")).unwrap_or_default();
    let begin = format!("{} {}{pid}: ", entry.time, text::or_dash(entry.identifier));
    let indent = format!("\n{}", " ".repeat(begin.chars().count()));
    let rest = match entry.left_out_bytes {
        0 => String::new(),
        bytes => format!("… ({} more)", text::size(bytes)),
    };
    format!("{begin}{}{rest}", entry.message.trim_end_matches('\n').replace('\n', &indent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_have_words_and_numbers() {
        assert_eq!(parse_priority("err"), Ok(3));
        assert_eq!(parse_priority("7"), Ok(7));
        assert!(parse_priority("8").unwrap_err().contains("emerg"));
        assert!(parse_priority("").is_err());
    }

    #[test]
    fn lines_of_a_message_stand_below_each_other() {
        let entry = Entry {
            time: "t".into(),
            identifier: "a",
            process_id: Some(7),
            unit: "",
            priority: None,
            message: "one\ntwo\n",
            left_out_bytes: 2048,
        };
        assert_eq!(line(&entry), "t a[7]: one\n        two… (2 KiB more)");
    }
}
