//! Detached mounts, made by `fsopen(2)` and `fsmount(2)` before they are attached anywhere. Making one may
//! take as long as a server does, and has no visible effect; attaching it requests nothing from a server. A
//! mount that is never attached disappears when its descriptor is closed.
//!
//! Linux 5.2 or newer; before that the calls fail with `ENOSYS`.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::ptr::null;

use nix::errno::Errno;
use nix::libc;
use nix::mount::{MsFlags, mount};

use crate::sys::mounting::{Place, attributes};

/// Commands of `fsconfig(2)`: set a flag, set a string.
const SET_FLAG: u32 = 0;
const SET_STRING: u32 = 1;
const CREATE: u32 = 6;
/// `FSOPEN_CLOEXEC`, and `FSMOUNT_CLOEXEC` has the same number.
const CLOSE_ON_EXEC: u32 = 1;
/// `MOVE_MOUNT_F_EMPTY_PATH` and `MOVE_MOUNT_T_EMPTY_PATH`: both ends are descriptors.
const FROM_AND_TO_THEMSELVES: u32 = 0x04 | 0x40;
const NOTHING: &CStr = c"";

/// The flags of mount(2) that are the file system's own, and not those of one mount of it.
const OF_THE_FILE_SYSTEM: [(MsFlags, &CStr); 4] = [
    (MsFlags::MS_RDONLY, c"ro"),
    (MsFlags::MS_SYNCHRONOUS, c"sync"),
    (MsFlags::MS_DIRSYNC, c"dirsync"),
    (MsFlags::MS_LAZYTIME, c"lazytime"),
];

/// Makes a mount of the file system of this type at `source`, with its own options, separated by commas.
///
/// # Errors
/// `ENOSYS` before Linux 5.2, `ENODEV` if the kernel does not know the type; the errors of mount(2).
pub fn make(source: &str, kind: &str, options: &str, flags: MsFlags) -> io::Result<OwnedFd> {
    let kind = CString::new(kind)?;
    // SAFETY: fsopen(2) takes a name that ends with a zero, and flags.
    let context = unsafe { descriptor(libc::syscall(libc::SYS_fsopen, kind.as_ptr(), CLOSE_ON_EXEC)) }?;
    let configure =
        |command, key: Option<&CStr>, value: Option<&CStr>| configure(&context, command, key, value);
    configure(SET_STRING, Some(c"source"), Some(&CString::new(source)?))?;
    for (flag, name) in OF_THE_FILE_SYSTEM {
        if flags.contains(flag) {
            configure(SET_FLAG, Some(name), None)?;
        }
    }
    for option in options.split(',').filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some((key, value)) => {
                configure(SET_STRING, Some(&CString::new(key)?), Some(&CString::new(value)?))?;
            }
            None => configure(SET_FLAG, Some(&CString::new(option)?), None)?,
        }
    }
    configure(CREATE, None, None)?;
    let (attributes, _) = attributes(flags);
    // SAFETY: fsmount(2) takes a descriptor, flags, and attributes.
    let made = unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), CLOSE_ON_EXEC, attributes) };
    // SAFETY: it is what the call has just returned.
    unsafe { descriptor(made) }
}

fn configure(context: &OwnedFd, command: u32, key: Option<&CStr>, value: Option<&CStr>) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(null(), CStr::as_ptr);
    // SAFETY: fsconfig(2) takes a descriptor, a command, and two texts that end with a zero or are null, which live until it
    // returns.
    Errno::result(unsafe {
        libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, pointer(key), pointer(value), 0)
    })?;
    Ok(())
}

/// # Safety
/// `outcome` is what a call has just returned that opens a descriptor for its caller.
unsafe fn descriptor(outcome: libc::c_long) -> io::Result<OwnedFd> {
    let number = i32::try_from(Errno::result(outcome)?).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel has just opened it for this caller.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Attaches a mount that [`make`] has made. Later mounts below it do not propagate.
///
/// # Errors
/// The errors of `move_mount(2)`.
pub fn attach(made: BorrowedFd<'_>, place: &Place) -> io::Result<()> {
    // SAFETY: move_mount(2) takes two descriptors with a path each, and flags.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            made.as_raw_fd(),
            NOTHING.as_ptr(),
            place.as_fd().as_raw_fd(),
            NOTHING.as_ptr(),
            FROM_AND_TO_THEMSELVES,
        )
    })?;
    set_private(made)
}

/// Makes the mount whose root is open here private, so that later mounts below it do not propagate.
///
/// # Errors
/// The errors of mount(2).
pub fn set_private(root: BorrowedFd<'_>) -> io::Result<()> {
    let itself = PathBuf::from(format!("/proc/self/fd/{}", root.as_raw_fd()));
    mount(None::<&str>, &itself, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>)?;
    Ok(())
}
