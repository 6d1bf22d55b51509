//! etcd 3.4 and later, over its JSON gateway on an address of this machine.
//!
//! Nothing has to be held: everything that a member acknowledges is in its log on the disk, and a snapshot of data
//! and log taken at one moment is equal to the state after a power failure. In addition:
//!
//! - the process that listens belongs to the user that the agent has chosen, and writes to the reported
//!   directories;
//! - it waits for its disk, and has no alarm, such as for corrupt data;
//! - its revision and its position in the Raft log are known: everything that this member acknowledged up to there
//!   is in the snapshot;
//! - it ran from before the freeze until after the thaw: the status is queried again on the same connection.
//!
//! A member that is restored from a snapshot must not join the cluster that has continued without it: see
//! docs/freeze.md.

mod http;
mod listeners;
mod process;
mod stream;
mod target;

use std::io::Stdin;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Application, Held, Positions, Problem};
use stream::Stream;
use target::Target;

/// First releases that acknowledge only after the log is written (etcd issue 14370): the patch version, by major
/// and minor version.
const EARLY: [((u32, u32), u32); 2] = [((3, 4), 21), ((3, 5), 5)];
/// Maximum size in bytes of a database whose hash is requested after the thaw: etcd reads all of it for that.
const MOST_HASHED: u64 = 1024 * 1024 * 1024;

/// Client of one member.
pub struct Member {
    target: String,
    held: Option<(Stream, Status)>,
    /// Stands in for the connection while none is held.
    none: Stdin,
}

/// Returns the client of the member that a target names; see [`Target`].
pub fn at(target: &str) -> Box<dyn Application> {
    Box::new(Member { target: target.to_owned(), held: None, none: std::io::stdin() })
}

/// Status of a member. Its JSON has 64-bit numbers as strings, and leaves out those that are 0.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Status {
    header: Header,
    version: String,
    #[serde(rename = "dbSize", default)]
    size: String,
    #[serde(rename = "raftIndex")]
    raft_index: String,
    #[serde(rename = "raftTerm")]
    raft_term: String,
    #[serde(default)]
    errors: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Header {
    cluster_id: String,
    member_id: String,
    revision: String,
}

impl Status {
    fn positions(&self) -> Positions {
        let Self { header: Header { cluster_id, member_id, revision }, raft_index, raft_term, .. } = self;
        Positions::from([
            ("cluster", cluster_id.clone()),
            ("member", member_id.clone()),
            ("revision", revision.clone()),
            ("raft-index", raft_index.clone()),
            ("raft-term", raft_term.clone()),
        ])
    }

    /// Returns whether this is the same member, and its positions have not gone back.
    fn follows(&self, before: &Self) -> bool {
        let same = |status: &Self| (status.header.cluster_id.clone(), status.header.member_id.clone());
        let place = |status: &Self| Some((number(&status.header.revision)?, number(&status.raft_index)?));
        let (Some(now), Some(then)) = (place(self), place(before)) else { return false };
        same(self) == same(before) && now.0 >= then.0 && now.1 >= then.1
    }
}

impl Application for Member {
    fn hold(&mut self, until: Instant) -> Result<Held, Problem> {
        let (mut stream, status, directories) = match Target::parse(&self.target)? {
            Target::Process(process) => of_process(process, until)?,
            Target::Address { address, files, data } => {
                let stream = Stream::open(address, files.as_ref(), until)?;
                known(address, stream, data, until)?
            }
        };
        if !status.errors.is_empty() {
            return Err(Problem::new(format_args!("etcd reports a problem: {}", status.errors.join(", "))));
        }
        if let Some(first) = acknowledges_early(&status.version) {
            return Err(Problem::new(format_args!(
                "etcd {} acknowledges before it has written its log: {first} is the first version that does not",
                status.version
            )));
        }
        let mut positions = status.positions();
        positions.insert("db-size", status.size.clone());
        // With TLS, session tickets may follow the answer. Read them now: from here on, any readable byte counts as the
        // end.
        stream.settle();
        stream.check()?;
        let version = format!("etcd {}", status.version);
        self.held = Some((stream, status));
        Ok(Held { version, positions, directories })
    }

    fn session(&self) -> BorrowedFd<'_> {
        self.held.as_ref().map_or_else(|| self.none.as_fd(), |(stream, _)| stream.as_fd())
    }

    fn check(&mut self) -> Result<(), Problem> {
        self.held.as_ref().map_or_else(|| Err(not_held()), |(stream, _)| stream.check())
    }

    fn release(&mut self, until: Instant) -> Result<Positions, Problem> {
        let (mut stream, before) = self.held.take().ok_or_else(not_held)?;
        stream.check()?;
        stream.set_until(until);
        let after = status(&mut stream)?;
        if !after.follows(&before) {
            return Err(Problem::new(format_args!(
                "the position of etcd has changed: it was {:?}, and is {:?}",
                before.positions(),
                after.positions()
            )));
        }
        let mut positions = after.positions();
        positions.extend(content(&mut stream, &before));
        Ok(positions)
    }
}

/// Tries the addresses at which a process listens, until one is that for clients.
fn of_process(process: u32, until: Instant) -> Result<(Stream, Status, Vec<PathBuf>), Problem> {
    let mut last = Problem::new(format_args!("the process {process} listens on no loopback address"));
    for address in process::addresses(process)? {
        match Stream::open(address, None, until).and_then(|stream| known(address, stream, None, until)) {
            Ok(known) => return Ok(known),
            Err(problem) => last = problem,
        }
    }
    Err(last)
}

