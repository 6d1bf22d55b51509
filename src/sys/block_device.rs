//! Calls to block devices: how large one is, its lock, the claim to it, its buffers, and the kernel's idea of a
//! partition.

use std::ffi::CString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;

use crate::sys::block::Number;

/// Time between two attempts to take a lock that another process holds.
const AGAIN: Duration = Duration::from_millis(20);

/// Properties of a device, as the kernel reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Device number (major and minor).
    pub number: Number,
    /// Size in bytes; 0 for a drive without a medium.
    pub bytes: u64,
    /// The size of its logical sectors in bytes.
    pub sector: u32,
    /// True if the device cannot be written to.
    pub read_only: bool,
}

/// Returns the properties of the device at `path`. Blocks for as long as the device does.
///
/// # Errors
/// `ENOTBLK` if the path is not a block device; the errors of open(2) and ioctl(2).
pub fn facts(path: &Path) -> io::Result<Facts> {
    facts_of(&open(path)?)
}

/// Returns the same properties as [`facts`], for a device that is open.
///
/// # Errors
/// The errors of ioctl(2): `ENXIO` or `ENODEV` if the device has been removed.
pub fn facts_of(device: &File) -> io::Result<Facts> {
    let bytes = bytes(device)?;
    let mut sector = 0;
    // SAFETY: BLKSSZGET writes an int.
    unsafe { ioctl::sector_size(device.as_raw_fd(), &raw mut sector) }?;
    let mut read_only = 0;
    // SAFETY: BLKROGET writes an int.
    unsafe { ioctl::read_only(device.as_raw_fd(), &raw mut read_only) }?;
    Ok(Facts {
        number: number(device)?,
        bytes,
        sector: u32::try_from(sector).map_err(|_| Errno::EINVAL)?,
        read_only: read_only != 0,
    })
}

/// Returns the current size of an open device in bytes; 0 once the device has been removed.
///
/// # Errors
/// The errors of ioctl(2).
pub fn bytes(device: &File) -> io::Result<u64> {
    let mut bytes = 0;
    // SAFETY: BLKGETSIZE64 writes 64 bits.
    unsafe { ioctl::size(device.as_raw_fd(), &raw mut bytes) }?;
    Ok(bytes)
}

