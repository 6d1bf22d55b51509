//! PostgreSQL 12 and later: a checkpoint, and then a session that is watched for as long as file systems are
//! frozen.
//!
//! All file systems with data are frozen together, which the agent checks, so that a snapshot is the state of the
//! disks at one moment: no backup mode is needed, and the server recovers from its log as after a power failure.
//! In addition:
//!
//! - `CHECKPOINT` shortens that recovery, and writes derived data, such as the progress of logical replication;
//! - the position in the log is known: everything that was acknowledged up to there is in the snapshot;
//! - the data directory is proved to be that of the server that answers, by the PID in postmaster.pid;
//! - the server ran from before the freeze until after the thaw: the same session queries the position again.
//!
//! The session uses the role with the name of the server's user, by peer authentication.

mod session;
mod wire;

use std::io::Read as _;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::unistd::{Uid, User};

use super::connection::left;
use super::{Application, Held, Positions, Problem};
use session::{Outcome, Session};

/// Oldest supported version, as a number: the queries are known to work from there on.
const OLDEST: u32 = 120_000;

/// Query that turns off timeouts, because a session that ends by itself would look like a server that has ended.
/// (Older versions lack some of these settings.)
const NO_TIMEOUTS: &str = "SELECT set_config(name, '0', false) FROM pg_settings WHERE name IN ('statement_timeout', \
    'lock_timeout', 'idle_session_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')";

const SERVER: &str = "SELECT current_setting('server_version'), current_setting('server_version_num'), \
    current_setting('data_directory')";

const TABLESPACES: &str =
    "SELECT pg_tablespace_location(oid) FROM pg_tablespace WHERE pg_tablespace_location(oid) <> ''";

/// Query for the position of the server. On a standby: the replayed position, on the timeline of its last restart
/// point.
const POSITION: &str = "SELECT pg_is_in_recovery()::text, \
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_flush_lsn() END::text, \
    CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint()) \
    ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END::text, \
    (SELECT system_identifier FROM pg_control_system())::text";

/// Query for the position up to which recovery has read the log when the server was started; empty if it was shut
/// down cleanly before. Later writes of the server do not change it.
const RECOVERED: &str = "SELECT coalesce(pg_last_wal_replay_lsn()::text, '')";

/// Client of one server.
pub struct Postgres {
    socket: PathBuf,
    session: Option<Session>,
    system: String,
    /// Stands in for the session while none is held.
    none: std::io::Stdin,
}

/// Returns the client of the server behind the socket at this path, such as `/run/postgresql/.s.PGSQL.5432`.
pub fn at(socket: &str) -> Box<dyn Application> {
    Box::new(Postgres { socket: socket.into(), session: None, system: String::new(), none: std::io::stdin() })
}

impl Application for Postgres {
    fn hold(&mut self, until: Instant) -> Result<Held, Problem> {
        let user = User::from_uid(Uid::effective()).ok().flatten();
        let user = user.ok_or_else(|| Problem::new("the user of the server has no name"))?.name;
        // A checkpoint of a large server may take too long. It is useful but not required, so it gets a part of the time.
        let mut session = Session::open(&self.socket, &user, until)?;
        let checkpoint = checkpoint(session, Instant::now() + left(until)? * 2 / 3);
        session = Session::open(&self.socket, &user, until)?;
        session.rows::<1>(NO_TIMEOUTS, until)?;
        let [version, number, data] = session.row::<3>(SERVER, until)?;
        if number.parse().unwrap_or(0) < OLDEST {
            return Err(Problem::new(format_args!("version {version} is not supported; use 12 or later")));
        }
        let mut directories = vec![data_directory(Path::new(&data), session.server())?];
        let wal = Path::new(&data).join("pg_wal");
        let tablespaces =
            session.rows::<1>(TABLESPACES, until)?.into_iter().map(|[path]| PathBuf::from(path));
        directories.extend(std::iter::once(wal).chain(tablespaces));
        let mut positions = position(&mut session, until)?;
        self.system = positions.get("system-identifier").cloned().unwrap_or_default();
        let [recovered] = session.row::<1>(RECOVERED, until)?;
        if !recovered.is_empty() {
            positions.insert("recovered-to", recovered);
        }
        positions.insert("data-directory", data);
        positions.insert("checkpoint", checkpoint);
        self.session = Some(session);
        Ok(Held { version, positions, directories })
    }

