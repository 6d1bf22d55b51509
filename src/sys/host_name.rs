//! The name of this machine.

use nix::unistd::gethostname;

/// What `gethostname(2)` gives; empty if it fails.
pub fn host_name() -> String {
    gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
