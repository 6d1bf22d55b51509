//! Problems with volumes: each has one text that a guest may read, and perhaps another that only its host may.

use tonic::{Code, Status};

use crate::host::backends::disks::DiskError;
use crate::host::backends::volumes::VolumeError;
use crate::host::fleet::Stopped;

/// Kind of a problem, which determines the gRPC status code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong in any state of the volumes.
    Invalid,
    /// The object does not exist, or belongs to another cluster.
    NotFound,
    /// The object exists, but differs from the request.
    Exists,
    /// The request is not possible in the present state.
    Precondition,
    /// The size is not possible.
    OutOfRange,
    /// The pool has not enough free space, or a quota is exhausted.
    Exhausted,
    /// Another operation on the volume is under way.
    Aborted,
    /// The caller has no permission.
    Denied,
    /// The operation is not possible now, but may be later.
    Unavailable,
    /// The operation has begun, and takes longer than the caller can wait.
    Late,
    /// The host has failed; its log says why.
    Internal,
}

/// Advice about a volume of another host.
const ELSEWHERE: &str = "ask the host that has this pool, or restore its directory in the settings of this one; if the \
                         volume is lost, its PersistentVolume can only be deleted by hand (docs/csi.md, \"Where a volume is\")";

/// Problem with a volume, which ends a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{words}")]
pub struct Problem {
    /// Kind of the problem, for the status code.
    pub kind: Kind,
    words: String,
    /// Text that only the host may see, since it contains paths, for example.
    detail: Option<String>,
}

impl Problem {
    /// Creates a problem whose text both guests and the host may see.
    pub fn new(kind: Kind, words: impl Into<String>) -> Self {
        Self { kind, words: words.into(), detail: None }
    }

    /// Creates a problem with a text for guests and a more detailed one for the host.
    pub fn with_detail(kind: Kind, words: impl Into<String>, detail: String) -> Self {
        Self { kind, words: words.into(), detail: Some(detail) }
    }

    /// Creates the problem of a volume that does not exist or belongs to another cluster: a guest cannot tell which.
    pub fn no_volume(id: &str) -> Self {
        Self::new(Kind::NotFound, format!("there is no volume {id:?}"))
    }

    /// Creates the problem of a VM that does not exist or belongs to another cluster: a guest cannot tell which.
    pub fn no_node(node: &str) -> Self {
        Self::new(Kind::NotFound, format!("the node {node:?} is not on this host"))
    }

    /// Returns the gRPC status code.
    pub fn code(&self) -> Code {
        match self.kind {
            Kind::Invalid => Code::InvalidArgument,
            Kind::NotFound => Code::NotFound,
            Kind::Exists => Code::AlreadyExists,
            Kind::Precondition => Code::FailedPrecondition,
            Kind::OutOfRange => Code::OutOfRange,
            Kind::Exhausted => Code::ResourceExhausted,
            Kind::Aborted => Code::Aborted,
            Kind::Denied => Code::PermissionDenied,
            Kind::Unavailable => Code::Unavailable,
            Kind::Late => Code::DeadlineExceeded,
            Kind::Internal => Code::Internal,
        }
    }

    /// Returns the gRPC status for a guest, without the detail.
    pub fn for_guest(self) -> Status {
        Status::new(self.code(), self.words)
    }

    /// Returns the gRPC status for people on the host, with the detail.
    pub fn for_host(self) -> Status {
        Status::new(self.code(), self.words_for_host())
    }

    /// Returns the text for people on the host: the detail, if there is one.
    pub fn words_for_host(&self) -> String {
        self.detail.clone().unwrap_or_else(|| self.words.clone())
    }
}

impl From<Stopped> for Problem {
    fn from(stopped: Stopped) -> Self {
        Self::new(Kind::Unavailable, stopped.to_string())
    }
}

impl From<VolumeError> for Problem {
    fn from(error: VolumeError) -> Self {
        let words = error.to_string();
        match error {
            VolumeError::Unknown(id) => Self::no_volume(&id),
            VolumeError::NoClass(_) => Self::new(Kind::Invalid, words),
            VolumeError::Full(_) => Self::new(Kind::Exhausted, words),
            VolumeError::Unavailable(_) => {
                Self::with_detail(Kind::Unavailable, "the pool of the volume cannot be used now", words)
            }
            VolumeError::Waiting { words: for_all, .. } => {
                Self::with_detail(Kind::Unavailable, for_all, words)
            }
            VolumeError::Refused(words) | VolumeError::NotGiven { words, .. } => {
                Self::new(Kind::Precondition, words)
            }
            VolumeError::InUse(_) | VolumeError::Contested(_) => {
                Self::with_detail(Kind::Unavailable, "the volume is in use", words)
            }
            // The text adds only the host's name to the identifier, and guests know that name anyway.
            VolumeError::Elsewhere(_) => Self::new(Kind::Unavailable, format!("{words}; {ELSEWHERE}")),
            VolumeError::Damaged(_) => Self::with_detail(Kind::Internal, "the volume is damaged", words),
            VolumeError::Disk(error) => error.into(),
            VolumeError::System(..) => fault(words),
        }
    }
}

fn fault(detail: String) -> Problem {
    Problem::with_detail(Kind::Internal, "it failed on the host; see the log of guestlet-host", detail)
}

impl From<DiskError> for Problem {
    fn from(error: DiskError) -> Self {
        let words = error.to_string();
        match error {
            DiskError::UnknownVm => Self::new(Kind::NotFound, "the VM is no longer on this host"),
            DiskError::FileInUse { .. } | DiskError::Held(_) => {
                Self::with_detail(Kind::Precondition, "the volume is in use elsewhere", words)
            }
            DiskError::NoHypervisor(_)
            | DiskError::NoController(_)
            | DiskError::NotReleased(_)
            | DiskError::GuestRefuses(_) => Self::new(Kind::Precondition, words),
            DiskError::ControllersFull | DiskError::NoPort(_) => Self::new(Kind::Exhausted, words),
            DiskError::Kept { .. } => Self::new(Kind::Late, words),
            DiskError::Unreachable(_) => {
                Self::with_detail(Kind::Unavailable, "the hypervisor of the VM cannot be queried now", words)
            }
            DiskError::Untold(_) => Self::new(Kind::Unavailable, words),
            DiskError::Busy(_) => Self::new(Kind::Aborted, words),
            DiskError::Refused(_)
            | DiskError::Strange(_)
            | DiskError::Serial(_)
            | DiskError::Size(_)
            | DiskError::File(..)
            | DiskError::System(..)
            | DiskError::NoFormat(_)
            | DiskError::SerialInUse { .. }
            | DiskError::Different { .. }
            | DiskError::NotAttached(_)
            | DiskError::NotOurs { .. }
            | DiskError::Shrinks { .. } => fault(words),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_reads_no_paths_of_its_host() {
        let path = || std::path::PathBuf::from("/pools/fast/x.raw");
        let gone = || std::io::Error::from(std::io::ErrorKind::NotFound);
        for error in [
            VolumeError::System("make", path(), gone()),
            VolumeError::Unavailable("/pools/fast cannot be used".into()),
            VolumeError::Disk(DiskError::System("use", path(), gone())),
            VolumeError::Disk(DiskError::FileInUse { file: path(), device: "b".into() }),
            VolumeError::Disk(DiskError::Unreachable("/run/a.qmp: gone".into())),
        ] {
            let problem = Problem::from(error);
            assert!(!problem.clone().for_guest().message().contains('/'), "{problem:?}");
            assert!(problem.clone().for_host().message().contains('/'), "{problem:?}");
        }
    }
}
