//! Applications that take part in a freeze: found, held before anything is frozen, watched while held, released
//! after the thaw.
//!
//! Each has a thread of its own (`driver`), which talks to its process or runs its commands, and reports to the
//! keeper. The keeper never waits for one beyond its deadline. An application that does not respond lowers the
//! level of the receipt, and has no other effect unless the settings require more.
//!
//! ```text
//! Asked ──held──▶ Held ──release──▶ Released      level application, if all of its data were frozen
//!   │               │ lost             │ fails
//!   ▼               ▼                  ▼
//! Failed          Failed             Failed       level filesystem
//! ```
//!
//! To add a kind: write its client in `crate::applications`, and add its sockets to [`discovery`].

pub mod commands;
pub mod discovery;
mod driver;
mod taking_part;

use std::path::PathBuf;
use std::time::Duration;

use crate::sys::block_stack::Device;

pub use driver::Report;
pub use taking_part::Participants;

/// Time limit for the release of all applications after the thaw.
pub const RELEASE: Duration = Duration::from_secs(5);
/// Limit on the applications of one freeze.
pub const MOST: usize = 32;

/// Settings of the applications.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// True if applications are searched for at their usual paths.
    pub auto: bool,
    /// Applications that the settings name.
    pub listed: Vec<Listed>,
    /// Time limit for holding them.
    pub deadline: Duration,
    /// True if a freeze fails when one of them is not held, or none is found.
    pub required: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { auto: false, listed: Vec::new(), deadline: Duration::from_secs(30), required: false }
    }
}

/// Application that the settings name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listed {
    /// Application of a kind in `crate::applications`.
    Kind {
        /// Kind of the application, such as `postgresql`.
        kind: String,
        /// Address of the instance, such as the path of its socket.
        target: String,
        /// User that its process must have. By default the owner of the socket, which must not be root.
        user: Option<String>,
    },
    /// Application that is held by a pair of commands.
    Commands(Commands),
}

/// Commands that are run around a freeze.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commands {
    /// Name for people.
    pub name: String,
    /// User that runs the commands.
    pub user: String,
    /// Program and arguments; the application is held once the program succeeds.
    pub freeze: Vec<String>,
    /// Program and arguments for the end of the freeze; run whatever the result of the first was.
    pub thaw: Vec<String>,
    /// Directories of its data.
    pub data: Vec<PathBuf>,
}

/// File system with data of an application.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Directory with the data.
    pub directory: String,
    /// Device number of the file system.
    pub device: Device,
    /// Mount point of the file system.
    pub mount_point: String,
}
