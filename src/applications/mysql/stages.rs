//! How a MariaDB is held: by the stages of its own backup, `BACKUP STAGE START` to `BLOCK_COMMIT`.
//!
//! In the last stage no transaction is committed, and no table of Aria or MyISAM is written to, so it is entered last, and
//! until the release positions do not change: if one has, the lock did not last.

use std::collections::BTreeMap;
use std::time::Instant;

use super::session::Session;
use super::{AGAIN, Held, MOST_FLUSH, Positions, Problem, directories, keep, same, version};

/// The first version whose stages are as they are here.
const FIRST: (u32, u32, u32) = (10, 5, 0);
/// How long it may take to have no commit, in seconds, while new ones wait.
const COMMIT_WAIT: u32 = 1;
/// `innodb_flush_log_at_trx_commit` where the log is written at each commit, and synced once a second.
const WRITTEN: &str = "2";
/// What tells one server, and its data, from another, and does not change while no transaction is committed.
const HELD: [&str; 6] =
    ["server", "server-id", "gtid-binlog", "gtid-current", "binlog-file", "binlog-position"];

pub fn hold(session: &mut Session, until: Instant) -> Result<Held, Problem> {
    let known = session.plain_version().to_owned();
    if version(&known) < FIRST {
        return Err(Problem::new(format_args!(
            "MariaDB {known} cannot be held by backup stages: version 10.5 or later is needed"
        )));
    }
    let variables = session.named(directories::VARIABLES, until)?;
    let directories = directories::of(&variables, session.server(), until)?;
    for stage in ["START", "FLUSH", "BLOCK_DDL"] {
        session.execute(&format!("BACKUP STAGE {stage}"), until)?;
    }
    session.execute(&format!("SET SESSION lock_wait_timeout = {COMMIT_WAIT}"), until)?;
    session.execute("BACKUP STAGE BLOCK_COMMIT", until)?;
    let lsn = flush(session, &variables, until)?;
    let mut positions = positions(session, until)?;
    if let Some(lsn) = lsn {
        keep(&mut positions, "lsn", lsn.to_string());
    }
    Ok(Held { version: format!("MariaDB {known}"), positions, directories })
}

pub fn release(session: &mut Session, before: &Positions, until: Instant) -> Result<Positions, Problem> {
    let mut after = positions(session, until)?;
    session.execute("BACKUP STAGE END", until)?;
    same(before, &after, &HELD)?;
    if let Some(lsn) = log_position(session, "innodb_lsn_current", until)? {
        keep(&mut after, "lsn", lsn.to_string());
    }
    Ok(after)
}

/// Sees to it that what was acknowledged is on the disk, or at least in the system's cache, which the freeze writes. Says up to
/// where; nothing if the server is without InnoDB.
fn flush(
    session: &mut Session,
    variables: &BTreeMap<String, String>,
    until: Instant,
) -> Result<Option<u64>, Problem> {
    let Some(committed) = log_position(session, "innodb_lsn_current", until)? else { return Ok(None) };
    session.execute("FLUSH LOCAL ENGINE LOGS", until)?;
    // Of one that is written, and not synced, at each commit there is nothing more to know.
    if variables.get("innodb_flush_log_at_trx_commit").is_some_and(|when| when == WRITTEN) {
        return Ok(Some(committed));
    }
    // With 0 the server writes its log once a second, and FLUSH does not change that.
    let latest = until.min(Instant::now() + MOST_FLUSH);
    loop {
        let flushed = log_position(session, "innodb_lsn_flushed", until)?;
        if flushed >= Some(committed) {
            return Ok(flushed);
        }
        if Instant::now() >= latest {
            return Err(Problem::new(format_args!(
                "InnoDB has committed up to {committed}, and its log is on the disk up to {flushed:?} only \
                 (innodb_flush_log_at_trx_commit, innodb_flush_log_at_timeout)"
            )));
        }
        std::thread::sleep(AGAIN);
    }
}

/// A position in the log of InnoDB; nothing if the server is without it.
fn log_position(session: &mut Session, name: &str, until: Instant) -> Result<Option<u64>, Problem> {
    let status = session.named(&format!("SHOW GLOBAL STATUS LIKE '{name}'"), until)?;
    let Some(text) = status.get(name) else { return Ok(None) };
    text.parse()
        .map(Some)
        .map_err(|_| Problem::new(format_args!("{name} is {text:?}, which is not a number")))
}

fn positions(session: &mut Session, until: Instant) -> Result<Positions, Problem> {
    let row = session.row(
        "SELECT @@server_uid, @@server_id, @@gtid_binlog_pos, @@gtid_current_pos, @@gtid_slave_pos, @@log_bin",
        until,
    )?;
    let mut values = row.into_iter().map(Option::unwrap_or_default);
    let mut positions = Positions::new();
    for name in ["server", "server-id", "gtid-binlog", "gtid-current", "gtid-replica"] {
        keep(&mut positions, name, values.next().unwrap_or_default());
    }
    if values.next().is_some_and(|writes_log| writes_log != "0") {
        let mut row = session.row("SHOW MASTER STATUS", until)?.into_iter().map(Option::unwrap_or_default);
        keep(&mut positions, "binlog-file", row.next().unwrap_or_default());
        keep(&mut positions, "binlog-position", row.next().unwrap_or_default());
    }
    Ok(positions)
}
