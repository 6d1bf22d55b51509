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
        Error::Api(status) if status.code == 403 => {
            format!("{}; see the roles in packaging/kubernetes", status.message)
        }
        Error::Api(status) => status.message.clone(),
        error => crate::sys::error_chain::words(error),
    }
}

/// What an admission webhook says that does not let a request be. Its code says nothing: Harvester's webhooks answer 500 to whatever they
/// have no code of their own for, and 409 to some of what an object says, which else means that somebody was faster.
pub fn denied(error: &Error) -> Option<&str> {
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

/// The HTTP status of a refusal.
pub fn code(error: &Error) -> Option<u16> {
    match error {
        Error::Api(status) => Some(status.code),
        _ => None,
    }
}
