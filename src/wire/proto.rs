//! The guestlet API's messages and services, generated from `proto/`.

/// Package `guestlet.v1`.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("guestlet.v1");
}
