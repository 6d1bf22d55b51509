//! Errors of operations on disks.

use std::io;
use std::path::{Path, PathBuf};

use crate::guest::volumes::holders::Holders;
use crate::sys::program;

/// Reasons why an operation on a disk failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device cannot be opened or read, or is not a block device.
    #[error("cannot read {}", device.display())]
    Unreadable {
        /// Path of the device.
        device: PathBuf,
        /// Error returned by the kernel.
        source: io::Error,
    },
    /// The device has no medium.
    #[error("{} has size 0", device.display())]
    Empty {
        /// Path of the device.
        device: PathBuf,
    },
    /// The device is not, or no longer, the disk that was meant.
    #[error("{} is not the expected disk: {why}", device.display())]
    Another {
        /// Name of the device.
        device: PathBuf,
        /// Evidence for that.
        why: &'static str,
    },
    /// The device cannot be written to.
    #[error("{} is read-only", device.display())]
    ReadOnly {
        /// Path of the device.
        device: PathBuf,
    },
    /// The device or mount point does not respond.
    #[error("{} did not answer within {seconds} s", what.display())]
    Silent {
        /// Path of the device or mount point.
        what: PathBuf,
        /// Seconds for which a response was waited for.
        seconds: u64,
    },
    /// Another operation on it is running.
    #[error("{} is busy: {doing}", what.display())]
    Busy {
        /// Path of the device or mount point.
        what: PathBuf,
        /// Description of the running operation.
        doing: &'static str,
    },
    /// Another program has locked the disk.
    #[error("another program has locked {}", device.display())]
    Locked {
        /// Path of the disk.
        device: PathBuf,
    },
    /// The device is mounted, part of another device, or used as swap space.
    #[error("{} is in use", device.display())]
    Claimed {
        /// Path of the device.
        device: PathBuf,
    },
    /// The device holds data that must not be lost.
    #[error("{} is not blank: it holds {found}", device.display())]
    NotBlank {
        /// Path of the device.
        device: PathBuf,
        /// Description of the contents.
        found: String,
    },
    /// A file system was made, but cannot be found on the device.
    #[error("{} holds {found} after it was formatted", device.display())]
    NotMade {
        /// Path of the device.
        device: PathBuf,
        /// Description of the contents that were found instead.
        found: String,
    },
    /// An earlier format of the device has not been completed.
    #[error("formatting {} was interrupted: it has to be formatted again", device.display())]
    Unfinished {
        /// Path of the device.
        device: PathBuf,
    },
    /// The note about the operation cannot be read or written.
    #[error("cannot record the operation on {}", device.display())]
    Note {
        /// Path of the device.
        device: PathBuf,
        /// Error returned by the kernel.
        source: io::Error,
    },
    /// The file system is damaged in a way that a person has to decide about.
    #[error("the file system on {} is damaged and needs manual repair: {found}", device.display())]
    Damaged {
        /// Path of the device.
        device: PathBuf,
        /// Output of the check.
        found: String,
    },
    /// The device has no file system that can be mounted, or not the requested kind.
    #[error("{} cannot be mounted as this type: it holds {found}", device.display())]
    NoFileSystem {
        /// Path of the device.
        device: PathBuf,
        /// Description of the contents.
        found: String,
    },
    /// The file system is a copy of one that is mounted, and its kind cannot tell them apart.
    #[error("{} holds a copy of the file system on {other}, which is mounted", device.display())]
    Copy {
        /// Path of the device.
        device: PathBuf,
        /// Device of the mounted one.
        other: String,
    },
    /// The mount point is unsuitable.
    #[error("{} cannot be mounted on", target.display())]
    Target {
        /// Path of the mount point.
        target: PathBuf,
        /// Reason why it is unsuitable.
        source: io::Error,
    },
    /// Something else is mounted there, or with other options.
    #[error("{} has something else mounted on it: {found}", target.display())]
    Otherwise {
        /// Path of the mount point.
        target: PathBuf,
        /// Description of the present mount.
        found: String,
    },
    /// The kernel refused the mount.
    #[error("cannot mount {} at {}", what.display(), target.display())]
    Mount {
        /// Device or path to be mounted.
        what: PathBuf,
        /// Path of the mount point.
        target: PathBuf,
        /// Error returned by the kernel.
        source: io::Error,
    },
    /// The kernel refused the unmount.
    #[error("cannot unmount {}", target.display())]
    Unmount {
        /// Path of the mount point.
        target: PathBuf,
        /// Error returned by the kernel.
        source: io::Error,
    },
    /// The mount is in use.
    #[error("{} is in use: {holders}", target.display())]
    InUse {
        /// Path of the mount point.
        target: PathBuf,
        /// Users of the mount, as far as they could be found.
        holders: Holders,
    },
    /// The kernel refused to enable or disable the swap space.
    #[error("cannot change the use of the swap space on {}", device.display())]
    Swap {
        /// Path of the device.
        device: PathBuf,
        /// Error returned by the kernel.
        source: io::Error,
    },
    /// The unused blocks of a file system cannot be discarded.
    #[error("cannot trim {}", path.display())]
    Trim {
        /// Path in the file system.
        path: PathBuf,
        /// Error returned by the kernel.
        source: io::Error,
    },
    /// A name, label or option is invalid.
    #[error("{what} {problem}")]
    Wrong {
        /// Description of the invalid value, such as `the label "x"`.
        what: String,
        /// Reason why it is invalid.
        problem: &'static str,
    },
    /// The path is not valid UTF-8.
    #[error("{} is not UTF-8", path.display())]
    NotText {
        /// Path in question.
        path: PathBuf,
    },
    /// A required program is not installed.
    #[error("{program} is not installed in this guest")]
    NotInstalled {
        /// Name of the program.
        program: &'static str,
    },
    /// A program could not be run, or failed.
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
