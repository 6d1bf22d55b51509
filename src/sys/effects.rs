//! Effects of system calls on file systems and on the clock, which cannot be represented as files.
//!
//! Everything else that the agent does goes through a [`crate::sys::root::Root`], and so a test can observe it
//! in a directory. These calls act on the machine itself, whatever the root. A test of the commands replaces
//! the machine by its own implementation of this trait.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::MsFlags;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_settime};

use crate::sys::block_device;
use crate::sys::calendar::Date;
use crate::sys::mount_point;
use crate::sys::mountinfo::Mount;
use crate::sys::mounting::{self, How, Place, What};
use crate::sys::nvme::LOG_LENGTH;
use crate::sys::unattached;
use crate::sys::usage::{Usage, usage};

/// Result of a trim (`FITRIM`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trimmed {
    /// Bytes that were discarded.
    pub bytes: u64,
    /// The smallest free range in bytes that the file system looked at.
    pub minimum: u64,
}

/// The effects. All of them may block, for as long as the disk does or the hardware clock takes to go on, but for
/// [`Effects::set_clock`]. What a machine of a test does not say is not supported by it.
pub trait Effects: Debug + Send + Sync {
    /// Opens where `mount` is mounted, to freeze and thaw what is there. What was mounted over it since, or before,
    /// is not opened in its place.
    ///
    /// # Errors
    /// `ESTALE` if another mount is found there; whatever open(2) says of the path.
    fn open_mount(&self, mount: &Mount) -> io::Result<OwnedFd> {
        let _ = mount;
        Err(unsupported())
    }

    /// Freezes the file system of an opened mount (`FIFREEZE`): every write sleeps from now on.
    ///
    /// # Errors
    /// `EBUSY` if it is frozen already, `EOPNOTSUPP` if it cannot be.
    fn freeze(&self, mount: BorrowedFd<'_>) -> io::Result<()> {
        let _ = mount;
        Err(unsupported())
    }

    /// Thaws it (`FITHAW`).
    ///
    /// # Errors
    /// `EINVAL` if it is not frozen.
    fn thaw(&self, mount: BorrowedFd<'_>) -> io::Result<()> {
        let _ = mount;
        Err(unsupported())
    }

    /// Gives unused blocks of the file system that `directory` is on back to the disk (`FITRIM`), in ranges of at
    /// least `minimum` bytes.
    ///
    /// # Errors
    /// `EOPNOTSUPP` or `ENOTTY` if the file system or the disk cannot do it; whatever open(2) says.
    fn trim(&self, directory: &Path, minimum: u64) -> io::Result<Trimmed> {
        let _ = (directory, minimum);
        Err(unsupported())
    }

    /// Mounts `what` on `place`; if this fails, nothing is mounted.
    ///
    /// # Errors
    /// The errors of mount(2).
    fn mount(&self, what: &What<'_>, place: &Place, how: How) -> io::Result<()> {
        let _ = (what, place, how);
        Err(unsupported())
    }

    /// Makes a detached mount of the file system of this type at `source`, with its own options
    /// ([`unattached::make`]).
    ///
    /// # Errors
    /// `ENOSYS` before Linux 5.2; the errors of mount(2).
    fn make_mount(&self, source: &str, kind: &str, options: &str, flags: MsFlags) -> io::Result<OwnedFd> {
        let _ = (source, kind, options, flags);
        Err(unsupported())
    }

    /// Attaches a detached mount ([`unattached::attach`]).
    ///
    /// # Errors
    /// The errors of `move_mount(2)`.
    fn attach(&self, made: BorrowedFd<'_>, place: &Place) -> io::Result<()> {
        let _ = (made, place);
        Err(unsupported())
    }

    /// Opens where `mount` is mounted, without asking its file system for anything ([`Place::open_mount`]).
    ///
    /// # Errors
    /// `ESTALE` if another mount is found there.
    fn open_place(&self, mount: &Mount) -> io::Result<Place> {
        let _ = mount;
        Err(unsupported())
    }

