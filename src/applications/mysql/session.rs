//! Session with a server over its Unix socket: a login without a password, and one query at a time.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};

use super::messages::{self, Answer, Login, Row, ServerError};
use crate::applications::Problem;
use crate::applications::connection::Connection;

/// Maximum size of a packet in bytes: no requested value is longer.
const MOST_PACKET: usize = 64 * 1024;
/// Maximum numbers of columns and rows of an answer.
const MOST_COLUMNS: u64 = 64;
const MOST_ROWS: usize = 1024;
/// Maximum size of an answer, in bytes of all of its rows.
const MOST_BYTES: usize = 1024 * 1024;
/// Maximum number of times that a server may switch the authentication plugin.
const MOST_SWITCHES: usize = 8;
/// Command `COM_QUERY`.
const QUERY: u8 = 3;
/// Errors `ER_ACCESS_DENIED_ERROR` and `ER_ACCESS_DENIED_NO_PASSWORD_ERROR`, and in the line below
/// `ER_SPECIFIC_ACCESS_DENIED_ERROR` and `ER_TABLEACCESS_DENIED_ERROR`.
const DENIED: [u16; 2] = [1045, 1698];
const NOT_GRANTED: [u16; 2] = [1227, 1142];
/// Error `ER_LOCK_WAIT_TIMEOUT`.
const LOCKED: u16 = 1205;

/// Rows of an answer; `None` is NULL.
pub type Rows = Vec<Vec<Option<String>>>;

/// Session that has logged in.
#[derive(Debug)]
pub struct Session {
    connection: Connection,
    /// Sequence number of the next packet.
    sequence: u8,
    user: String,
    /// Version that the server reports.
    pub version: String,
}

impl Session {
    /// Logs in as the user with this name, whom the server authenticates by the credentials of the process.
    ///
    /// # Errors
    /// If there is no such server, or it requires a password; the message then says how to let this user in.
    pub fn open(socket: &Path, user: &str, until: Instant) -> Result<Self, Problem> {
        let connection = Connection::open(socket, until)?;
        let mut session = Self { connection, sequence: 0, user: user.to_owned(), version: String::new() };
        let greeting = messages::greeting(&session.receive(until)?);
        let greeting = greeting.ok_or_else(strange)?.map_err(|error| session.failed("the login", &error))?;
        session.version = greeting.version;
        session.send(&messages::login(user, &greeting.plugin), until)?;
        for _ in 0..MOST_SWITCHES {
            let answer = session.receive(until)?;
            match messages::login_answer(&answer).ok_or_else(strange)? {
                Login::Done => return Ok(session),
                // Empty for any plugin: there is no password to send.
                Login::Switch(_) => session.send(&[], until)?,
                Login::More => return Err(session.no_entry("it asks for a password")),
                Login::Refused(error) if DENIED.contains(&error.code) => {
                    return Err(session.no_entry(&error.message));
                }
                Login::Refused(error) => return Err(session.failed("the login", &error)),
            }
        }
        Err(session.no_entry("it requests one authentication plugin after another"))
    }

    /// Returns the PID of the process that listens.
    pub fn server(&self) -> i32 {
        self.connection.server()
    }

    /// Returns whether the server is a MariaDB.
    pub fn is_mariadb(&self) -> bool {
        self.version.contains("MariaDB")
    }

    /// Returns the version without the prefix that MariaDB adds for old replicas.
    pub fn plain_version(&self) -> &str {
        self.version.strip_prefix("5.5.5-").filter(|_| self.is_mariadb()).unwrap_or(&self.version)
    }

    /// Executes a statement that returns no rows.
    ///
    /// # Errors
    /// If it fails, or has not ended by the deadline.
    pub fn execute(&mut self, statement: &str, until: Instant) -> Result<(), Problem> {
        self.query(statement, until).map(drop)
    }

    /// Runs a query and returns its rows.
    ///
    /// # Errors
    /// If the query fails, or its answer is too long or incomplete at the deadline.
    pub fn query(&mut self, statement: &str, until: Instant) -> Result<Rows, Problem> {
        self.sequence = 0;
        let mut packet = Vec::with_capacity(statement.len() + 1);
        packet.push(QUERY);
        packet.extend(statement.bytes());
        self.send(&packet, until)?;
        let columns = match messages::answer(&self.receive(until)?).ok_or_else(strange)? {
            Answer::Done => return Ok(Rows::new()),
            Answer::Failed(error) => return Err(self.failed(statement, &error)),
            Answer::Columns(columns @ 1..=MOST_COLUMNS) => columns,
            Answer::Columns(_) => return Err(strange()),
        };
        let columns = usize::try_from(columns).map_err(|_| strange())?;
        for place in 0..=columns {
            let is_end = messages::column(&self.receive(until)?).ok_or_else(strange)?;
            let is_end = is_end.map_err(|error| self.failed(statement, &error))?;
            if is_end != (place == columns) {
                return Err(strange());
            }
        }
        let (mut rows, mut bytes) = (Rows::new(), 0);
        loop {
            let packet = self.receive(until)?;
            bytes += packet.len();
            match messages::row(&packet, columns).ok_or_else(strange)? {
                Row::Values(values) if rows.len() < MOST_ROWS && bytes <= MOST_BYTES => rows.push(values),
                Row::Values(_) => return Err(Problem::new("the server's answer is too long")),
                Row::End => return Ok(rows),
                Row::Failed(error) => return Err(self.failed(statement, &error)),
            }
        }
    }

