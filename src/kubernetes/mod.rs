//! Common code of those programs of guestlet that are clients of a Kubernetes API server, be it that of the host
//! cluster or of a guest cluster.
//!
//! ```text
//!  connect ──▶ kube::Client ──▶ lists ──▶ follow         which objects exist, and how they change
//!                          └──▶ lease ──extends──▶ fence  which replica may change anything, and until when
//! ```
//!
//! [`standing`] reports what does not work. Nothing here knows what the objects are for. To add a function of this
//! kind: a file here that imports no more of the program than `sys`.

use kube::Error;

pub mod connect;
pub mod fence;
pub mod follow;
pub mod lease;
pub mod lists;
pub mod standing;

/// Returns the API server's own message for an error, or the reason why there is no answer.
pub fn words(error: &Error) -> String {
    match error {
        Error::Api(status) if code(error) == Some(403) => {
            format!("{}; see the roles in packaging/kubernetes", status.message)
        }
        Error::Api(status) => status.message.clone(),
        error => crate::sys::error_chain::words(error),
    }
}

/// Returns the message if an admission webhook denied a request. The status code says nothing then: Harvester's
/// webhooks answer 500 where they have no code of their own, and 409 to some contents of objects, which otherwise
/// means a conflicting write.
fn denied(error: &Error) -> Option<&str> {
    match error {
        Error::Api(status)
            if status.message.starts_with("admission webhook \"")
                && status.message.contains("\" denied the request") =>
        {
            Some(&status.message)
        }
        _ => None,
    }
}

/// Returns the HTTP status with which the API server refused a request; none if it did not answer, or if an
/// admission webhook denied the request: see [`refusal`].
pub fn code(error: &Error) -> Option<u16> {
    match error {
        Error::Api(status) if denied(error).is_none() => Some(status.code),
        _ => None,
    }
}

/// Returns the message if a request is refused for its contents: by an admission webhook, by an admission policy,
/// or by the validation of its kind. The same request fails again unless something is changed.
pub fn refusal(error: &Error) -> Option<&str> {
    match error {
        Error::Api(status) if matches!(code(error), None | Some(400 | 403 | 422)) => Some(&status.message),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn error(code: u16, message: &str) -> Error {
        let mut status = Status::failure(message, "");
        status.code = code;
        Error::Api(Box::new(status))
    }

    /// Guards against status codes of Harvester's webhooks, which are 500, and for some 409 or 404.
    #[test]
    fn of_what_a_webhook_denies_the_code_says_nothing() {
        let denial = "admission webhook \"validator.harvesterhci.io\" denied the request: the pool is full";
        for number in [400, 403, 404, 409, 422, 500] {
            let error = error(number, denial);
            assert_eq!((code(&error), refusal(&error)), (None, Some(denial)), "{number}");
            assert_eq!(words(&error), denial, "no role would help");
        }
        // A webhook that cannot be called has not denied anything.
        let away = "Internal error occurred: failed calling webhook \"a\": connection refused";
        for (number, message, is_refusal) in [
            (500, away, false),
            (404, "not found", false),
            (409, "the object has been modified", false),
            (403, "ValidatingAdmissionPolicy 'p' denied request: no", true),
            (422, "spec.ipam: Invalid value", true),
        ] {
            let error = error(number, message);
            assert_eq!((code(&error), refusal(&error).is_some()), (Some(number), is_refusal), "{message}");
        }
        assert_eq!(refusal(&Error::LinesCodecMaxLineLengthExceeded), None);
        assert!(words(&error(403, "no")).ends_with("packaging/kubernetes"));
    }
}