    /// Makes the mount at `place` private, so that later mounts below it do not propagate
    /// ([`unattached::set_private`]).
    ///
    /// # Errors
    /// The errors of mount(2).
    fn set_private(&self, place: &Place) -> io::Result<()> {
        let _ = place;
        Err(unsupported())
    }

    /// Returns the space that is used on the file system of `directory` ([`usage`]). For a network share, this
    /// shows whether its server responds.
    ///
    /// # Errors
    /// The errors of statvfs(3).
    fn usage(&self, directory: &Path) -> io::Result<Usage> {
        usage(directory)
    }

    /// Unmounts what is mounted last at `path`.
    ///
    /// # Errors
    /// `EINVAL` if nothing is, `EBUSY` if it is in use.
    fn unmount(&self, path: &Path) -> io::Result<()> {
        let _ = path;
        Err(unsupported())
    }

    /// Takes what is mounted last at `path` out of sight, even if it is in use: it ends with its last use.
    ///
    /// # Errors
    /// `EINVAL` if nothing is.
    fn detach(&self, path: &Path) -> io::Result<()> {
        let _ = path;
        Err(unsupported())
    }

    /// Aborts all pending requests of the file system that was mounted last at `path`, and unmounts it unless it
    /// is in use.
    ///
    /// # Errors
    /// `EBUSY` if it is in use, `EINVAL` if nothing is mounted there.
    fn abort(&self, path: &Path) -> io::Result<()> {
        let _ = path;
        Err(unsupported())
    }

    /// Starts swapping to the swap space on `device`.
    ///
    /// # Errors
    /// The errors of swapon(2).
    fn swap_on(&self, device: &Path) -> io::Result<()> {
        let _ = device;
        Err(unsupported())
    }

    /// Stops swapping to the swap space on `device`, after everything in it is moved back to memory.
    ///
    /// # Errors
    /// The errors of swapoff(2).
    fn swap_off(&self, device: &Path) -> io::Result<()> {
        let _ = device;
        Err(unsupported())
    }

    /// Claims a whole disk, for as long as the returned descriptor is open ([`block_device::claim`]).
    ///
    /// # Errors
    /// `EBUSY` if the disk or a part of it is in use; the errors of open(2).
    fn claim_disk(&self, device: &Path) -> io::Result<OwnedFd> {
        let _ = device;
        Err(unsupported())
    }

    /// Makes the disk write out its own cache and the kernel's ([`block_device::flush`]).
    ///
    /// # Errors
    /// The errors of fsync(2).
    fn flush_disk(&self, disk: BorrowedFd<'_>) -> io::Result<()> {
        let _ = disk;
        Err(unsupported())
    }

    /// Sets the system's clock, to this time since the epoch (`clock_settime(2)`).
    ///
    /// # Errors
    /// `EINVAL` for a time that the kernel does not take, `EPERM` without `CAP_SYS_TIME`.
    fn set_clock(&self, time: Duration) -> io::Result<()> {
        let _ = time;
        Err(unsupported())
    }

    /// Returns the time of the hardware clock `device` (`RTC_RD_TIME`), read right after it has advanced to that
    /// second.
    ///
    /// # Errors
    /// The errors of open(2); `EINVAL` if the time is not a valid date.
    fn hardware_clock(&self, device: &Path) -> io::Result<Date> {
        let _ = device;
        Err(unsupported())
    }

    /// Sets the hardware clock `device` (`RTC_SET_TIME`).
    ///
    /// # Errors
    /// As above; `EACCES` without `CAP_SYS_TIME`.
    fn set_hardware_clock(&self, device: &Path, date: Date) -> io::Result<()> {
        let _ = (device, date);
        Err(unsupported())
    }

    /// The health log of the NVMe disk whose file `disk` is (log page 02h, for [`crate::sys::nvme::parse`]).
    ///
    /// # Errors
    /// Whatever open(2) and the disk say.
    fn nvme_health(&self, disk: &Path) -> io::Result<[u8; LOG_LENGTH]> {
        let _ = disk;
        Err(unsupported())
    }
}

fn unsupported() -> io::Error {
    io::ErrorKind::Unsupported.into()
}

