//! Reasons why a session with the API server ended.

use kube::core::Status;

use crate::sys::error_chain;

/// Reason why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    /// The server refused a request.
    #[error("the API server refuses: {} ({})", .0.message, .0.code)]
    Refused(Box<Status>),
    /// The server cannot be reached, or its answer is malformed.
    #[error("the API server: {0}")]
    Failed(String),
    /// The answer did not arrive in time.
    #[error("the API server does not answer")]
    Silent,
    /// Other clients changed the Node again and again.
    #[error("other clients keep changing the Node at the same time")]
    Crowded,
}

impl From<kube::Error> for End {
    fn from(error: kube::Error) -> Self {
        use kube::Error;

        let failed = |source: &dyn std::error::Error| Self::Failed(error_chain::words(source));
        match error {
            Error::Api(status) => Self::Refused(status),
            Error::Service(source) => failed(&*source),
            Error::HyperError(source) => failed(&source),
            Error::ReadEvents(source) => failed(&source),
            Error::HttpError(source) => failed(&source),
            Error::SerdeError(source) => failed(&source),
            Error::BuildRequest(source) => failed(&source),
            Error::FromUtf8(source) => failed(&source),
            Error::LinesCodecMaxLineLengthExceeded => Self::Failed("a line is too long".to_owned()),
            // Errors of parts of kube that are not used here.
            _ => Self::Failed("the Kubernetes client failed".to_owned()),
        }
    }
}

impl End {
    /// Returns the HTTP status code with which the server refused the request.
    pub(super) fn code(&self) -> Option<u16> {
        match self {
            Self::Refused(status) => Some(status.code),
            _ => None,
        }
    }

    /// Describes the reason for users, in at most 300 characters.
    pub(super) fn words(&self) -> String {
        self.to_string().chars().filter(|c| !c.is_control()).take(300).collect()
    }
}
