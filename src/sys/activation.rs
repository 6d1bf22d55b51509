//! Sockets that systemd holds for us, `sd_listen_fds(3)`.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// The listening sockets passed by the service manager.
///
/// The variables are taken out of the environment, so that no child and no second call sees them.
///
/// # Errors
/// If the variables are set and make no sense.
pub fn take() -> io::Result<Vec<OwnedFd>> {
    // SAFETY: called from `main` before any thread is started, so nobody else uses the environment.
    let passed = unsafe { sd_notify::listen_fds_with_names_and_unset_env() }?;
    Ok(passed
        .map(|(fd, _name)| {
            // SAFETY: the service manager opened this descriptor for us, and as the variables are gone
            // nobody else makes an owner of it.
            unsafe { OwnedFd::from_raw_fd(fd) }
        })
        .collect())
}
