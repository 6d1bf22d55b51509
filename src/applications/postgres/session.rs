//! Session with a PostgreSQL server.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};

use super::wire::{self, Message};
use crate::applications::Problem;
use crate::applications::connection::Connection;

/// Maximum number of rows of an answer.
const MOST_ROWS: usize = 1024;
/// Maximum number of messages that a server may send before an answer is complete.
const MOST_MESSAGES: usize = 4096;

/// Session with a server.
#[derive(Debug)]
pub struct Session {
    connection: Connection,
    /// Bytes of messages that have arrived without a query.
    unasked: Vec<u8>,
}

/// Result of a query after which the session can still be used.
pub enum Outcome {
    /// Rows of the answer.
    Rows(Vec<Vec<String>>),
    /// The server refuses it.
    Refused {
        /// SQLSTATE of the error, five characters.
        code: String,
        /// Message of the server.
        words: String,
    },
}

impl Session {
    /// Connects as `user`, who must be let in without a password.
    ///
    /// # Errors
    /// If the user is not, or the connection fails.
    pub fn open(socket: &Path, user: &str, until: Instant) -> Result<Self, Problem> {
        let mut refusal = None;
        // Either of these databases may have been removed.
        for database in ["postgres", "template1"] {
            let mut session = Self { connection: Connection::open(socket, until)?, unasked: Vec::new() };
            session.connection.send(&wire::startup(user, database), until)?;
            match session.greeted(user, until)? {
                None => return Ok(session),
                Some((code, words)) if code == "3D000" => refusal = Some(words),
                Some((_, words)) => return Err(not_let_in(user, &words)),
            }
        }
        Err(not_let_in(user, &refusal.unwrap_or_default()))
    }

    /// Waits until the server is ready; returns the SQLSTATE and message if it refuses.
    fn greeted(&mut self, user: &str, until: Instant) -> Result<Option<(String, String)>, Problem> {
        for _ in 0..MOST_MESSAGES {
            match self.message(until)? {
                Message::Authenticate(what) => {
                    return Err(not_let_in(user, &format!("the server asks for {what}")));
                }
                Message::Error { code, words } => return Ok(Some((code, words))),
                Message::Ready => return Ok(None),
                Message::Authenticated | Message::Row(_) | Message::Other => {}
            }
        }
        Err(endless())
    }

    /// Returns the PID of the server process.
    pub fn server(&self) -> i32 {
        self.connection.server()
    }

    /// Runs a query.
    ///
    /// # Errors
    /// If the answer is not complete by the deadline, or the session has ended.
    pub fn query(&mut self, text: &str, until: Instant) -> Result<Outcome, Problem> {
        self.connection.send(&wire::query(text), until)?;
        let (mut rows, mut refusal) = (Vec::new(), None);
        for _ in 0..MOST_MESSAGES {
            match self.message(until)? {
                Message::Row(row) => {
                    rows.push(row);
                    if rows.len() > MOST_ROWS {
                        return Err(endless());
                    }
                }
                Message::Error { code, words } => refusal = Some(Outcome::Refused { code, words }),
                Message::Ready => return Ok(refusal.unwrap_or(Outcome::Rows(rows))),
                Message::Authenticated | Message::Authenticate(_) | Message::Other => {}
            }
        }
        Err(endless())
    }

    /// Returns the rows of a query, each with this number of columns.
    ///
    /// # Errors
    /// The errors of [`Session::query`]; or if the server refuses the query.
    pub fn rows<const COLUMNS: usize>(
        &mut self,
        text: &str,
        until: Instant,
    ) -> Result<Vec<[String; COLUMNS]>, Problem> {
        match self.query(text, until)? {
            Outcome::Refused { words, .. } => Err(Problem::new(words)),
            Outcome::Rows(rows) => {
                let fitting = rows.into_iter().map(<[String; COLUMNS]>::try_from);
                fitting
                    .collect::<Result<_, _>>()
                    .map_err(|_| Problem::new("the server sent an unexpected answer"))
            }
        }
    }

    /// Returns the only row.
    ///
    /// # Errors
    /// The errors of [`Session::rows`]; or if the answer has no row, or several.
    pub fn row<const COLUMNS: usize>(
        &mut self,
        text: &str,
        until: Instant,
    ) -> Result<[String; COLUMNS], Problem> {
        let rows = self.rows(text, until)?;
        let [row] = <[_; 1]>::try_from(rows)
            .map_err(|_| Problem::new("the server answered with an unexpected number of rows"))?;
        Ok(row)
    }

    /// Reads what has arrived unasked, without waiting.
    ///
    /// # Errors
    /// If the session has ended, or is about to.
    pub fn check(&mut self) -> Result<(), Problem> {
        let mut buffer = [0; 1024];
        loop {
            match recv(self.connection.as_fd().as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return Err(Problem::new("the server has ended the session")),
                Ok(length) => self.unasked.extend(buffer.get(..length).unwrap_or_default()),
                Err(Errno::EAGAIN) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(Problem::new(format_args!("the session has ended: {error}"))),
            }
            while let Some((kind, length)) = self.next_head()? {
                let Some(body) = self.unasked.get(5..5 + length) else { break };
                if let Message::Error { words, .. } = wire::message(kind, body)? {
                    return Err(Problem::new(words));
                }
                self.unasked.drain(..5 + length);
            }
        }
    }

    fn next_head(&self) -> Result<Option<(u8, usize)>, Problem> {
        self.unasked.first_chunk().map(|bytes| wire::head(*bytes)).transpose()
    }

    /// Receives the next message; begins with the bytes that have arrived unasked.
    fn message(&mut self, until: Instant) -> Result<Message, Problem> {
        let mut head = [0; 5];
        self.receive(&mut head, until)?;
        let (kind, length) = wire::head(head)?;
        let mut body = vec![0; length];
        self.receive(&mut body, until)?;
        wire::message(kind, &body)
    }

    fn receive(&mut self, buffer: &mut [u8], until: Instant) -> Result<(), Problem> {
        let kept = self.unasked.len().min(buffer.len());
        let (first, rest) = buffer.split_at_mut(kept);
        first.copy_from_slice(self.unasked.get(..kept).unwrap_or_default());
        self.unasked.drain(..kept);
        self.connection.receive(rest, until)
    }

    /// Ends the session in an orderly way.
    pub fn end(mut self, until: Instant) {
        // A failure does not matter: closing the connection ends the session as well.
        let _ = self.connection.send(&wire::terminate(), until);
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

fn not_let_in(user: &str, words: &str) -> Problem {
    Problem::new(format_args!(
        "{words}: the role {user} must be able to log in without a password; put this line before the \
         others in pg_hba.conf and reload: local all {user} peer"
    ))
}

fn endless() -> Problem {
    Problem::new("the server's answer is too long")
}
