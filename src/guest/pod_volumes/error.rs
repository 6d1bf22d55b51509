//! Why something was not done to a volume of pods.

use std::io;
use std::iter::successors;
use std::path::PathBuf;

use nix::errno::Errno;

use crate::guest::volumes;

/// Why not.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// kubelet is not served.
    #[error("kubelet's directory is not known")]
    NoKubelet,
    /// Something else is being done to the volume.
    #[error("the volume {volume} is busy: {doing}")]
    Busy {
        /// The volume.
        volume: String,
        /// What is being done.
        doing: &'static str,
    },
    /// File systems are frozen.
    #[error("mounting and unmounting is suspended: {0}")]
    Frozen(String),
    /// It takes too long; it goes on.
    #[error("{} did not answer within {seconds} s", what.display())]
    Silent {
        /// What was asked.
        what: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// A path that is none of kubelet's.
    #[error("the path {path:?} {problem}")]
    Path {
        /// The path as it was given.
        path: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// What a path is in is not there.
    #[error("the directory of {} does not exist", .0.display())]
    NoFolder(PathBuf),
    /// Nothing that a disk could be known by.
    #[error("{0}")]
    Unusable(String),
    /// The disk is not there.
    #[error("no disk of the volume {volume} ({by}) has appeared within {seconds} s")]
    NoDisk {
        /// The volume.
        volume: String,
        /// By what it was looked for.
        by: String,
        /// How long.
        seconds: u64,
    },
    /// Several disks may be meant.
    #[error("the volume {volume} may be any of several disks: {}", disks.join("; "))]
    Ambiguous {
        /// The volume.
        volume: String,
        /// Their names, with what tells them apart.
        disks: Vec<String>,
    },
    /// The disk may be another one than the volume's.
    #[error("the volume {volume}: {disk} shows only part of its serial number, and so is {what}")]
    Unsure {
        /// The volume.
        volume: String,
        /// The disk, with what tells it from others.
        disk: String,
        /// Why that is not enough.
        what: &'static str,
    },
    /// The disk is gone while it is in use.
    #[error("the disk of what is mounted at {} is gone", .0.display())]
    Gone(PathBuf),
    /// It is used in another way already.
    #[error("{} is in use for something else: {found}", place.display())]
    Otherwise {
        /// Where.
        place: PathBuf,
        /// How.
        found: String,
    },
    /// The volume has not been staged.
    #[error("the volume is not staged at {}: {found}", place.display())]
    NotStaged {
        /// Where.
        place: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// The server of a share does not answer, or cannot be reached.
    #[error("the server of the share {address} does not answer: {why}")]
    NoServer {
        /// As the kernel calls it.
        address: String,
        /// What was seen of it.
        why: String,
    },
    /// The kernel has no NFS, or cannot make mounts apart from where they are attached.
    #[error(
        "this guest's kernel cannot mount shares: it is older than Linux 5.2, or has no module nfsv4 (on Debian in \
         linux-image-amd64 and -cloud-amd64, on Ubuntu in linux-modules-extra)"
    )]
    NoNfs,
    /// Only one pod may have it.
    #[error("the volume is for one pod at a time, and is already published at {}", .0.display())]
    Taken(PathBuf),
    /// Nothing is mounted there.
    #[error("there is no volume at {}", .0.display())]
    NotThere(PathBuf),
    /// A size that cannot be.
    #[error("{0}")]
    Range(String),
    /// It cannot grow as it is.
    #[error("the file system at {} is read-only, and so cannot be grown", .0.display())]
    ReadOnly(PathBuf),
    /// It did not grow.
    #[error("{0}")]
    NotGrown(String),
    /// What was done to the disk did not succeed.
    #[error(transparent)]
    Volume(#[from] volumes::Error),
    /// The system refused.
    #[error("cannot {what} {}", place.display())]
    System {
        /// To do what.
        what: &'static str,
        /// With what.
        place: PathBuf,
        /// What it says.
        source: io::Error,
    },
}

impl Error {
    /// Whether this may come of a device that is gone, or about to go.
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