/// Implementation that acts on this machine.
#[derive(Debug, Default, Clone, Copy)]
pub struct Machine;

impl Effects for Machine {
    fn open_mount(&self, mount: &Mount) -> io::Result<OwnedFd> {
        mount_point::open(mount)
    }

    fn freeze(&self, mount: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: FIFREEZE takes no argument that the kernel would read.
        unsafe { ioctl::freeze(mount.as_raw_fd(), 0) }?;
        Ok(())
    }

    fn thaw(&self, mount: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: FITHAW takes no argument that the kernel would read.
        unsafe { ioctl::thaw(mount.as_raw_fd(), 0) }?;
        Ok(())
    }

    fn trim(&self, directory: &Path, minimum: u64) -> io::Result<Trimmed> {
        let directory = File::open(directory)?;
        let mut range = ioctl::Range { start: 0, length: u64::MAX, minimum };
        // SAFETY: the range is a `struct fstrim_range`, which the kernel reads and writes.
        unsafe { ioctl::trim(directory.as_raw_fd(), &raw mut range) }?;
        Ok(Trimmed { bytes: range.length, minimum: range.minimum })
    }

    fn mount(&self, what: &What<'_>, place: &Place, how: How) -> io::Result<()> {
        mounting::mount_on(what, place, how)
    }

    fn make_mount(&self, source: &str, kind: &str, options: &str, flags: MsFlags) -> io::Result<OwnedFd> {
        unattached::make(source, kind, options, flags)
    }

    fn attach(&self, made: BorrowedFd<'_>, place: &Place) -> io::Result<()> {
        unattached::attach(made, place)
    }

    fn open_place(&self, mount: &Mount) -> io::Result<Place> {
        Place::open_mount(mount)
    }

    fn set_private(&self, place: &Place) -> io::Result<()> {
        unattached::set_private(place.as_fd())
    }

    fn unmount(&self, path: &Path) -> io::Result<()> {
        mounting::unmount(path)
    }

    fn detach(&self, path: &Path) -> io::Result<()> {
        mounting::detach(path)
    }

    fn abort(&self, path: &Path) -> io::Result<()> {
        mounting::abort(path)
    }

    fn swap_on(&self, device: &Path) -> io::Result<()> {
        mounting::swap_on(device)
    }

    fn swap_off(&self, device: &Path) -> io::Result<()> {
        mounting::swap_off(device)
    }

    fn claim_disk(&self, device: &Path) -> io::Result<OwnedFd> {
        block_device::claim(device).map(OwnedFd::from)
    }

    fn flush_disk(&self, disk: BorrowedFd<'_>) -> io::Result<()> {
        block_device::flush(disk)
    }

    fn set_clock(&self, time: Duration) -> io::Result<()> {
        clock_settime(ClockId::CLOCK_REALTIME, TimeSpec::from_duration(time))?;
        Ok(())
    }

    fn hardware_clock(&self, device: &Path) -> io::Result<Date> {
        let device = File::open(device)?;
        let first = read_hardware_clock(&device)?;
        let begin = Instant::now();
        // The clock has a resolution of one second, so this waits for the next tick. If the clock has stopped, the
        // last reading is used.
        while begin.elapsed() < Duration::from_millis(1100) {
            std::thread::sleep(Duration::from_millis(5));
            let next = read_hardware_clock(&device)?;
            if next != first {
                return Ok(next);
            }
        }
        Ok(first)
    }

    fn set_hardware_clock(&self, device: &Path, date: Date) -> io::Result<()> {
        let device = File::open(device)?;
        let date = ioctl::HardwareDate {
            second: date.second.into(),
            minute: date.minute.into(),
            hour: date.hour.into(),
            day: date.day.into(),
            month: i32::from(date.month) - 1,
            year: date.year.saturating_sub(1900),
            unused: [0; 3],
        };
        // SAFETY: the date is a `struct rtc_time`, which the kernel reads.
        unsafe { ioctl::set_hardware_clock(device.as_raw_fd(), &raw const date) }?;
        Ok(())
    }

