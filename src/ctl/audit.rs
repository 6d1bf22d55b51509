//! `guestctl audit`: shows who did what, from the file that guestlet-host writes, together with a guest's
//! records of the same calls.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use prost_types::Timestamp;
use serde::{Deserialize, Serialize};

use super::client::{Client, answer};
use super::print::Printer;
use super::{Error, words};
use crate::text;
use crate::wire::proto::v1::GetHostStatusRequest;

/// Longest record in bytes; longer lines count as damaged. Records of a guest are written by the guest.
const LONGEST: u64 = 64 * 1024;

/// Selection of the records to show.
#[derive(Debug, Clone)]
pub struct Query {
    /// Maximum age of a record.
    pub since: Option<Duration>,
    /// VM that the records are about.
    pub vm: Option<String>,
    /// File with a guest's records.
    pub guest_file: Option<PathBuf>,
}

/// Record as it is read. Those of guests may lack fields that only a host knows, and the other way round.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    time: String,
    id: String,
    host: String,
    caller: String,
    role: String,
    verb: String,
    subject: String,
    vm: String,
    decision: String,
    reason: String,
    result: String,
    #[serde(alias = "duration_us")]
    duration_usec: u64,
    /// Number of records of this caller that were left out.
    #[serde(alias = "more_denied_before")]
    more: u64,
    /// Number of records that could not be written.
    #[serde(alias = "lost_before")]
    lost: u64,
}

/// Call with the records of each side. Keys are part of the interface: add, never change.
#[derive(Debug, Serialize, Deserialize)]
struct Call {
    id: String,
    host: Option<Record>,
    guest: Vec<Record>,
}

/// Content of a file.
#[derive(Debug, Default)]
struct Records {
    records: Vec<Dated>,
    /// Number of lines that are not valid records.
    damaged: u64,
}

/// Shows the selected records.
///
/// # Errors
/// Fails if the file of records does not exist or cannot be read, the daemon does not answer, or standard
/// output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, query: Query) -> Result<(), Error> {
    let status = answer(client.get_host_status(GetHostStatusRequest {}), "").await?;
    if status.audit_file.is_empty() {
        return Err(Error::NoAuditFile);
    }
    let host = load(Path::new(&status.audit_file), printer)?;
    show(printer, &query, host)
}

/// Record with its time.
pub type Dated = (Timestamp, Record);

/// Extracts the host half's records from the calls that its guestctl has written as JSON, and assigns them to
/// `node`.
///
/// # Errors
/// Fails if the JSON is something else.
pub fn read_calls(json: &[u8], node: &str) -> Result<Vec<Dated>, serde_json::Error> {
    let calls: Vec<Call> = serde_json::from_slice(json)?;
    let records = calls.into_iter().filter_map(|call| call.host);
    let dated = records.filter_map(|record| {
        let time = record.time.parse().ok()?;
        Some((time, Record { host: node.to_owned(), ..record }))
    });
    Ok(dated.collect())
}

/// Writes the selected records, with a guest's records of the same calls.
///
/// # Errors
/// Fails if the guest's file cannot be read, or standard output cannot be written.
pub fn show(printer: &mut Printer, query: &Query, host: Vec<Dated>) -> Result<(), Error> {
    let guest = query.guest_file.as_ref().map(|file| load(file, printer)).transpose()?;
    let has_guest = guest.is_some();
    let calls = join(host, guest.unwrap_or_default(), query, SystemTime::now());
    printer.value(&calls, || rows(&calls, has_guest))?;
    Ok(())
}

fn load(path: &Path, printer: &mut Printer) -> Result<Vec<Dated>, Error> {
    let file = File::open(path).and_then(|file| read(BufReader::new(file)));
    let Records { records, damaged } = file.map_err(|error| Error::AuditFile(path.to_owned(), error))?;
    if damaged > 0 {
        printer.warn(&format!("{}: {damaged} lines are not records, and are ignored", path.display()));
    }
    Ok(records)
}

