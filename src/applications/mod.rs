//! Clients of databases, for application-consistent snapshots: each runs in a process of its own, as the
//! database's user, for as long as file systems are frozen.
//!
//! The agent starts its own program again as `guestlet application KIND TARGET`, which is not listed in any help,
//! and communicates with it over two pipes, one JSON document per line ([`messages`]). The process has no
//! capability and opens no file for writing. It ends, with the session that it holds, at the end of its standard
//! input. So the end of the agent ends this process, and its end ends the session, whose locks the database then
//! releases by itself.
//!
//! ```text
//!          hold                        release
//! started ──────▶ holds the session ───────────▶ ended
//!                   │ the session ends
//!                   ▼
//!                 lost: reports it, and waits for its end
//! ```
//!
//! To add a database: a module with an [`Application`], its line in [`KINDS`], and its sockets in
//! `guest/freeze/applications/discovery`.

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

/// Maximum length of the text of a position in bytes.
pub const MOST_TEXT: usize = 256;
/// Maximum number of positions of an application.
pub const MOST_POSITIONS: usize = 32;
/// Maximum number of directories of an application. One with more is not held: a directory that is not listed
/// cannot be proved to be in the snapshot.
pub const MOST_DIRECTORIES: usize = 256;

/// Positions that prove the state of a database, by name, such as `lsn`, `timeline`, `gtid`. Each text has at most
/// [`MOST_TEXT`] bytes.
pub type Positions = BTreeMap<&'static str, String>;

/// Report of a database once it is held.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// Version of the server.
    pub version: String,
    /// Positions of the database. Everything that it acknowledged before is in every snapshot that is taken from now
    /// on.
    pub positions: Positions,
    /// Every directory with data without which the database does not start with its former contents: data, log,
    /// tablespaces. Paths are as its user sees them, with all links followed. Empty if the directories are not known,
    /// which lowers the level of the freeze.
    pub directories: Vec<PathBuf>,
}

/// Client of one database, created when its process starts.
pub trait Application {
    /// Prepares for the snapshot, and holds the database as its kind requires.
    ///
    /// # Errors
    /// If the database does not answer as expected by the deadline. The process ends after that.
    fn hold(&mut self, until: Instant) -> Result<Held, Problem>;

    /// Returns the descriptor that becomes readable, or is hung up, when the held session may have ended.
    fn session(&self) -> BorrowedFd<'_>;

    /// Checks the session; called when `session` becomes readable, while file systems are frozen. Must neither wait
    /// nor ask the database for anything that writes.
    ///
    /// # Errors
    /// If the session has ended.
    fn check(&mut self) -> Result<(), Problem>;

    /// Releases what was held, after the thaw, and returns the positions of the database at that time.
    ///
    /// # Errors
    /// If the server or the session is no longer the same.
    fn release(&mut self, until: Instant) -> Result<Positions, Problem>;
}

/// Constructor of the client of a database at a target, such as the path of its socket.
pub type Make = fn(target: &str) -> Box<dyn Application>;

/// Kinds of databases, with the constructors of their clients.
pub const KINDS: &[(&str, Make)] = &[("postgresql", postgres::at), ("mysql", mysql::at), ("etcd", etcd::at)];

/// Kinds of databases that commit nothing while they are held. They are held after all others, to keep that time
/// short.
pub const HELD_LAST: &[&str] = &["mysql"];
