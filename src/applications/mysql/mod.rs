//! MySQL 8 and later, and MariaDB 10.5 and later, over the server's Unix socket.
//!
//! Both are held by a session with their own kind of backup lock: the [`stages`] of MariaDB, the last of which
//! blocks commits, and the [`instance`] lock of MySQL, which blocks changes of table definitions but not commits.
//! The server releases either when the session ends. A redo log that is written only once a second is flushed
//! before.

mod directories;
mod fields;
mod instance;
mod messages;
mod session;
mod stages;

use std::io::Stdin;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::unistd::{Uid, User};

use super::{Application, Held, MOST_TEXT, Positions, Problem};
use session::Session;

/// Timeout of the server for locks, in seconds: shorter than a pause that its users would notice as an outage.
const LOCK_WAIT: u32 = 5;
/// Maximum wait for a log that is written once a second, and the interval of checking it.
const MOST_FLUSH: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(10);
/// Time after which the server ends an idle session, in seconds: longer than any freeze.
const IDLE: u32 = 24 * 60 * 60;

/// Client of one server.
pub struct Server {
    socket: PathBuf,
    held: Option<(Session, Positions)>,
    /// Stands in for the session while none is held.
    none: Stdin,
}

/// Returns the client of the server that listens on this socket, such as `/run/mysqld/mysqld.sock`.
pub fn at(socket: &str) -> Box<dyn Application> {
    Box::new(Server { socket: socket.into(), held: None, none: std::io::stdin() })
}

impl Application for Server {
    fn hold(&mut self, until: Instant) -> Result<Held, Problem> {
        let user = User::from_uid(Uid::effective()).ok().flatten().map(|user| user.name);
        let user =
            user.ok_or_else(|| Problem::new(format_args!("the user {} has no name", Uid::effective())))?;
        let mut session = Session::open(&self.socket, &user, until)?;
        // `sql_mode` and `autocommit` are set because the server's settings may change the meaning of the queries below,
        // and `wait_timeout` because they may end an idle session.
        let statement = format!(
            "SET SESSION lock_wait_timeout = {LOCK_WAIT}, SESSION wait_timeout = {IDLE}, SESSION sql_mode = '', SESSION autocommit = 1"
        );
        session.execute(&statement, until)?;
        let held = if session.is_mariadb() {
            stages::hold(&mut session, until)?
        } else {
            instance::hold(&mut session, until)?
        };
        self.held = Some((session, held.positions.clone()));
        Ok(held)
    }

    fn session(&self) -> BorrowedFd<'_> {
        self.held.as_ref().map_or_else(|| self.none.as_fd(), |(session, _)| session.as_fd())
    }

    fn check(&mut self) -> Result<(), Problem> {
        self.held.as_ref().map_or_else(|| Err(not_held()), |(session, _)| session.check())
    }

    fn release(&mut self, until: Instant) -> Result<Positions, Problem> {
        let (mut session, before) = self.held.take().ok_or_else(not_held)?;
        session.check()?;
        if session.is_mariadb() {
            stages::release(&mut session, &before, until)
        } else {
            instance::release(&mut session, &before, until)
        }
    }
}

fn not_held() -> Problem {
    Problem::new("the database is not held")
}

/// Stores a position, unless it is empty. A text that is too long is cut and ends with an ellipsis.
fn keep(positions: &mut Positions, name: &'static str, text: impl Into<String>) {
    let mut text = text.into();
    if text.is_empty() {
        return;
    }
    if text.len() > MOST_TEXT {
        let end = (0..=MOST_TEXT - '…'.len_utf8()).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or_default());
        text.push('…');
    }
    positions.insert(name, text);
}

/// Checks that the server is the one that was held.
fn same(before: &Positions, after: &Positions, names: &[&str]) -> Result<(), Problem> {
    for name in names {
        if before.get(*name) != after.get(*name) {
            let shown = |positions: &Positions| positions.get(*name).cloned().unwrap_or_default();
            let (before, after) = (shown(before), shown(after));
            return Err(Problem::new(format_args!(
                "{name} was {before:?} when the database was held, and is {after:?}: the lock did not last"
            )));
        }
    }
    Ok(())
}

/// Parses the three numbers of a version.
fn version(text: &str) -> (u32, u32, u32) {
    let mut numbers =
        text.split(|character: char| !character.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next(), next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(version("10.11.19-MariaDB-0+deb12u1-log"), (10, 11, 19));
        assert_eq!(version("8.0.36-0ubuntu0.22.04.1"), (8, 0, 36));
        assert_eq!(version("none"), (0, 0, 0));
    }

    #[test]
    fn a_position_that_is_cut_says_so() {
        let mut positions = Positions::new();
        keep(&mut positions, "gtid", "ä".repeat(200));
        keep(&mut positions, "none", "");
        assert!(positions["gtid"].len() <= MOST_TEXT && positions["gtid"].ends_with("ä…"), "{positions:?}");
        assert_eq!(positions.len(), 1);
    }

    #[test]
    fn another_server_is_seen() {
        let (before, after) = (Positions::from([("server", "a".to_owned())]), Positions::new());
        assert!(same(&before, &before, &["server", "missing"]).is_ok());
        assert!(same(&before, &after, &["server"]).unwrap_err().to_string().contains("did not last"));
    }
}