/// Returns the sequence number of an open device's disk. The kernel gives it to no other disk, nor to another
/// medium in the same drive, until the next boot. `None` where the kernel has no such numbers (Linux before
/// 5.15).
///
/// # Errors
/// The errors of ioctl(2).
pub fn sequence(device: &File) -> io::Result<Option<u64>> {
    let mut number = 0;
    // SAFETY: BLKGETDISKSEQ writes 64 bits.
    match unsafe { ioctl::sequence(device.as_raw_fd(), &raw mut number) } {
        Ok(_) => Ok(Some(number)),
        Err(Errno::ENOTTY | Errno::EINVAL) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Opens an open device again, for reading, and on request also for writing. The new descriptor has its own
/// lock, and refers to the same device whatever is at its path by now.
///
/// # Errors
/// The errors of open(2).
pub fn reopen(device: &File, to_write: bool) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", device.as_raw_fd());
    let path = Path::new(&path);
    if to_write { open_to_write(path) } else { open(path) }
}

/// Returns the device number of an open device.
///
/// # Errors
/// The errors of fstat(2).
pub fn number(device: &File) -> io::Result<Number> {
    let number = device.metadata()?.rdev();
    let part = |number: u64| u32::try_from(number).map_err(|_| Errno::EINVAL);
    Ok((part(nix::sys::stat::major(number))?, part(nix::sys::stat::minor(number))?))
}

/// Opens the device at `path` for reading.
///
/// # Errors
/// `ENOTBLK` if the path is not a block device; the errors of open(2).
pub fn open(path: &Path) -> io::Result<File> {
    checked(OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?)
}

/// Opens the device at `path` for reading and writing.
///
/// # Errors
/// `ENOTBLK` if the path is not a block device; the errors of open(2).
pub fn open_to_write(path: &Path) -> io::Result<File> {
    checked(OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?)
}

fn checked(device: File) -> io::Result<File> {
    let kind = device.metadata()?.file_type();
    if kind.is_block_device() { Ok(device) } else { Err(Errno::ENOTBLK.into()) }
}

/// Returns whether an open device is in use: mounted, part of another device, or used as swap space.
///
/// # Errors
/// The errors of open(2), except `EBUSY`.
pub fn is_claimed(device: &File) -> io::Result<bool> {
    match claim(format!("/proc/self/fd/{}", device.as_raw_fd()).as_ref()) {
        Ok(_) => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Claims the device at `path`, and every part of it, for as long as the file is open: it cannot be mounted,
/// used as swap space, or made part of another device. Plain reads and writes by others are not prevented. May
/// block for as long as the device does.
///
/// # Errors
/// `EBUSY` if the device or a part of it is in use; the errors of open(2).
pub fn claim(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_EXCL;
    OpenOptions::new().read(true).custom_flags(flags).open(path).and_then(checked)
}

/// Writes the buffered data to the device, flushes its own cache, and drops the buffers. May block for as long
/// as the device does.
///
/// # Errors
/// The errors of fsync(2), after which written data may be lost. `EACCES` without `CAP_SYS_ADMIN`.
pub fn flush(device: BorrowedFd<'_>) -> io::Result<()> {
    nix::unistd::fsync(device)?;
    // SAFETY: BLKFLSBUF takes no argument that the kernel would read.
    unsafe { ioctl::flush(device.as_raw_fd(), 0) }?;
    Ok(())
}

/// Reads the beginning of the device at `path` from the device itself, whatever is known of it already. May block for as
/// long as the device does.
///
/// # Errors
/// As open(2) and read(2) give them: `EIO` if it cannot be read.
pub fn answers(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::FileExt as _;

    /// Bytes that every device reads in one go, and that what is read into begins at a multiple of.
    const PAGE: usize = 4096;
    let flags = libc::O_NONBLOCK | libc::O_DIRECT;
    let device = OpenOptions::new().read(true).custom_flags(flags).open(path).and_then(checked)?;
    let mut buffer = vec![0_u8; 2 * PAGE];
    let begin = buffer.as_ptr().align_offset(PAGE).min(PAGE);
    device.read_at(&mut buffer[begin..begin + PAGE], 0).map(drop)
}

/// Returns the number of the block device that `path` leads to; `None` if it leads to anything else. Does not
/// wait for a network file system.
pub fn number_at(path: &Path) -> Option<Number> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut found = MaybeUninit::<libc::statx>::uninit();
    let flags = libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    // SAFETY: the path ends with a zero, and the kernel fills the `struct statx` in before it returns 0.
    let found = unsafe {
        let status = libc::statx(libc::AT_FDCWD, path.as_ptr(), flags, libc::STATX_TYPE, found.as_mut_ptr());
        if status != 0 {
            return None;
        }
        found.assume_init()
    };
    let kind = u32::from(found.stx_mode) & libc::S_IFMT;
    (kind == libc::S_IFBLK).then_some((found.stx_rdev_major, found.stx_rdev_minor))
}

/// A lock on a whole disk: as long as it is held udev leaves the disk and its partitions alone, and so do other
/// programs that keep to its rule.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "it is held, and let go of with this")] File);

/// Takes the lock of a disk, whose descriptor must have been opened for this only. udev holds the lock for
/// short times, which this waits for.
///
/// # Errors
/// `WouldBlock` if another program still holds it after `patience`; the errors of flock(2).
pub fn lock(file: File, patience: Duration) -> io::Result<Lock> {
    let begin = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(Lock(file)),
            Err(TryLockError::WouldBlock) if begin.elapsed() < patience => std::thread::sleep(AGAIN),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Tells the kernel that partition `number` of the opened `disk` now has this place, in bytes. It may be in use.
///
/// # Errors
/// `EBUSY` if another partition is in the way, `ENXIO` if there is no such partition.
pub fn resize_partition(disk: &File, number: u32, start: u64, length: u64) -> io::Result<()> {
    let wrong = |_| Errno::EINVAL;
    let mut partition = ioctl::Partition {
        start: i64::try_from(start).map_err(wrong)?,
        length: i64::try_from(length).map_err(wrong)?,
        number: i32::try_from(number).map_err(wrong)?,
        names: [0; 128],
    };
    let argument = ioctl::PartitionCall {
        operation: ioctl::RESIZE_PARTITION,
        flags: 0,
        length: i32::try_from(size_of::<ioctl::Partition>()).map_err(wrong)?,
        partition: &raw mut partition,
    };
    // SAFETY: the argument is a `struct blkpg_ioctl_arg`, which names a `struct blkpg_partition` that outlives the call.
    unsafe { ioctl::partition(disk.as_raw_fd(), &raw const argument) }?;
    Ok(())
}

/// Requests of linux/fs.h and linux/blkpg.h.
mod ioctl {
    pub const RESIZE_PARTITION: i32 = 3;

    /// `struct blkpg_partition`, in bytes
    #[repr(C)]
    pub struct Partition {
        pub start: i64,
        pub length: i64,
        pub number: i32,
        pub names: [u8; 128],
    }

    /// Argument `struct blkpg_ioctl_arg` of linux/blkpg.h.
    #[repr(C)]
    pub struct PartitionCall {
        pub operation: i32,
        pub flags: i32,
        pub length: i32,
        pub partition: *mut Partition,
    }

    nix::ioctl_read_bad!(read_only, nix::request_code_none!(0x12, 94), i32);
    nix::ioctl_write_int_bad!(flush, nix::request_code_none!(0x12, 97));
    nix::ioctl_read_bad!(sector_size, nix::request_code_none!(0x12, 104), i32);
    nix::ioctl_write_ptr_bad!(partition, nix::request_code_none!(0x12, 105), PartitionCall);
    nix::ioctl_read!(sequence, 0x12, 128, u64);
    nix::ioctl_read_bad!(size, nix::request_code_read!(0x12, 114, size_of::<usize>()), u64);
}