/// Reads one record from each line. The length of a line is bounded, whatever the file contains.
fn read(mut lines: impl BufRead) -> io::Result<Records> {
    let mut found = Records::default();
    let mut line = Vec::new();
    loop {
        line.clear();
        if lines.by_ref().take(LONGEST).read_until(b'\n', &mut line)? == 0 {
            return Ok(found);
        }
        let is_whole = line.ends_with(b"\n") || (line.len() as u64) < LONGEST;
        if !is_whole {
            skip_line(&mut lines)?;
        }
        let text = line.trim_ascii();
        if text.is_empty() {
            continue;
        }
        let record = serde_json::from_slice::<Record>(text).ok().filter(|_| is_whole);
        match record.and_then(|record| Some((record.time.parse().ok()?, record))) {
            Some(record) => found.records.push(record),
            None => found.damaged += 1,
        }
    }
}

/// Skips the rest of a line.
fn skip_line(lines: &mut impl BufRead) -> io::Result<()> {
    loop {
        let there = lines.fill_buf()?;
        let (length, end) = match there.iter().position(|byte| *byte == b'\n') {
            Some(at) => (at + 1, true),
            None => (there.len(), there.is_empty()),
        };
        lines.consume(length);
        if end {
            return Ok(());
        }
    }
}

/// Selects calls, and joins the records of both sides. The calls are sorted by time.
fn join(host: Vec<Dated>, guest: Vec<Dated>, query: &Query, now: SystemTime) -> Vec<Call> {
    let begin = query.since.and_then(|since| now.checked_sub(since)).map(Timestamp::from);
    let is_late = |time: &Timestamp| {
        begin.as_ref().is_none_or(|begin| (time.seconds, time.nanos) >= (begin.seconds, begin.nanos))
    };
    let mut calls: Vec<(Timestamp, Call)> = Vec::new();
    // Index of each call. Calls that were not selected are noted as well, because the guest's records of them
    // are left out, too.
    let mut places = BTreeMap::new();
    for (time, record) in host {
        let wanted = is_late(&time) && query.vm.as_ref().is_none_or(|vm| *vm == record.vm);
        if !record.id.is_empty() {
            places.insert(record.id.clone(), wanted.then_some(calls.len()));
        }
        if wanted {
            calls.push((time, Call { id: record.id.clone(), host: Some(record), guest: Vec::new() }));
        }
    }
    for (time, record) in guest {
        match places.get(&record.id).copied() {
            Some(place) => {
                if let Some((_, call)) = place.and_then(|place| calls.get_mut(place)) {
                    call.guest.push(record);
                }
            }
            None if is_late(&time) => {
                if !record.id.is_empty() {
                    places.insert(record.id.clone(), Some(calls.len()));
                }
                calls.push((time, Call { id: record.id.clone(), host: None, guest: vec![record] }));
            }
            None => {}
        }
    }
    calls.sort_by_key(|(time, _)| (time.seconds, time.nanos));
    calls.into_iter().map(|(_, call)| call).collect()
}

fn rows(calls: &[Call], has_guest: bool) -> String {
    let mut head = vec!["TIME", "CALLER", "VERB", "VM", "SUBJECT", "HOST", "TOOK"];
    if has_guest {
        head.push("GUEST");
    }
    head.push("ID");
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for Call { id, host, guest } in calls {
        let told = host.as_ref().or(guest.first()).cloned().unwrap_or_default();
        let took = format!("{:.3} ms", words::milliseconds(told.duration_usec.saturating_mul(1000)));
        let side = host.as_ref().map_or_else(|| "-".to_owned(), outcome);
        let is_call = !told.verb.is_empty();
        let mut row = vec![
            printable(&told.time),
            or_dash(&told.caller),
            or_dash(&told.verb),
            or_dash(&told.vm),
            or_dash(&told.subject),
            side,
            if is_call { took } else { "-".to_owned() },
        ];
        if has_guest {
            let sides: Vec<_> = guest
                .iter()
                .map(|record| format!("{}: {}", printable(&record.verb), outcome(record)))
                .collect();
            row.push(text::or_dash(&sides.join("; ")));
        }
        row.push(or_dash(id));
        rows.push(row);
    }
    text::table(&rows)
}

