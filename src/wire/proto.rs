//! Messages and services, generated from `proto/`: the guestlet API, CSI, and kubelet's plugin registration.

use std::fmt;

/// Messages and services of the package `guestlet.v1`.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("guestlet.v1");
}

impl fmt::Debug for v1::SetPasswordRequest {
    /// Without the password, whatever is ever logged.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("SetPasswordRequest");
        shown.field("name", &self.name).field("user", &self.user).finish_non_exhaustive()
    }
}

/// Messages and services of the package `csi.v1`.
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, reason = "generated")]
pub mod csi {
    tonic::include_proto!("csi.v1");
}

/// Messages and services of the package `pluginregistration`.
#[cfg(feature = "agent")]
#[allow(missing_docs, unused_qualifications, clippy::all, clippy::pedantic, reason = "generated")]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

#[cfg(test)]
mod tests {
    use super::v1::SetPasswordRequest;

    #[test]
    fn a_password_is_not_shown() {
        let (user, password) = ("me".to_owned(), b"geheim".to_vec());
        let request = SetPasswordRequest { name: "a".to_owned(), user, password, crypted: false };
        assert_eq!(format!("{request:?}"), "SetPasswordRequest { name: \"a\", user: \"me\", .. }");
    }
}
