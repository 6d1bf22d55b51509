//! The two ends of a copy, which do what the messages of `guestlet.v1.Files` ask for: the same in a guest, for its host half, and
//! here, for guestctl.
//!
//! ```text
//! ToReader ──▶ reader ──▶ FromReader ┐
//!                                    │ whoever copies hands content on
//! FromWriter ◀── writer ◀── ToWriter ┘
//! ```
//!
//! Each runs on a thread of its own, which may wait for disks: it takes requests from a channel, one after the other, and ends when
//! that is closed. [`Guard`] says what may be read and written. What is below what was opened is reached by descriptors, through no
//! symbolic link ([`crate::sys::beneath`]).
//!
//! A file is written beside its final name ([`aside`]), and takes it when it is complete, as its SHA-256 says, and on the disk.
//! What is left of one that was interrupted is known by its [`records`].

pub mod aside;
mod digest;
mod entry;
pub mod paths;
pub mod reader;
pub mod records;
mod tree;
pub mod writer;
mod writing;

use std::io;
use std::os::fd::OwnedFd;

use nix::errno::Errno;

use crate::sys::error_chain;
use crate::wire::proto::v1::{FileFailed, FileFailure};

pub use crate::wire::files::{MAX_MESSAGE, PIECE};
pub use digest::Digest;
pub use entry::{is_same, owner_of};

/// Messages that wait in a channel of an end.
pub const WAITING: usize = 4;

/// Says what may be read and written.
pub trait Guard: Send {
    /// Whether what a descriptor is open for may be read, or written to; or, with a name, what is in that directory under the name.
    ///
    /// # Errors
    /// If it may not, in words.
    fn may(&self, found: &OwnedFd, name: Option<&[u8]>, writes: bool) -> Result<(), String>;

    /// Waits until files may be written to.
    fn wait(&self) {}

    /// A file of so many bytes was read, or written, completely.
    fn copied(&self, bytes: u64) {
        let _ = bytes;
    }
}

/// Everything may be read and written that the system lets us.
#[derive(Debug, Clone, Copy)]
pub struct Everything;

impl Guard for Everything {
    fn may(&self, _: &OwnedFd, _: Option<&[u8]>, _: bool) -> Result<(), String> {
        Ok(())
    }
}

/// Why a request failed.
#[derive(Debug)]
pub struct Failure {
    kind: FileFailure,
    words: String,
}

impl Failure {
    fn new(kind: FileFailure, words: impl Into<String>) -> Self {
        Self { kind, words: words.into() }
    }

    /// It will not work another time either.
    fn last(words: impl Into<String>) -> Self {
        Self::new(FileFailure::Final, words)
    }

    fn denied(words: impl Into<String>) -> Self {
        Self::new(FileFailure::Denied, words)
    }

    /// The system refused to do something with a file of this name.
    fn io<'n>(doing: &'n str, name: &'n [u8]) -> impl FnOnce(io::Error) -> Self + use<'n> {
        move |error| {
            let kind = match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::ENOENT) => FileFailure::NotFound,
                Some(Errno::EEXIST) => FileFailure::Exists,
                _ => FileFailure::Final,
            };
            let name = String::from_utf8_lossy(name);
            Self::new(kind, format!("cannot {doing} {name}: {}", error_chain::words(&error)))
        }
    }
}

impl From<Failure> for FileFailed {
    fn from(failure: Failure) -> Self {
        Self { kind: failure.kind.into(), message: failure.words }
    }
}

/// Whoever asked is gone.
#[derive(Debug)]
struct Gone;

/// How a request ended that could not be carried out.
#[derive(Debug)]
enum Unmet {
    Failed(Failure),
    Gone,
}

impl From<Failure> for Unmet {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Gone> for Unmet {
    fn from(_: Gone) -> Self {
        Self::Gone
    }
}
