//! `guestctl logs`: entries of a guest's journal, up to now or as they are written.
//!
//! Each call has a connection of its own, and begins where the last one ended. A restart of guestlet-host, of
//! the agent or of the guest therefore omits nothing.

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

/// Seconds for which the guest may wait for an entry.
const WAIT: u32 = 20;
/// Minimum time between two calls while following, because each call leaves a record on the host.
const PACE: Duration = Duration::from_secs(1);
/// Pause before the guest is called again.
const AGAIN: Duration = Duration::from_millis(500);
/// Time after its start in which a host half may not know its VMs yet.
const SETTLED: Duration = Duration::from_secs(30);
/// Names of priorities, as in syslog(3).
const PRIORITIES: [&str; 8] = ["emerg", "alert", "crit", "err", "warning", "notice", "info", "debug"];

/// Selection of the entries to show.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    /// Units to be shown; empty for all.
    pub units: Vec<String>,
    /// Maximum age of an entry.
    pub since: Option<Duration>,
    /// Number of the newest entries to be shown.
    pub last: Option<u32>,
    /// Lowest priority to be shown.
    pub priority: Option<u32>,
    /// True to follow new entries.
    pub follow: bool,
}

/// Entry of the journal, for programs.
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

/// Parses a priority, which is a name or a number.
///
/// # Errors
/// Fails with a message for people if it is not valid.
pub fn parse_priority(text: &str) -> Result<u32, String> {
    let of_word = (0..).zip(PRIORITIES).find(|(_, word)| *word == text).map(|(level, _)| level);
    let level = of_word.or_else(|| text.parse().ok().filter(|level| *level < 8));
    level
        .ok_or_else(|| format!("{text:?} is not a priority: use one of {}, or 0 to 7", PRIORITIES.join(", ")))
}

/// Makes one call.
///
/// # Errors
/// Fails if the guest cannot be reached.
pub async fn read(
    daemon: &Daemon,
    name: &str,
    request: ReadJournalRequest,
) -> Result<ReadJournalResponse, Error> {
    answer(daemon.journal().read_journal(request), name, SOON).await
}

/// Shows entries; `ask` makes one call over a connection of its own.
///
/// # Errors
/// Fails if the guest cannot be reached, or standard output cannot be written. While following, a guest that
/// was reached once may be away for any length of time.
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
        // A request with a cursor returns entries if there are more.
        let is_at_end = !read.has_more || (read.entries.is_empty() && !request.cursor.is_empty());
        if !read.cursor.is_empty() {
            request.cursor = read.cursor;
        } else if read.has_gap {
            // The journal has no entry at all, so any later one is new.
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

/// Returns whether a guest that could not be reached for this long may be reached later.
fn may_pass(error: &Error, away: Duration) -> bool {
    match error {
        Error::NoSocket(_) | Error::NobodyAnswers(_) | Error::Closed | Error::Silent | Error::Late(_) => true,
        Error::Cluster(error) => error.may_pass(),
        // A host half that has just started learns its VMs a little later.
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

/// Formats an entry as journalctl does, but without the host name.
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
