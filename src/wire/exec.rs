//! Metadata of the statuses that `guestlet.v1.Exec` answers with, which its proto file describes.

/// Metadata key of the exit code that a shell would return: 126 or 127.
pub const EXIT_CODE: &str = "guestlet-exit-code";
/// These are the guest's words, not those of its host half.
#[cfg(any(feature = "ctl", feature = "host"))]
pub const SAID_BY_GUEST: &str = "guestlet-said-by-guest";
