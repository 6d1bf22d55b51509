//! File descriptors in the event loop.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use nix::libc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers `descriptor` with the event loop, to be told when it becomes readable.
///
/// # Errors
/// If it is nothing that can be polled.
pub fn watch_readable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is one and the same open descriptor for as long as it lives, and AsyncFd owns it.
    unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }.map_err(io::Error::from)
}

/// Registers `descriptor` with the event loop, to be told when it becomes writable, as a socket does when its
/// connect(2) has ended.
///
/// # Errors
/// If it is nothing that can be polled.
pub fn watch_writable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: as above.
    unsafe { AsyncFd::register_with_interest(descriptor, Interest::WRITABLE) }.map_err(io::Error::from)
}

/// Registers `descriptor` with the event loop, to be told when it becomes readable and when it becomes writable.
///
/// # Errors
/// If it is nothing that can be polled.
#[cfg(feature = "agent")]
pub fn watch_both(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    let both = Interest::READABLE | Interest::WRITABLE;
    // SAFETY: as above.
    unsafe { AsyncFd::register_with_interest(descriptor, both) }.map_err(io::Error::from)
}

/// Waits until `descriptor` is ready. The event loop knows it for no longer than that, so what happens to it
/// at other times wakes nobody; it counts when this is called again.
///
/// # Errors
/// If it is nothing that can be polled.
pub async fn wait(descriptor: BorrowedFd<'_>, interest: Interest) -> io::Result<()> {
    // SAFETY: a BorrowedFd is one and the same open descriptor for as long as it lives, and AsyncFd holds it.
    let registered = unsafe { AsyncFd::register_with_interest(descriptor, interest) }?;
    drop(registered.ready(interest).await?);
    Ok(())
}

/// Closes `descriptor`, and says what that came to: with some file systems writes fail no sooner.
///
/// # Errors
/// As close(2) gives them. The descriptor is closed nevertheless.
pub fn close(descriptor: OwnedFd) -> io::Result<()> {
    Ok(nix::unistd::close(descriptor)?)
}

/// Sees to it that no program which is started gets any of the descriptors that are open now: neither those that the
/// agent was started with nor any of its own. Where the kernel cannot do it (before Linux 5.11) only the latter is so,
/// as each is opened that way.
pub fn keep_from_programs() {
    const FROM: libc::c_uint = 3;
    // SAFETY: close_range(2) with this flag changes no more than whether descriptors outlive execve(2).
    let done =
        unsafe { libc::syscall(libc::SYS_close_range, FROM, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done != 0 {
        tracing::debug!("close_range: {}", io::Error::last_os_error());
    }
}
