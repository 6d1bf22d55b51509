//! What went wrong with a volume: in words that a guest may read, and in those that only its host may.

use tonic::{Code, Status};

use crate::host::backends::disks::DiskError;
use crate::host::backends::volumes::VolumeError;
use crate::host::fleet::Stopped;

/// Of which kind a problem is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// What is asked makes no sense, however things are.
    Invalid,
    /// There is no such thing, or it is another cluster's.
    NotFound,
    /// It is there, and not as asked.
    Exists,
    /// Not as things are.
    Precondition,
    /// The size cannot be had.
    OutOfRange,
    /// There is no room, or no more of it in a quota.
    Exhausted,
    /// Something else is being done to it.
    Aborted,
    /// The asker may not.
    Denied,
    /// Not now.
    Unavailable,
    /// It was begun, and takes longer.
    Late,
    /// A fault.
    Internal,
}

/// What to do about a volume of another host.
const ELSEWHERE: &str = "ask the host that has this pool, or restore its directory in the settings of this one; if the \
                         volume is lost, its PersistentVolume can only be deleted by hand (docs/csi.md, \"Where a volume is\")";

/// A problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{words}")]
pub struct Problem {
    /// Of which kind.
    pub kind: Kind,
    words: String,
    /// What only the host may know, such as paths.
    detail: Option<String>,
}

impl Problem {
    /// In words for everybody.
    pub fn new(kind: Kind, words: impl Into<String>) -> Self {
        Self { kind, words: words.into(), detail: None }
    }

    /// In words for everybody, and others for the host.
    pub fn with_detail(kind: Kind, words: impl Into<String>, detail: String) -> Self {
        Self { kind, words: words.into(), detail: Some(detail) }
    }

    /// There is no such volume, or it is another cluster's.
    pub fn no_volume(id: &str) -> Self {
        Self::new(Kind::NotFound, format!("there is no volume {id:?}"))
    }

    /// There is no such VM, or it is another cluster's.
    pub fn no_node(node: &str) -> Self {
        Self::new(Kind::NotFound, format!("the node {node:?} is not on this host"))
    }

    /// As gRPC names it.
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

    /// For a guest.
    pub fn for_guest(self) -> Status {
        Status::new(self.code(), self.words)
    }

    /// For people on the host.
    pub fn for_host(self) -> Status {
        Status::new(self.code(), self.words_for_host())
    }

    /// In the words for people on the host.
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
            // All that it says stands in the identifier, but for the host's name, which guests are told anyway.
            VolumeError::Elsewhere(_) => Self::new(Kind::Unavailable, format!("{words}; {ELSEWHERE}")),
            VolumeError::Damaged(_) => Self::with_detail(Kind::Internal, "the volume is damaged", words),
            VolumeError::Disk(error) => error.into(),
            VolumeError::System(..) => fault(words),
        }
    }
}

fn fault(detail: String) -> Problem {
    Problem::with_detail(Kind::Internal, "the host could not do it; see the log of guestlet-host", detail)
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
                Self::with_detail(Kind::Unavailable, "the hypervisor of the VM cannot be asked now", words)
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
