//! Hold of a MySQL by `LOCK INSTANCE FOR BACKUP`, which stops changes of table definitions but lets transactions
//! continue, because InnoDB recovers them from the disk. `performance_schema.log_status` returns positions that
//! are consistent with each other.

use std::time::Instant;

use serde_json::Value;

use super::session::Session;
use super::{AGAIN, Held, MOST_FLUSH, Positions, Problem, directories, keep, same, version};

/// First version that has the lock.
const FIRST: (u32, u32, u32) = (8, 0, 11);
/// Query for a table that is not recovered from a log, so that a snapshot may contain half of a change.
const OTHERS: &str = "SELECT CONCAT(table_schema, '.', table_name), engine FROM information_schema.tables \
    WHERE engine IN ('MyISAM', 'MRG_MYISAM', 'CSV', 'ARCHIVE', 'ROCKSDB', 'TokuDB', 'ndbcluster') \
    AND table_schema NOT IN ('mysql', 'information_schema', 'performance_schema', 'sys') LIMIT 1";
/// Query for whether the user sees all tables: those on which it has no privilege are not listed.
const SEES_ALL: &str = "SELECT COUNT(*) FROM information_schema.user_privileges \
    WHERE REPLACE(grantee, '''', '') = CURRENT_USER() AND privilege_type = 'SELECT'";
/// Query for the files of tables outside the data directory.
const FILES: &str =
    "SELECT path FROM information_schema.innodb_datafiles WHERE path NOT LIKE './%' LIMIT 1024";

pub fn hold(session: &mut Session, until: Instant) -> Result<Held, Problem> {
    let known = session.plain_version().to_owned();
    if version(&known) < FIRST {
        return Err(Problem::new(format_args!(
            "MySQL {known} cannot be held: version 8.0.11 or later is needed"
        )));
    }
    session.execute("LOCK INSTANCE FOR BACKUP", until)?;
    if session.row(SEES_ALL, until)? == [Some("0".to_owned())] {
        return Err(session.needs("the user may not see whether there are tables without crash recovery"));
    }
    if let Some(table) = session.query(OTHERS, until)?.into_iter().next() {
        let mut words = table.into_iter().map(Option::unwrap_or_default);
        let (name, engine) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        return Err(Problem::new(format_args!(
            "the table {name} has the engine {engine}, which does not recover what was being written: \
             ALTER TABLE {name} ENGINE = InnoDB"
        )));
    }
    let variables = session.named(directories::VARIABLES, until)?;
    let mut directories = directories::of(&variables, session.server(), until)?;
    let files = session.query(FILES, until)?;
    directories::add_files(&mut directories, &variables, files.into_iter().flatten().flatten())?;
    let positions = positions(session, until)?;
    // If innodb_flush_log_at_trx_commit is not 1, transactions are acknowledged, and included in the position above,
    // before the log is written.
    session.execute("FLUSH LOCAL ENGINE LOGS", until)?;
    is_flushed(session, &positions, until)?;
    Ok(Held { version: format!("MySQL {known}"), positions, directories })
}

/// Waits until the log is on the disk up to the position, as far as the server reports that (8.0.30 and later).
/// This covers a log that is written or synced once a second, while transactions continue.
fn is_flushed(session: &mut Session, positions: &Positions, until: Instant) -> Result<(), Problem> {
    let committed = positions.get("lsn").cloned().unwrap_or_default();
    let latest = until.min(Instant::now() + MOST_FLUSH);
    loop {
        let status = session.named("SHOW GLOBAL STATUS LIKE 'innodb_redo_log_flushed_to_disk_lsn'", until)?;
        let Some(flushed) = status.into_values().next() else { return Ok(()) };
        match (flushed.parse::<u64>(), committed.parse::<u64>()) {
            (Ok(flushed), Ok(committed)) if flushed >= committed => return Ok(()),
            (Ok(_), Ok(_)) if Instant::now() < latest => std::thread::sleep(AGAIN),
            _ => {
                return Err(Problem::new(format_args!(
                    "InnoDB has committed up to {committed}, but its log is on the disk only up to {flushed}"
                )));
            }
        }
    }
}

pub fn release(session: &mut Session, before: &Positions, until: Instant) -> Result<Positions, Problem> {
    let after = positions(session, until)?;
    session.execute("UNLOCK INSTANCE", until)?;
    same(before, &after, &["server"])?;
    Ok(after)
}

fn positions(session: &mut Session, until: Instant) -> Result<Positions, Problem> {
    let row = session
        .row("SELECT server_uuid, local, storage_engines FROM performance_schema.log_status", until)?;
    of(&row).ok_or_else(|| {
        Problem::new(format_args!("performance_schema.log_status has unexpected contents: {row:?}"))
    })
}

fn of(row: &[Option<String>]) -> Option<Positions> {
    let [Some(server), Some(local), Some(engines)] = row else { return None };
    let local: Value = serde_json::from_str(local).ok()?;
    let engines: Value = serde_json::from_str(engines).ok()?;
    let mut positions = Positions::new();
    keep(&mut positions, "server", server.as_str());
    for (name, field) in [("gtid", "gtid_executed"), ("binlog-file", "binary_log_file")] {
        keep(&mut positions, name, local.get(field)?.as_str()?.replace('\n', ""));
    }
    keep(&mut positions, "binlog-position", local.get("binary_log_position")?.as_u64()?.to_string());
    keep(&mut positions, "lsn", engines.get("InnoDB")?.get("LSN")?.as_u64()?.to_string());
    Some(positions)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn row(local: &str, engines: &str) -> Vec<Option<String>> {
        ["8a94f357-aab4-11df-86ab-c80aa9429562", local, engines].map(|text| Some(text.to_owned())).to_vec()
    }

    /// Parses the example in the reference manual of the server.
    #[test]
    fn positions_are_those_of_the_status_of_the_logs() {
        let local = r#"{"gtid_executed": "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5,\n4e11fa47-71ca-11e1-9e33-c80aa9429562:1",
            "binary_log_file": "binlog.000001", "binary_log_position": 2024}"#;
        let engines = r#"{"InnoDB": {"LSN": 18446744073709551615, "LSN_checkpoint": 1}}"#;
        let positions = of(&row(local, engines)).unwrap();
        let gtid = "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5,4e11fa47-71ca-11e1-9e33-c80aa9429562:1";
        assert_eq!(positions["gtid"], gtid);
        assert_eq!((&*positions["binlog-position"], &*positions["lsn"]), ("2024", "18446744073709551615"));
        for (local, engines) in
            [(local, "{}"), ("", engines), (local, r#"{"InnoDB": {"LSN": "1"}}"#), ("[]", engines)]
        {
            assert_eq!(of(&row(local, engines)), None, "{local} {engines}");
        }
    }

    proptest! {
        #[test]
        fn whatever_comes_is_read_or_refused(texts: Vec<Option<String>>) {
            let _ = of(&texts);
        }
    }
}
