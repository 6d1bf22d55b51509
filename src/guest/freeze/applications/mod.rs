//! Applications that take part in a freeze: found, held before anything is frozen, watched while it is, released after the thaw.
//!
//! Each has a thread of its own (`driver`), which speaks with its process or runs its commands, and reports to the keeper. The
//! keeper never waits for one longer than its deadline: an application that does not answer costs the receipt a level, and
//! nothing else unless the settings require more.
//!
//! ```text
//! Asked ──held──▶ Held ──release──▶ Released      level application, if all of its data were frozen
//!   │               │ lost             │ fails
//!   ▼               ▼                  ▼
//! Failed          Failed             Failed       level filesystem
//! ```
//!
//! To add a kind: its client in `crate::applications`, its sockets in [`discovery`].

pub mod commands;
pub mod discovery;
mod driver;
mod taking_part;

use std::path::PathBuf;
use std::time::Duration;

use crate::sys::block_stack::Device;

pub use driver::Report;
pub use taking_part::Participants;

/// How long all applications have after the thaw.
pub const RELEASE: Duration = Duration::from_secs(5);
/// Applications of one freeze.
pub const MOST: usize = 32;

/// What the settings say about applications.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Look for them at their usual places.
    pub auto: bool,
    /// Those that the settings name.
    pub listed: Vec<Listed>,
    /// How long they may take to be held.
    pub deadline: Duration,
    /// A freeze fails if one of them is not held, or there is none.
    pub required: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { auto: false, listed: Vec::new(), deadline: Duration::from_secs(30), required: false }
    }
}

/// An application of the settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listed {
    /// A kind of `crate::applications`.
    Kind {
        /// Such as `postgresql`.
        kind: String,
        /// Such as the path of its socket.
        target: String,
        /// The user that its process has to have; the socket's owner, who is not root, unless it is said.
        user: Option<String>,
    },
    /// A pair of commands.
    Commands(Commands),
}

/// Commands that are run around a freeze.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commands {
    /// What people call it.
    pub name: String,
    /// As whom they run.
    pub user: String,
    /// A program and its arguments: when it ends well, the application is held.
    pub freeze: Vec<String>,
    /// The same for the end, whatever became of the other one.
    pub thaw: Vec<String>,
    /// Where its data are.
    pub data: Vec<PathBuf>,
}

/// A file system with data of an application.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The directory with the data.
    pub directory: String,
    /// The file system's number.
    pub device: Device,
    /// Where it is mounted.
    pub mount_point: String,
}
