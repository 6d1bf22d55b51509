//! Why something was not done to a disk.

use std::io;
use std::path::{Path, PathBuf};

use crate::guest::volumes::holders::Holders;
use crate::sys::program;

/// Why not.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It cannot be opened or read, or is no block device.
    #[error("cannot read {}", device.display())]
    Unreadable {
        /// The device.
        device: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// It has no medium.
    #[error("{} has size 0", device.display())]
    Empty {
        /// The device.
        device: PathBuf,
    },
    /// It is not, or not any more, the disk that was meant.
    #[error("{} is not the expected disk: {why}", device.display())]
    Another {
        /// Its name.
        device: PathBuf,
        /// How that is known.
        why: &'static str,
    },
    /// It cannot be written to.
    #[error("{} is read-only", device.display())]
    ReadOnly {
        /// The device.
        device: PathBuf,
    },
    /// It does not answer.
    #[error("{} did not answer within {seconds} s", what.display())]
    Silent {
        /// The device or place.
        what: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// Something else is being done to it.
    #[error("{} is busy: {doing}", what.display())]
    Busy {
        /// The device or place.
        what: PathBuf,
        /// What is being done.
        doing: &'static str,
    },
    /// Another program has locked it.
    #[error("another program has locked {}", device.display())]
    Locked {
        /// The disk.
        device: PathBuf,
    },
    /// It is mounted, part of another device, or used to swap.
    #[error("{} is in use", device.display())]
    Claimed {
        /// The device.
        device: PathBuf,
    },
    /// There is something on it that must not be lost.
    #[error("{} is not blank: it holds {found}", device.display())]
    NotBlank {
        /// The device.
        device: PathBuf,
        /// What is on it.
        found: String,
    },
    /// A file system was made, and is not there.
    #[error("{} holds {found} after it was formatted", device.display())]
    NotMade {
        /// The device.
        device: PathBuf,
        /// What is on it instead.
        found: String,
    },
    /// Formatting it has not come to its end.
    #[error("formatting {} was interrupted: it has to be formatted again", device.display())]
    Unfinished {
        /// The device.
        device: PathBuf,
    },
    /// What is being done to it cannot be noted.
    #[error("cannot record the operation on {}", device.display())]
    Note {
        /// The device.
        device: PathBuf,
        /// What the file system says.
        source: io::Error,
    },
    /// A file system is damaged in a way that people have to decide about.
    #[error("the file system on {} is damaged, and repairing it needs a decision: {found}", device.display())]
    Damaged {
        /// The device.
        device: PathBuf,
        /// What its check says.
        found: String,
    },
    /// There is nothing on it that could be mounted, or not what was asked for.
    #[error("{} cannot be mounted as this type: it holds {found}", device.display())]
    NoFileSystem {
        /// The device.
        device: PathBuf,
        /// What is on it.
        found: String,
    },
    /// It is a copy of a file system that is mounted, and its kind does not tell them apart.
    #[error("{} holds a copy of the file system on {other}, which is mounted", device.display())]
    Copy {
        /// The device.
        device: PathBuf,
        /// The other's device.
        other: String,
    },
    /// Where it should be mounted is not as it should be.
    #[error("{} cannot be mounted on", target.display())]
    Target {
        /// The place.
        target: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// Something else is mounted there, or in another way.
    #[error("{} has something else mounted on it: {found}", target.display())]
    Otherwise {
        /// The place.
        target: PathBuf,
        /// What is mounted there, and how.
        found: String,
    },
    /// The kernel does not mount it.
    #[error("cannot mount {} at {}", what.display(), target.display())]
    Mount {
        /// What.
        what: PathBuf,
        /// Where.
        target: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// The kernel does not unmount it.
    #[error("cannot unmount {}", target.display())]
    Unmount {
        /// Where.
        target: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// Somebody uses it.
    #[error("{} is in use: {holders}", target.display())]
    InUse {
        /// Where.
        target: PathBuf,
        /// Who, as far as it can be told.
        holders: Holders,
    },
    /// The kernel does not take it as swap space, or cannot let go of it.
    #[error("cannot change the use of the swap space on {}", device.display())]
    Swap {
        /// The device.
        device: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// Its unused blocks cannot be given back.
    #[error("cannot trim {}", path.display())]
    Trim {
        /// Where.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// A name, label or option that cannot be.
    #[error("{what} {problem}")]
    Wrong {
        /// Which.
        what: String,
        /// Why not.
        problem: &'static str,
    },
    /// A path that is no text.
    #[error("{} is not UTF-8", path.display())]
    NotText {
        /// The path.
        path: PathBuf,
    },
    /// A program is missing.
    #[error("{program} is not installed in this guest")]
    NotInstalled {
        /// Its name.
        program: &'static str,
    },
    /// A program failed.
    #[error(transparent)]
    Program(#[from] program::Error),
}

impl Error {
    pub(super) fn unreadable(device: &Path, source: io::Error) -> Self {
        Self::Unreadable { device: device.to_owned(), source }
    }

    pub(in crate::guest) fn wrong(what: impl Into<String>, problem: &'static str) -> Self {
        Self::Wrong { what: what.into(), problem }
    }
}