    /// Runs a query that returns names and values, such as `SHOW VARIABLES`. Names are converted to lower case, and
    /// NULL values are left out.
    ///
    /// # Errors
    /// The errors of [`Self::query`].
    pub fn named(&mut self, statement: &str, until: Instant) -> Result<BTreeMap<String, String>, Problem> {
        let rows = self.query(statement, until)?;
        let pair = |row: Vec<Option<String>>| {
            let mut values = row.into_iter();
            let (name, value) = (values.next()??, values.next()??);
            Some((name.to_lowercase(), value))
        };
        Ok(rows.into_iter().filter_map(pair).collect())
    }

    /// Returns the values of the only row.
    ///
    /// # Errors
    /// The errors of [`Self::query`]; or if the answer has no row, or several.
    pub fn row(&mut self, statement: &str, until: Instant) -> Result<Vec<Option<String>>, Problem> {
        let mut rows = self.query(statement, until)?;
        match (rows.pop(), rows.is_empty()) {
            (Some(row), true) => Ok(row),
            _ => Err(Problem::new(format_args!("the server's answer to {statement} is not one row"))),
        }
    }

    /// Checks that the session is open. The server sends nothing unasked in this protocol, so anything that can be
    /// read is the end of the session, or the reason for it.
    ///
    /// # Errors
    /// If anything can be read.
    pub fn check(&self) -> Result<(), Problem> {
        let mut byte = [0];
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match recv(self.connection.as_fd().as_raw_fd(), &mut byte, flags) {
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(()),
            _ => Err(Problem::new("the server has ended the session that held the database")),
        }
    }

    /// Returns the problem of a refused login, which says how to let the user in.
    fn no_entry(&self, said: &str) -> Problem {
        let user = &self.user;
        let how = if self.is_mariadb() { "VIA unix_socket" } else { "WITH auth_socket" };
        Problem::new(format_args!(
            "the server does not let {user} in without a password: run CREATE USER '{user}'@'localhost' IDENTIFIED {how}, and {} \
             (the server said: {said})",
            self.grant()
        ))
    }

    /// Returns the problem of a user that lacks privileges.
    pub fn needs(&self, what: &str) -> Problem {
        Problem::new(format_args!("{what}; run {}", self.grant()))
    }

    fn grant(&self) -> String {
        let privileges = if self.is_mariadb() {
            "RELOAD, BINLOG MONITOR"
        } else {
            "BACKUP_ADMIN, RELOAD, PROCESS, SELECT"
        };
        format!("GRANT {privileges} ON *.* TO '{}'@'localhost'", self.user)
    }

    fn failed(&self, what: &str, error: &ServerError) -> Problem {
        let ServerError { code, message } = error;
        if NOT_GRANTED.contains(code) || DENIED.contains(code) {
            return self.needs(&format!("{what}: {message} (error {code})"));
        }
        let hint = if *code == LOCKED {
            "; another session blocks it: a long query, a change of a table, or another backup"
        } else {
            ""
        };
        Problem::new(format_args!("{what}: {message} (error {code}){hint}"))
    }

    fn send(&mut self, packet: &[u8], until: Instant) -> Result<(), Problem> {
        let length = u32::try_from(packet.len()).map_err(|_| strange())?.to_le_bytes();
        let mut bytes = Vec::with_capacity(packet.len() + 4);
        bytes.extend([length[0], length[1], length[2], self.sequence]);
        bytes.extend(packet);
        self.sequence = self.sequence.wrapping_add(1);
        self.connection.send(&bytes, until)
    }

    fn receive(&mut self, until: Instant) -> Result<Vec<u8>, Problem> {
        let mut head = [0; 4];
        self.connection.receive(&mut head, until)?;
        let [low, middle, high, sequence] = head;
        let length = usize::from(low) | usize::from(middle) << 8 | usize::from(high) << 16;
        if length > MOST_PACKET || sequence != self.sequence {
            return Err(strange());
        }
        self.sequence = sequence.wrapping_add(1);
        let mut packet = vec![0; length];
        self.connection.receive(&mut packet, until)?;
        Ok(packet)
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

fn strange() -> Problem {
    Problem::new("what listens on the socket does not answer like any known MySQL or MariaDB")
}
