//! What cannot be laid out as files: effects that calls of the kernel have on file systems and on the clock.
//!
//! Everything else that the agent does goes through a [`crate::sys::root::Root`] and so can be watched in a folder;
//! these calls would act on the machine itself, whatever the root. A test of the commands puts a machine of its own
//! behind this trait.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};

/// What was trimmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trimmed {
    /// Bytes given back.
    pub bytes: u64,
    /// The smallest free range in bytes that the file system looked at.
    pub minimum: u64,
}

/// The effects. All of them may block for as long as the disk does, but for [`Effects::set_clock`].
pub trait Effects: Debug + Send + Sync {
    /// Freezes the file system that `directory` is on (`FIFREEZE`): every write sleeps from now on.
    ///
    /// # Errors
    /// `EBUSY` if it is frozen already, `EOPNOTSUPP` if it cannot be; whatever open(2) says of the directory.
    fn freeze(&self, directory: &Path) -> io::Result<()>;

    /// Thaws it (`FITHAW`).
    ///
    /// # Errors
    /// `EINVAL` if it is not frozen; whatever open(2) says of the directory.
    fn thaw(&self, directory: &Path) -> io::Result<()>;

    /// Gives unused blocks of the file system that `directory` is on back to the disk (`FITRIM`), in ranges of at
    /// least `minimum` bytes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` or `ENOTTY` if the file system or the disk cannot do it; whatever open(2) says.
    fn trim(&self, directory: &Path, minimum: u64) -> io::Result<Trimmed>;

    /// Sets the system's clock, to this time since the epoch (`clock_settime(2)`).
    ///
    /// # Errors
    /// `EINVAL` for a time that the kernel does not take, `EPERM` without `CAP_SYS_TIME`.
    fn set_clock(&self, time: Duration) -> io::Result<()>;
}

/// This machine.
#[derive(Debug, Default, Clone, Copy)]
pub struct Machine;

impl Effects for Machine {
    fn freeze(&self, directory: &Path) -> io::Result<()> {
        let directory = File::open(directory)?;
        // SAFETY: FIFREEZE takes no argument that the kernel would read.
        unsafe { ioctl::freeze(directory.as_raw_fd(), 0) }?;
        Ok(())
    }

    fn thaw(&self, directory: &Path) -> io::Result<()> {
        let directory = File::open(directory)?;
        // SAFETY: FITHAW takes no argument that the kernel would read.
        unsafe { ioctl::thaw(directory.as_raw_fd(), 0) }?;
        Ok(())
    }

    fn trim(&self, directory: &Path, minimum: u64) -> io::Result<Trimmed> {
        let directory = File::open(directory)?;
        let mut range = ioctl::Range { start: 0, length: u64::MAX, minimum };
        // SAFETY: the range is a `struct fstrim_range`, which the kernel reads and writes.
        unsafe { ioctl::trim(directory.as_raw_fd(), &raw mut range) }?;
        Ok(Trimmed { bytes: range.length, minimum: range.minimum })
    }

    fn set_clock(&self, time: Duration) -> io::Result<()> {
        clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(time))?;
        Ok(())
    }
}

/// linux/fs.h
mod ioctl {
    /// `struct fstrim_range`
    #[repr(C)]
    pub struct Range {
        pub start: u64,
        pub length: u64,
        pub minimum: u64,
    }

    nix::ioctl_write_int_bad!(freeze, nix::request_code_readwrite!(b'X', 119, size_of::<i32>()));
    nix::ioctl_write_int_bad!(thaw, nix::request_code_readwrite!(b'X', 120, size_of::<i32>()));
    nix::ioctl_readwrite!(trim, b'X', 121, Range);
}
