//! The name of this machine.

use nix::unistd::gethostname;

/// Returns the host name that `gethostname(2)` reports; empty if it fails.
pub fn host_name() -> String {
    gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
