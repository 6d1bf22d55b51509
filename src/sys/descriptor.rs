//! File descriptors in the event loop.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use nix::libc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers `descriptor` with the event loop, which reports when it becomes readable.
///
/// # Errors
/// If the descriptor cannot be polled.
pub fn watch_readable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is one and the same open descriptor for as long as it lives, and AsyncFd owns it.
    unsafe { AsyncFd::register_with_interest(descriptor, Interest::READABLE) }.map_err(io::Error::from)
}

/// Registers `descriptor` with the event loop, which reports when it becomes writable, as a socket does when
/// its connect(2) has completed.
///
/// # Errors
/// If the descriptor cannot be polled.
pub fn watch_writable(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: as in `watch_readable`.
    unsafe { AsyncFd::register_with_interest(descriptor, Interest::WRITABLE) }.map_err(io::Error::from)
}

/// Registers `descriptor` with the event loop, which reports when it becomes readable and when it becomes
/// writable.
///
/// # Errors
/// If the descriptor cannot be polled.
pub fn watch_both(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    let both = Interest::READABLE | Interest::WRITABLE;
    // SAFETY: as in `watch_readable`.
    unsafe { AsyncFd::register_with_interest(descriptor, both) }.map_err(io::Error::from)
}

/// Waits until `descriptor` is ready. It is registered with the event loop only for that time. What happens to
/// it at other times wakes no task, and is noticed by the next call.
///
/// # Errors
/// If the descriptor cannot be polled.
pub async fn wait(descriptor: BorrowedFd<'_>, interest: Interest) -> io::Result<()> {
    // SAFETY: a BorrowedFd is one and the same open descriptor for as long as it lives, and AsyncFd holds it.
    let registered = unsafe { AsyncFd::register_with_interest(descriptor, interest) }?;
    drop(registered.ready(interest).await?);
    Ok(())
}

/// Closes `descriptor` and returns the result: some file systems report failed writes only now.
///
/// # Errors
/// The errors of close(2). The descriptor is closed nevertheless.
pub fn close(descriptor: OwnedFd) -> io::Result<()> {
    Ok(nix::unistd::close(descriptor)?)
}

/// Sees to it that no program which is started gets any of the descriptors that are open now: neither those that the
/// agent was started with nor any of its own. Where the kernel cannot do it (before Linux 5.11) only the latter is so,
/// as each is opened that way.
pub fn keep_from_programs() {
    const FROM: libc::c_uint = 3;
    // SAFETY: close_range(2) with this flag changes only whether descriptors survive execve(2).
    let done =
        unsafe { libc::syscall(libc::SYS_close_range, FROM, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done != 0 {
        tracing::debug!("close_range: {}", io::Error::last_os_error());
    }
}

/// Descriptors that the process may have at once when everything that is bounded is at its bounds: files of clients,
/// pipes of programs, connections.
const MANY: libc::rlim_t = 4096;
/// The limits that the process was started with.
static BEFORE: OnceLock<libc::rlimit> = OnceLock::new();

/// Lets this process have as many descriptors as its own bounds add up to, if its hard limit does; usually it is 1024.
pub fn allow_many() {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit(2) fills in what the pointer leads to, which lives here.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limits) } != 0 || limits.rlim_cur >= MANY {
        return;
    }
    let more = libc::rlimit { rlim_cur: MANY.min(limits.rlim_max), ..limits };
    // SAFETY: setrlimit(2) reads what the pointer leads to, which lives here.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const more) } == 0 {
        let _ = BEFORE.set(limits);
    }
}

/// Gives a program that was started the limits that this process was started with: some programs close or count all
/// descriptors that they may have.
pub fn limit_as_before(process: u32) {
    let (Some(limits), Ok(process)) = (BEFORE.get(), libc::pid_t::try_from(process)) else { return };
    // SAFETY: prlimit(2) reads what the pointer leads to, which lives for ever, and writes nothing with a null pointer.
    let done = unsafe { libc::prlimit(process, libc::RLIMIT_NOFILE, limits, std::ptr::null_mut()) };
    if done != 0 {
        tracing::debug!("prlimit: {}", io::Error::last_os_error());
    }
}
