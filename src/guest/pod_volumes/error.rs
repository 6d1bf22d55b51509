//! Errors of operations on volumes of pods.

use std::io;
use std::iter::successors;
use std::path::PathBuf;

use nix::errno::Errno;

use crate::guest::volumes;

/// Reasons why an operation on a volume failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The agent does not serve kubelet.
    #[error("kubelet's directory is not known")]
    NoKubelet,
    /// Another operation on the volume is running.
    #[error("the volume {volume} is busy: {doing}")]
    Busy {
        /// Name of the volume.
        volume: String,
        /// Description of the running operation.
        doing: &'static str,
    },
    /// File systems are frozen; describes the freeze.
    #[error("mounting and unmounting is suspended: {0}")]
    Frozen(String),
    /// The operation takes too long; it continues.
    #[error("{} did not answer within {seconds} s", what.display())]
    Silent {
        /// Path on which it works.
        what: PathBuf,
        /// Seconds for which it was waited for.
        seconds: u64,
    },
    /// The path is not a valid path of kubelet.
    #[error("the path {path:?} {problem}")]
    Path {
        /// Path as given by the caller.
        path: String,
        /// Reason why it is invalid.
        problem: &'static str,
    },
    /// The parent directory of the path is missing.
    #[error("the directory of {} does not exist", .0.display())]
    NoFolder(PathBuf),
    /// The given properties cannot identify a disk, or the request cannot be fulfilled.
    #[error("{0}")]
    Unusable(String),
    /// The disk did not appear.
    #[error("no disk of the volume {volume} ({by}) has appeared within {seconds} s")]
    NoDisk {
        /// Name of the volume.
        volume: String,
        /// Property by which it was searched for.
        by: String,
        /// Seconds for which it was waited for.
        seconds: u64,
    },
    /// Several disks match.
    #[error("the volume {volume} may be any of several disks: {}", disks.join("; "))]
    Ambiguous {
        /// Name of the volume.
        volume: String,
        /// Names of the disks, with what distinguishes them.
        disks: Vec<String>,
    },
    /// The disk may not be the volume's.
    #[error("the volume {volume}: {disk} shows only part of its serial number, and so is {what}")]
    Unsure {
        /// Name of the volume.
        volume: String,
        /// Name of the disk, with what distinguishes it from others.
        disk: String,
        /// Operation that is refused because of that.
        what: &'static str,
    },
    /// The disk disappeared while it was in use.
    #[error("the disk mounted at {} was removed", .0.display())]
    Gone(PathBuf),
    /// The volume is already in use in a different way.
    #[error("{} is in use for something else: {found}", place.display())]
    Otherwise {
        /// Mount point of the volume.
        place: PathBuf,
        /// Description of the present mount.
        found: String,
    },
    /// The volume has not been staged.
    #[error("the volume is not staged at {}: {found}", place.display())]
    NotStaged {
        /// Staging path.
        place: PathBuf,
        /// Description of what is there.
        found: &'static str,
    },
    /// The server of a share does not respond, or cannot be reached.
    #[error("the server of the share {address} does not answer: {why}")]
    NoServer {
        /// Address and path, as in the list of mounts.
        address: String,
        /// Reason for that conclusion.
        why: String,
    },
    /// The kernel has no NFS, or cannot create mounts without attaching them.
    #[error(
        "this guest's kernel cannot mount shares: it is older than Linux 5.2, or has no module nfsv4 (on Debian in \
         linux-image-amd64 and -cloud-amd64, on Ubuntu in linux-modules-extra)"
    )]
    NoNfs,
    /// Only one pod may use the volume, and this path already does.
    #[error("the volume is for one pod at a time, and is already published at {}", .0.display())]
    Taken(PathBuf),
    /// Nothing is mounted at the path.
    #[error("there is no volume at {}", .0.display())]
    NotThere(PathBuf),
    /// The size is out of range.
    #[error("{0}")]
    Range(String),
    /// The volume is mounted read-only, and so cannot grow.
    #[error("the file system at {} is read-only, and so cannot be grown", .0.display())]
    ReadOnly(PathBuf),
    /// A layer of the volume did not grow.
    #[error("{0}")]
    NotGrown(String),
    /// An operation on the disk failed.
    #[error(transparent)]
    Volume(#[from] volumes::Error),
    /// A system call failed.
    #[error("cannot {what} {}", place.display())]
    System {
        /// Operation that failed.
        what: &'static str,
        /// Path of the object.
        place: PathBuf,
        /// Error returned by the kernel.
        source: io::Error,
    },
}

impl Error {
    /// Returns whether the cause may be a device that has disappeared, or is about to.
    pub(super) fn is_of_a_device(&self) -> bool {
        use volumes::Error::{Another, Damaged, Empty, Program};

        const CODES: [Errno; 4] = [Errno::EIO, Errno::ENXIO, Errno::ENODEV, Errno::ENOENT];

        if matches!(self, Self::Volume(Another { .. } | Empty { .. } | Damaged { .. } | Program(_))) {
            return true;
        }
        let of_a_device = |error: &io::Error| {
            error.raw_os_error().is_some_and(|code| CODES.contains(&Errno::from_raw(code)))
        };
        successors(Some(self as &(dyn std::error::Error + 'static)), |error| error.source())
            .filter_map(|error| error.downcast_ref())
            .any(of_a_device)
    }

    pub(super) fn system(what: &'static str, place: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let place = place.into();
        move |source| Self::System { what, place, source }
    }
}
