//! Sockets that systemd holds for us, `sd_listen_fds(3)`.

use std::io;
use std::os::fd::{AsFd as _, FromRawFd, OwnedFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// A socket passed by the service manager.
#[derive(Debug)]
pub struct Passed {
    /// Descriptor of the listening socket.
    pub socket: OwnedFd,
    /// Value of `FileDescriptorName=` in the socket unit; the name of the unit if the setting is absent.
    pub name: String,
}

/// The sockets passed by the service manager.
///
/// The variables are taken out of the environment, so that no child and no second call sees them, and no program
/// that is run inherits the sockets.
///
/// # Errors
/// If the variables are set and make no sense.
pub fn take() -> io::Result<Vec<Passed>> {
    // SAFETY: called from `main` before any thread is started, so no other thread accesses the environment.
    let passed = unsafe { sd_notify::listen_fds_with_names_and_unset_env() }?;
    passed
        .map(|(fd, name)| {
            // SAFETY: the service manager opened this descriptor for this process, and with the variables unset nothing
            // else takes ownership of it.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            fcntl(socket.as_fd(), FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
            Ok(Passed { socket, name })
        })
        .collect()
}
