//! Clients of databases, for snapshots that an application has prepared for: each runs in a process of its own, as the
//! database's user, for as long as file systems are frozen.
//!
//! The agent starts its own program again as `guestlet application KIND TARGET`, which no help lists, and speaks with it over two
//! pipes, one JSON document a line ([`messages`]). The process has no capability, opens no file for writing, and ends, with the
//! session that it holds, when its standard input does: whatever kills the agent ends it, and whatever kills it ends the
//! session, which the database then releases by itself.
//!
//! ```text
//!          hold                        release
//! started ──────▶ holds the session ───────────▶ ended
//!                   │ the session ends
//!                   ▼
//!                 lost: says so, and waits for its end
//! ```
//!
//! To add a database: a module with an [`Application`], its line in [`KINDS`], its sockets in `guest/freeze/applications/discovery`.

pub mod connection;
mod etcd;
pub mod messages;
mod mysql;
pub mod place;
mod postgres;
pub mod problem;
pub mod serve;

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::Instant;

pub use problem::Problem;

/// The longest text of a position, in bytes.
pub const MOST_TEXT: usize = 256;
/// How many positions an application has at most.
pub const MOST_POSITIONS: usize = 32;
/// How many directories an application has at most. One with more is not held, because what is not known is not proved.
pub const MOST_DIRECTORIES: usize = 256;

/// What proves where a database was: names and values, such as `lsn`, `timeline`, `gtid`. Each text has at most [`MOST_TEXT`] bytes.
pub type Positions = BTreeMap<&'static str, String>;

/// What a database says once it is held.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// The server's version.
    pub version: String,
    /// Where it is. What it has acknowledged before is in every snapshot that is taken from now on.
    pub positions: Positions,
    /// Every directory with data without which the database does not come up as it was: data, log, tablespaces. As its user sees
    /// them, with all links followed. Empty if that is not known, which costs the level.
    pub directories: Vec<PathBuf>,
}

/// One database, from the moment at which its process starts.
pub trait Application {
    /// Prepares for the snapshot, and holds what has to be held.
    ///
    /// # Errors
    /// If the database does not answer as it should until then. The process ends after that.
    fn hold(&mut self, until: Instant) -> Result<Held, Problem>;

    /// Becomes readable, or is hung up, when the session that is held may be dead.
    fn session(&self) -> BorrowedFd<'_>;

    /// Called when it does, while file systems are frozen: must neither wait nor ask the database for anything that writes.
    ///
    /// # Errors
    /// If the session is gone.
    fn check(&mut self) -> Result<(), Problem>;

    /// After the thaw: releases what was held, and says where the database is then.
    ///
    /// # Errors
    /// If it is not the same server any more, or not the same session.
    fn release(&mut self, until: Instant) -> Result<Positions, Problem>;
}

/// Makes the client of a database at a target, such as the path of its socket.
pub type Make = fn(target: &str) -> Box<dyn Application>;

/// The kinds of databases.
pub const KINDS: &[(&str, Make)] = &[("postgresql", postgres::at), ("mysql", mysql::at), ("etcd", etcd::at)];

/// Those that commit nothing while they are held: they are held last, when the others are.
pub const HELD_LAST: &[&str] = &["mysql"];