    fn session(&self) -> BorrowedFd<'_> {
        self.session.as_ref().map_or(self.none.as_fd(), Session::as_fd)
    }

    fn check(&mut self) -> Result<(), Problem> {
        self.session.as_mut().ok_or_else(not_held)?.check()
    }

    fn release(&mut self, until: Instant) -> Result<Positions, Problem> {
        let mut session = self.session.take().ok_or_else(not_held)?;
        session.check()?;
        let positions = position(&mut session, until)?;
        session.end(until);
        if positions.get("system-identifier") != Some(&self.system) {
            return Err(Problem::new("the server that answers is not the one that was held"));
        }
        Ok(positions)
    }
}

fn not_held() -> Problem {
    Problem::new("no session is held")
}

/// Makes the server write a checkpoint, in a session of its own. Returns the result in words.
fn checkpoint(mut session: Session, until: Instant) -> String {
    match session.query("CHECKPOINT", until) {
        Ok(Outcome::Rows(_)) => {
            session.end(until);
            "done".to_owned()
        }
        Ok(Outcome::Refused { code, words }) => {
            session.end(until);
            // Only superusers may do this; from version 15 on also members of the role `pg_checkpoint`.
            let remedy =
                if code == "42501" { "; GRANT pg_checkpoint TO the role, or use a superuser" } else { "" };
            format!("not done: {words}{remedy}")
        }
        Err(problem) => format!("not done: {problem}"),
    }
}

fn position(session: &mut Session, until: Instant) -> Result<Positions, Problem> {
    let [in_recovery, lsn, timeline, system] = session.row::<4>(POSITION, until)?;
    if lsn.is_empty() || system.is_empty() {
        return Err(Problem::new("the server does not report its position in the log"));
    }
    Ok(Positions::from([
        ("in-recovery", in_recovery),
        ("lsn", lsn),
        ("timeline", timeline),
        ("system-identifier", system),
    ]))
}

/// Returns the data directory, after checking that it is that of the process `server`: for a server in a
/// container, or with mounts of its own, the same path may lead to another directory here.
fn data_directory(path: &Path, server: i32) -> Result<PathBuf, Problem> {
    let file = path.join("postmaster.pid");
    let mut text = String::new();
    let read = std::fs::File::open(&file).and_then(|file| file.take(32).read_to_string(&mut text));
    if let Err(error) = read {
        return Err(Problem::new(format_args!("cannot read {}: {error}", file.display())));
    }
    if text.lines().next().and_then(|line| line.trim().parse().ok()) != Some(server) {
        return Err(Problem::new(format_args!(
            "{} does not belong to the server that answers (process {server}): does it run in a container?",
            file.display()
        )));
    }
    Ok(path.to_owned())
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn the_data_directory_is_that_of_the_server() {
        let directory = tempfile::tempdir().unwrap();
        let words = |server| match data_directory(directory.path(), server) {
            Ok(path) => path.display().to_string(),
            Err(problem) => problem.to_string(),
        };
        assert!(words(7).contains("cannot read"), "{}", words(7));
        std::fs::write(directory.path().join("postmaster.pid"), "7\n/data\n").unwrap();
        assert_eq!(words(7), directory.path().display().to_string());
        for other in [0, 77] {
            assert!(words(other).contains("does not belong to the server"), "{}", words(other));
        }
        std::fs::write(directory.path().join("postmaster.pid"), "-7\n").unwrap();
        assert!(words(7).contains("does not belong to the server"));
    }
}