/// Returns the outcome of a call for people.
fn outcome(record: &Record) -> String {
    let mut parts = Vec::new();
    if !record.decision.is_empty() {
        parts.push(printable(&record.decision));
        parts.push(printable(&record.result));
    }
    if record.more > 0 {
        parts.push(format!("{} more left out", record.more));
    }
    if record.lost > 0 {
        parts.push(format!("{} records lost", record.lost));
    }
    parts.retain(|part| !part.is_empty());
    text::or_dash(&parts.join(", "))
}

/// Returns a text without characters that could move the cursor.
fn printable(text: &str) -> String {
    text.chars().map(|one| if one.is_control() { '\u{fffd}' } else { one }).collect()
}

fn or_dash(text: &str) -> String {
    text::or_dash(&printable(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<Dated> {
        let read = read(text.as_bytes()).unwrap();
        assert_eq!(read.damaged, 0, "{text}");
        read.records
    }

    const HOST: &str = r#"{"time":"2026-11-23T12:00:00.000000Z","id":"a","side":"host","caller":"uid:0 root","verb":"ping","vm":"web-1","decision":"allowed","result":"OK","duration_usec":1500}
{"time":"2026-11-23T12:00:02.000000Z","id":"b","side":"host","caller":"uid:2 bin","verb":"disk rm","vm":"db-1","decision":"denied","result":"PERMISSION_DENIED","duration_us":0}
{"time":"2026-11-23T12:00:03.000000Z","side":"host","caller":"uid:2 bin","more":7}
"#;
    const GUEST: &str = r#"{"time":"2026-11-23T12:00:00.500000Z","id":"a","host":"plain","caller":"uid:0 root","verb":"Ping","decision":"denied","result":"no grant","duration_usec":7}
{"time":"2026-11-23T12:00:01.000000Z","id":"c","host":"qga","caller":"","verb":"guest-exec","subject":"/bin/ls","decision":"allowed","result":"done"}
"#;

    fn query(since: Option<u64>, vm: Option<&str>) -> Query {
        Query { since: since.map(Duration::from_secs), vm: vm.map(str::to_owned), guest_file: None }
    }

    fn ids(query: &Query, guest: &str) -> Vec<String> {
        let now = SystemTime::try_from("2026-11-23T12:00:10Z".parse::<Timestamp>().unwrap()).unwrap();
        join(lines(HOST), lines(guest), query, now).into_iter().map(|call| call.id).collect()
    }

    #[test]
    fn calls_are_shown_in_order_with_both_sides() {
        assert_eq!(ids(&query(None, None), ""), ["a", "b", ""]);
        assert_eq!(ids(&query(None, None), GUEST), ["a", "c", "b", ""]);
        assert_eq!(ids(&query(Some(9), None), GUEST), ["c", "b", ""]);
        assert_eq!(ids(&query(None, Some("web-1")), GUEST), ["a", "c"]);
        let calls = join(lines(HOST), lines(GUEST), &query(None, None), SystemTime::now());
        let table = rows(&calls, true);
        let row = |id: &str| table.lines().find(|line| line.ends_with(id)).unwrap().to_owned();
        assert!(
            row("  a").contains("allowed, OK") && row("  a").contains("Ping: denied, no grant"),
            "{table}"
        );
        assert!(
            row("  a").contains("1.500 ms") && row("  c").contains("guest-exec: allowed, done"),
            "{table}"
        );
        assert!(table.contains("7 more left out"), "{table}");
        assert!(!rows(&calls, false).contains("GUEST"));
    }

    #[test]
    fn what_is_no_record_is_counted_and_a_line_without_end_is_bounded() {
        let long = "x".repeat(3 * usize::try_from(LONGEST).unwrap());
        let text = format!("{{\"time\":\n\n{HOST}{{}}\n{long}\n{HOST}{{\"time\":\"2026-11-23T12:00:00Z\"}}");
        let read = read(text.as_bytes()).unwrap();
        assert_eq!((read.records.len(), read.damaged), (7, 3));
        assert_eq!(printable("\u{1b}[2Ja"), "\u{fffd}[2Ja");
    }
}
