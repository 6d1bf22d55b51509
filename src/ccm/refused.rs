//! Reasons why the API server or the host half did not carry out a decided change.

use kube::Resource;
use tonic::Status;

use crate::ccm::events::{News, Recorder};
use crate::ccm::instance::clean;
use crate::kubernetes::fence::Closed;
use crate::kubernetes::lists::Failed;
use crate::kubernetes::{code, refusal, words};

/// Reason why a change was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// The object has changed; the watch will report its new state.
    #[error("the object was changed or deleted meanwhile")]
    Other,
    /// Denied, and a retry would be denied as well: by an admission webhook or policy, by the roles, or by the
    /// kind itself.
    #[error("{0}")]
    Denied(String),
    /// Failed otherwise, with a message for people.
    #[error("{0}")]
    Failed(String),
    /// The host half has answered with an error.
    #[error("{}", clean(.0.message()))]
    Host(Status),
}

impl Refused {
    /// Records an event about the object that cannot be changed, if people have to know.
    pub(super) async fn tell<K: Resource<DynamicType = ()>>(&self, recorder: &Recorder, object: &K) {
        if let Some(news) = self.news() {
            recorder.tell(object, &news).await;
        }
    }

    /// Returns the event about an object that cannot be changed, if people can do something about it.
    fn news(&self) -> Option<News> {
        let Self::Denied(why) = self else { return None };
        Some(News::warning(
            "ChangeRefused",
            format!("the API server refuses the changes for its host: {}", clean(why)),
        ))
    }
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
            Failed::Answered(error) if refusal(&error).is_some() => Self::Denied(words(&error)),
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

#[cfg(test)]
mod tests {
    use kube::Error;
    use kube::core::Status;

    use super::*;

    /// A webhook that answers with 409 or 404 does not mean that somebody else was faster, or that the object was
    /// deleted.
    #[test]
    fn what_is_refused_is_told_whatever_its_code() {
        let told = |code: u16, message: &str| {
            let mut status = Status::failure(message, "");
            status.code = code;
            let refused = Refused::from(Failed::Answered(Error::Api(Box::new(status))));
            match &refused {
                Refused::Denied(_) => refused.news().unwrap().message,
                Refused::Other => "other".to_owned(),
                _ => "failed".to_owned(),
            }
        };
        let denial = "admission webhook \"services.example.org\" denied the request: no finalizers";
        for code in [400, 404, 409, 500] {
            let expected = format!("the API server refuses the changes for its host: {denial}");
            assert_eq!(told(code, denial), expected);
        }
        assert_eq!([told(404, "not found"), told(409, "modified")], ["other", "other"]);
        assert_eq!(told(500, "failed calling webhook \"a\": timeout"), "failed");
        assert!(told(403, "no right").contains("packaging/kubernetes"));
    }
}
