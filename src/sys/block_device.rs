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

/// How often a lock that somebody holds is tried.
const AGAIN: Duration = Duration::from_millis(20);

/// What the kernel says of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Its number.
    pub number: Number,
    /// Its size in bytes; 0 for a drive without a medium.
    pub bytes: u64,
    /// The size of its logical sectors in bytes.
    pub sector: u32,
    /// It cannot be written to.
    pub read_only: bool,
}

/// What there is to know of the device at `path`. May block for as long as it does.
///
/// # Errors
/// `ENOTBLK` if it is none; as open(2) gives them.
pub fn facts(path: &Path) -> io::Result<Facts> {
    facts_of(&open(path)?)
}

/// As [`facts`], of an open device.
///
/// # Errors
/// As ioctl(2) gives them: `ENXIO` or `ENODEV` if it is gone.
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

/// The size of an open device in bytes, as it is now; 0 once it is gone.
///
/// # Errors
/// As ioctl(2) gives them.
pub fn bytes(device: &File) -> io::Result<u64> {
    let mut bytes = 0;
    // SAFETY: BLKGETSIZE64 writes 64 bits.
    unsafe { ioctl::size(device.as_raw_fd(), &raw mut bytes) }?;
    Ok(bytes)
}

/// The number that the kernel gave to the disk of an open device and gives to no other disk, nor to another medium in the
/// same drive, until the next boot; none where the kernel has no such numbers (Linux before 5.15).
///
/// # Errors
/// As ioctl(2) gives them.
pub fn sequence(device: &File) -> io::Result<Option<u64>> {
    let mut number = 0;
    // SAFETY: BLKGETDISKSEQ writes 64 bits.
    match unsafe { ioctl::sequence(device.as_raw_fd(), &raw mut number) } {
        Ok(_) => Ok(Some(number)),
        Err(Errno::ENOTTY | Errno::EINVAL) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Opens an open device once more, for reading, and for writing if that is said: it has its own lock, and is the same
/// device file whatever is found at its path by now.
///
/// # Errors
/// As open(2) gives them.
pub fn reopen(device: &File, to_write: bool) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", device.as_raw_fd());
    let path = Path::new(&path);
    if to_write { open_to_write(path) } else { open(path) }
}

/// The number of an open device.
///
/// # Errors
/// As fstat(2) gives them.
pub fn number(device: &File) -> io::Result<Number> {
    let number = device.metadata()?.rdev();
    let part = |number: u64| u32::try_from(number).map_err(|_| Errno::EINVAL);
    Ok((part(nix::sys::stat::major(number))?, part(nix::sys::stat::minor(number))?))
}

/// Opens the device at `path` for reading.
///
/// # Errors
/// `ENOTBLK` if it is none; as open(2) gives them.
pub fn open(path: &Path) -> io::Result<File> {
    checked(OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?)
}

/// Opens the device at `path` for reading and writing.
///
/// # Errors
/// `ENOTBLK` if it is none; as open(2) gives them.
pub fn open_to_write(path: &Path) -> io::Result<File> {
    checked(OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?)
}

fn checked(device: File) -> io::Result<File> {
    let kind = device.metadata()?.file_type();
    if kind.is_block_device() { Ok(device) } else { Err(Errno::ENOTBLK.into()) }
}

/// Whether somebody has claimed an open device: it is mounted, part of another device, or used to swap.
///
/// # Errors
/// As open(2) gives them.
pub fn is_claimed(device: &File) -> io::Result<bool> {
    match claim(format!("/proc/self/fd/{}", device.as_raw_fd()).as_ref()) {
        Ok(_) => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Claims the device at `path`, and every part of it, for as long as the file is open: nobody can mount it, swap to it
/// or make another device of it. Who only reads and writes it is not kept from that. May block for as long as the
/// device does.
///
/// # Errors
/// `EBUSY` if somebody has claimed it or a part of it; as open(2) gives them.
pub fn claim(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_EXCL;
    OpenOptions::new().read(true).custom_flags(flags).open(path).and_then(checked)
}

/// Writes what is buffered of a device to it, has it empty its own cache, and forgets the buffers. May block for as
/// long as the device does.
///
/// # Errors
/// As fsync(2) gives them: what was written may be lost. `EACCES` without `CAP_SYS_ADMIN`.
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

/// The number of the block device that `path` leads to; none if it leads to something else. A file of the network is
/// not waited for.
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

/// Takes the lock of a disk that was opened for nothing else. udev holds it for moments only, which are waited for.
///
/// # Errors
/// `WouldBlock` if another program still holds it after `patience`; as flock(2) gives them.
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

/// linux/fs.h and linux/blkpg.h
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

    /// `struct blkpg_ioctl_arg`
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
