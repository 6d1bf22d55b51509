//! Why something that was decided was not done: at the API server, or at the host half.

use tonic::Status;

use crate::ccm::instance::clean;
use crate::kubernetes::fence::Closed;
use crate::kubernetes::lists::Failed;
use crate::kubernetes::{code, words};

/// Reason why a change was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// What has become of the object is heard of.
    #[error("the object is not as it was, or not there any more")]
    Other,
    /// In words for people.
    #[error("{0}")]
    Failed(String),
    /// The host half's answer.
    #[error("{}", clean(.0.message()))]
    Host(Status),
}

impl From<Closed> for Refused {
    fn from(closed: Closed) -> Self {
        Self::Failed(closed.to_string())
    }
}

impl From<Failed> for Refused {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Answered(error) if matches!(code(&error), Some(404 | 409)) => Self::Other,
            Failed::Answered(error) => Self::Failed(words(&error)),
            Failed::Late => Self::Failed(failed.to_string()),
        }
    }
}

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        Self::Host(status)
    }
}