    fn nvme_health(&self, disk: &Path) -> io::Result<[u8; LOG_LENGTH]> {
        let disk = File::open(disk)?;
        let mut log = [0; LOG_LENGTH];
        let mut command = ioctl::NvmeCommand::get_health_log(&mut log);
        // SAFETY: the command is a `struct nvme_admin_cmd`, and the buffer that it names is as long as it says and
        // lives until the call returns.
        let status = unsafe { ioctl::nvme_admin(disk.as_raw_fd(), &raw mut command) }?;
        if status != 0 {
            return Err(io::Error::other(format!("the disk answers with status {status:#x}")));
        }
        Ok(log)
    }
}

fn read_hardware_clock(device: &File) -> io::Result<Date> {
    let mut date = ioctl::HardwareDate::default();
    // SAFETY: the date is a `struct rtc_time`, which the kernel writes.
    unsafe { ioctl::read_hardware_clock(device.as_raw_fd(), &raw mut date) }?;
    let small = |number: i32| u8::try_from(number).map_err(|_| io::Error::from(Errno::EINVAL));
    Ok(Date {
        year: date.year.saturating_add(1900),
        month: small(date.month.saturating_add(1))?,
        day: small(date.day)?,
        hour: small(date.hour)?,
        minute: small(date.minute)?,
        second: small(date.second)?,
    })
}

/// Requests of linux/fs.h and linux/rtc.h.
mod ioctl {
    /// Argument `struct fstrim_range` of `FITRIM`.
    #[repr(C)]
    pub struct Range {
        pub start: u64,
        pub length: u64,
        pub minimum: u64,
    }

    /// `struct rtc_time`: months begin with 0, years with 1900.
    #[repr(C)]
    #[derive(Default)]
    pub struct HardwareDate {
        pub second: i32,
        pub minute: i32,
        pub hour: i32,
        pub day: i32,
        pub month: i32,
        pub year: i32,
        pub unused: [i32; 3],
    }

    nix::ioctl_write_int_bad!(freeze, nix::request_code_readwrite!(b'X', 119, size_of::<i32>()));
    nix::ioctl_write_int_bad!(thaw, nix::request_code_readwrite!(b'X', 120, size_of::<i32>()));
    nix::ioctl_readwrite!(trim, b'X', 121, Range);
    nix::ioctl_read!(read_hardware_clock, b'p', 0x09, HardwareDate);
    nix::ioctl_write_ptr!(set_hardware_clock, b'p', 0x0a, HardwareDate);
    nix::ioctl_readwrite!(nvme_admin, b'N', 0x41, NvmeCommand);

    /// `struct nvme_admin_cmd` of `linux/nvme_ioctl.h`
    #[repr(C)]
    #[derive(Default)]
    pub struct NvmeCommand {
        opcode: u8,
        flags: u8,
        reserved: u16,
        namespace: u32,
        words_2_3: [u32; 2],
        metadata: u64,
        address: u64,
        metadata_length: u32,
        data_length: u32,
        word_10: u32,
        words_11_15: [u32; 5],
        timeout: u32,
        result: u32,
    }

    impl NvmeCommand {
        /// Builds the command that reads log page 02h of the whole controller, without clearing the events that the
        /// page reports.
        pub fn get_health_log(log: &mut [u8; super::LOG_LENGTH]) -> Self {
            #[allow(clippy::cast_possible_truncation, reason = "it is 512")]
            const LENGTH: u32 = super::LOG_LENGTH as u32;
            const GET_LOG_PAGE: u8 = 0x02;
            const HEALTH: u32 = 0x02;
            const RETAIN_EVENTS: u32 = 1 << 15;
            // Number of 32-bit words less one.
            const WORDS: u32 = (LENGTH / 4 - 1) << 16;
            Self {
                opcode: GET_LOG_PAGE,
                namespace: u32::MAX,
                address: log.as_mut_ptr() as u64,
                data_length: LENGTH,
                word_10: HEALTH | RETAIN_EVENTS | WORDS,
                ..Self::default()
            }
        }
    }
}
