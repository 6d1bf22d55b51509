//! What the programs of guestlet that are clients of a Kubernetes API server have in common, whichever cluster it is of: the host
//! cluster's, or a guest cluster's.
//!
//! ```text
//!  connect ──▶ kube::Client ──▶ lists ──▶ follow         what there is, and what changes of it
//!                          └──▶ lease ──extends──▶ fence  which replica may change anything, and until when
//! ```
//!
//! [`standing`] tells people what does not work. Nothing here knows what the objects are for; one more of these is a file here that
//! imports no more of the program than `sys`.

use kube::Error;

pub mod connect;
pub mod fence;
pub mod follow;
pub mod lease;
pub mod lists;
pub mod standing;

/// The API server's own words for an error, or why there are none.
pub fn words(error: &Error) -> String {
    match error {
        Error::Api(status) if code(error) == Some(403) => {
            format!("{}; see the roles in packaging/kubernetes", status.message)
        }
        Error::Api(status) => status.message.clone(),
        error => crate::sys::error_chain::words(error),
    }
}

/// Words in which an admission webhook does not let a request be. Its code says nothing: Harvester's webhooks answer 500 to whatever
/// they have no code of their own for, and 409 to some of what an object says, which else means that somebody was faster.
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

/// HTTP status by which the API server says why it has not done something. None where it has not answered, and none where an admission
/// webhook has: see [`refusal`].
pub fn code(error: &Error) -> Option<u16> {
    match error {
        Error::Api(status) if denied(error).is_none() => Some(status.code),
        _ => None,
    }
}

/// Words in which a request is refused for what it asks: by an admission webhook, an admission policy, or what its kind has to be
/// like. The same request is refused again, unless somebody changes something.
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

    /// Harvester's webhooks answer with 500, and some with 409 or 404.
    #[test]
    fn of_what_a_webhook_denies_the_code_says_nothing() {
        let denial = "admission webhook \"validator.harvesterhci.io\" denied the request: the pool is full";
        for number in [400, 403, 404, 409, 422, 500] {
            let error = error(number, denial);
            assert_eq!((code(&error), refusal(&error)), (None, Some(denial)), "{number}");
            assert_eq!(words(&error), denial, "no role would help");
        }
        // One that cannot be called has said nothing.
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