/// Returns the status of the member on this connection, and the directories with its data.
fn known(
    address: SocketAddr,
    mut stream: Stream,
    data: Option<PathBuf>,
    until: Instant,
) -> Result<(Stream, Status, Vec<PathBuf>), Problem> {
    // Checked after connecting, so that the process found is the one that has accepted the connection.
    let directories = if let Some(data) = data {
        process::is_own(address)?;
        configured(&data)?
    } else {
        let process = process::at(address, until)?;
        process::is_safe(process)?;
        process::directories(process)
    };
    let status = status(&mut stream)?;
    Ok((stream, status, directories))
}

/// Returns the directories of data and log below the data directory in the settings.
fn configured(data: &Path) -> Result<Vec<PathBuf>, Problem> {
    let below = |name: &str| {
        let path = data.join(name);
        path.canonicalize()
            .map_err(|error| Problem::new(format_args!("cannot examine {}: {error}", path.display())))
    };
    Ok(vec![below("member/snap")?, below("member/wal")?])
}

fn status(stream: &mut Stream) -> Result<Status, Problem> {
    let body = ask(stream, "/v3/maintenance/status", &json!({}))?;
    let status: Status = serde_json::from_value(body)
        .map_err(|error| Problem::new(format_args!("etcd reports an unexpected status: {error}")))?;
    let numbers = [&status.header.revision, &status.raft_index, &status.raft_term, &status.header.member_id];
    if numbers.iter().any(|text| number(text).is_none()) {
        return Err(Problem::new(format_args!("etcd reports an unexpected status: {status:?}")));
    }
    Ok(status)
}

/// Returns the contents at the revision at which the member was held, which can no longer change: the number of
/// keys, and their hash where the gateway offers it (etcd 3.6). Left out where etcd refuses the query, for example
/// to clients without a password.
fn content(stream: &mut Stream, before: &Status) -> Positions {
    let revision = &before.header.revision;
    let mut found = Positions::new();
    // All keys: the range from the first possible key without an end.
    let all = json!({
        "key": "AA==", "range_end": "AA==", "count_only": true, "serializable": true, "revision": revision
    });
    let Ok(keys) = ask(stream, "/v3/kv/range", &all) else { return found };
    if let Some(count) = text(&keys, "count") {
        found.insert("keys", count);
    }
    if number(&before.size).is_none_or(|size| size > MOST_HASHED) {
        return found;
    }
    if let Ok(answer) = ask(stream, "/v3/maintenance/hashkv", &json!({ "revision": revision })) {
        found.extend(answer.get("hash").and_then(Value::as_u64).map(|hash| ("hash", hash.to_string())));
        found.extend(text(&answer, "compact_revision").map(|revision| ("hash-compact-revision", revision)));
    }
    found
}

fn ask(stream: &mut Stream, path: &str, body: &Value) -> Result<Value, Problem> {
    let failed =
        |why: &dyn std::fmt::Display| Problem::new(format_args!("etcd does not answer to {path}: {why}"));
    let answer = http::post(stream, "localhost", path, &body.to_string()).map_err(|error| failed(&error))?;
    if answer.status != 200 {
        return Err(failed(&format_args!("{} {}", answer.status, String::from_utf8_lossy(&answer.body))));
    }
    serde_json::from_slice(&answer.body).map_err(|error| failed(&error))
}

/// Returns a number that the JSON has as a string, as it does for 64-bit numbers.
fn text(value: &Value, name: &str) -> Option<String> {
    value.get(name)?.as_str().filter(|text| text.parse::<i64>().is_ok()).map(str::to_owned)
}

fn number(text: &str) -> Option<u64> {
    text.parse().ok()
}

/// Returns the first version that waits for its log, if this one does not.
fn acknowledges_early(version: &str) -> Option<String> {
    let mut parts = version.split(['.', '-', '+']).map(str::parse::<u32>);
    let mut next = || parts.next()?.ok();
    let (Some(major), Some(minor), Some(patch)) = (next(), next(), next()) else {
        return Some("3.4.21".to_owned());
    };
    let of_line = EARLY.iter().find(|(line, _)| *line == (major, minor));
    let (line, first) = of_line.or_else(|| EARLY.first().filter(|(line, _)| (major, minor) < *line))?;
    let is_early = *line != (major, minor) || patch < *first;
    is_early.then(|| format!("{}.{}.{first}", line.0, line.1))
}

fn not_held() -> Problem {
    Problem::new("etcd is not held")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Status of an etcd 3.4.23.
    const STATUS: &str = r#"{"header":{"cluster_id":"13455796455940752355","member_id":"443629905751424238","revision":"1","raft_term":"2"},
        "version":"3.4.23","dbSize":"20480","leader":"443629905751424238","raftIndex":"4","raftTerm":"2","raftAppliedIndex":"4",
        "dbSizeInUse":"16384"}"#;

    #[test]
    fn a_member_is_known_again() {
        let before: Status = serde_json::from_str(STATUS).unwrap();
        assert_eq!(before.positions()["raft-index"], "4");
        let mut after = before.clone();
        after.header.revision = "10".to_owned();
        assert!(after.follows(&before) && !before.follows(&after));
        after.header.member_id = "1".to_owned();
        assert!(!after.follows(&before));
    }

    #[test]
    fn versions_that_acknowledge_before_they_have_written_are_known() {
        for early in ["3.4.20", "3.5.0", "3.5.4", "3.3.27", "2.3.8", "3.4", "none"] {
            assert!(acknowledges_early(early).is_some(), "{early}");
        }
        for good in ["3.4.21", "3.4.23", "3.5.5", "3.5.16-rc.1", "3.6.0", "4.0.0"] {
            assert_eq!(acknowledges_early(good), None, "{good}");
        }
    }
}
