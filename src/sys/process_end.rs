//! Detection that another process has ended, by a pidfd, `pidfd_open(2)`, which refers to one process and
//! never to a later one with the same number.

use std::io;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::io::Interest;

use crate::sys::descriptor;

/// A process that ran when this was made.
#[derive(Debug)]
pub struct Process(OwnedFd);

impl Process {
    /// Opens the process with this number. The caller must make sure that it is the intended one, not a later one
    /// with a reused number, by something that the process does after this call.
    ///
    /// # Errors
    /// The errors of `pidfd_open(2)`: there is no such process, or the kernel is older than 5.3.
    pub fn of(number: i32) -> io::Result<Self> {
        // SAFETY: pidfd_open(2) takes two numbers, and no pointer.
        let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
        let descriptor = Errno::result(opened)?;
        let descriptor = i32::try_from(descriptor).map_err(io::Error::other)?;
        // SAFETY: the kernel has just created this descriptor, which has no other owner.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }

    /// Returns whether the process has ended with all of its threads, and so has closed all of its descriptors.
    ///
    /// # Errors
    /// The errors of poll(2).
    pub fn has_ended(&self) -> io::Result<bool> {
        let mut asked = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut asked, PollTimeout::ZERO)? > 0)
    }

    /// Completes when it has ended, whether or not its parent has waited for it.
    pub async fn ended(&self) {
        // An error is the event loop's end.
        let _ = descriptor::wait(self.0.as_fd(), Interest::READABLE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "the test needs a process")]
    fn the_end_of_a_process_is_seen() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::of(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(!process.has_ended().unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended().unwrap());
        assert!(Process::of(i32::MAX).is_err());
    }

    #[tokio::test]
    #[allow(clippy::disallowed_methods, reason = "the test needs a process")]
    async fn the_end_of_a_process_is_waited_for_before_its_parent_has_seen_it() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::of(i32::try_from(child.id()).unwrap()).unwrap();
        child.kill().unwrap();
        process.ended().await;
        assert!(std::path::Path::new(&format!("/proc/{}", child.id())).exists());
        child.wait().unwrap();
    }
}
