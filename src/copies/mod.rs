//! Both ends of a copy. They carry out the messages of `guestlet.v1.Files`: in a guest for its host half, and
//! on this side for guestctl.
//!
//! ```text
//! ToReader ──▶ reader ──▶ FromReader ┐
//!                                    │ the caller relays content
//! FromWriter ◀── writer ◀── ToWriter ┘
//! ```
//!
//! Each end runs on a thread of its own, which may block on disks. It takes requests from a channel, one
//! after the other, and ends when the channel is closed. [`Guard`] decides what may be read and written.
//! Everything below the opened object is reached by descriptors, without following symbolic links
//! ([`crate::sys::beneath`]).
//!
//! A file is written beside its final name ([`aside`]). It gets that name when it is complete, its SHA-256
//! matches, and it is on the disk. Files left by an interrupted copy are known by its [`records`].

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

/// Messages that may wait in a channel of an end.
pub const WAITING: usize = 4;

/// Decides what may be read and written.
pub trait Guard: Send {
    /// Checks whether the object behind a descriptor may be read or, if `writes`, written to. With a name, this
    /// is about the entry of that name in the directory.
    ///
    /// # Errors
    /// Fails with the reason if it may not.
    fn may(&self, found: &OwnedFd, name: Option<&[u8]>, writes: bool) -> Result<(), String>;

    /// Waits until files may be written.
    fn wait(&self) {}

    /// Records that a file of this size was completely read or written.
    fn copied(&self, bytes: u64) {
        let _ = bytes;
    }
}

/// Guard that allows everything that the system permits.
#[derive(Debug, Clone, Copy)]
pub struct Everything;

impl Guard for Everything {
    fn may(&self, _: &OwnedFd, _: Option<&[u8]>, _: bool) -> Result<(), String> {
        Ok(())
    }
}

/// Failure of a request.
#[derive(Debug)]
pub struct Failure {
    kind: FileFailure,
    words: String,
}

impl Failure {
    fn new(kind: FileFailure, words: impl Into<String>) -> Self {
        Self { kind, words: words.into() }
    }

    /// Returns a failure that a retry would meet again.
    fn last(words: impl Into<String>) -> Self {
        Self::new(FileFailure::Final, words)
    }

    fn denied(words: impl Into<String>) -> Self {
        Self::new(FileFailure::Denied, words)
    }

    /// Returns a failure of a system call on a file of this name.
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

/// The receiver of the answers has ended.
#[derive(Debug)]
struct Gone;

/// Reasons why a request was not carried out.
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
