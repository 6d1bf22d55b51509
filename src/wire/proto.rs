//! Messages and services, generated from `proto/`: the guestlet API, CSI, and kubelet's plugin registration.

/// Package `guestlet.v1`.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("guestlet.v1");
}

/// Package `csi.v1`.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, reason = "generated")]
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// Package `pluginregistration`.
#[cfg(feature = "agent")]
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, reason = "generated")]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}
