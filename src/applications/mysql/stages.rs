//! Hold of a MariaDB by the stages of its own backup, from `BACKUP STAGE START` to `BLOCK_COMMIT`.
//!
//! In the last stage no transaction is committed, and no Aria or MyISAM table is written to, so this stage is
//! entered last. Until the release the positions must not change: if one has, the lock did not last.

use std::collections::BTreeMap;
use std::time::Instant;

use super::session::Session;
use super::{AGAIN, Held, MOST_FLUSH, Positions, Problem, directories, keep, same, version};

/// First version whose backup stages work as described here.
const FIRST: (u32, u32, u32) = (10, 5, 0);
/// Timeout for blocking commits, in seconds: new commits wait during that time.
const COMMIT_WAIT: u32 = 1;
/// Value of `innodb_flush_log_at_trx_commit` with which the log is written at each commit, and synced once a
/// second.
const WRITTEN: &str = "2";
/// Positions that identify the server and its data, and do not change while no transaction is committed.
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

/// Makes sure that everything acknowledged is on the disk, or at least in the page cache, which the freeze writes
/// back. Returns the position up to which it is, or `None` if the server has no InnoDB.
fn flush(
    session: &mut Session,
    variables: &BTreeMap<String, String>,
    until: Instant,
) -> Result<Option<u64>, Problem> {
    let Some(committed) = log_position(session, "innodb_lsn_current", until)? else { return Ok(None) };
    session.execute("FLUSH LOCAL ENGINE LOGS", until)?;
    // A log that is written but not synced at each commit: the freeze syncs it, and its position needs no check.
    if variables.get("innodb_flush_log_at_trx_commit").is_some_and(|when| when == WRITTEN) {
        return Ok(Some(committed));
    }
    // With 0 the server writes its log once a second, and FLUSH does not change that: wait for it.
    let latest = until.min(Instant::now() + MOST_FLUSH);
    loop {
        let flushed = log_position(session, "innodb_lsn_flushed", until)?;
        if flushed >= Some(committed) {
            return Ok(flushed);
        }
        if Instant::now() >= latest {
            return Err(Problem::new(format_args!(
                "InnoDB has committed up to {committed}, but its log is on the disk only up to {flushed:?} \
                 (innodb_flush_log_at_trx_commit, innodb_flush_log_at_timeout)"
            )));
        }
        std::thread::sleep(AGAIN);
    }
}

/// Returns a position in the log of InnoDB, or `None` if the server has no InnoDB.
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
