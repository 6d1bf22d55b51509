//! mount(2), and the calls that make bind mounts with all that they should be from their first moment on.
//!
//! A [`Place`] is opened before anything is mounted there, so that what was checked is what is mounted over.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open as open_path};
use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, fstat};

use crate::sys::block::Number;
use crate::sys::block_device;
use crate::sys::mountinfo::Mount;
use crate::sys::root::Root;

/// Directory or file that is used as a mount point, held open.
#[derive(Debug)]
pub struct Place {
    descriptor: OwnedFd,
    /// Path without symbolic links.
    pub path: PathBuf,
    /// The number of the mount that it is on: that of what is mounted at the path, if something is.
    pub mount: u64,
    /// True if it is a directory.
    pub is_folder: bool,
}

impl Place {
    /// Opens the file or directory at `path`, whose last component must not be a symbolic link.
    ///
    /// # Errors
    /// `ELOOP` for a symbolic link; the errors of open(2).
    pub fn open(path: &Path) -> io::Result<Self> {
        let descriptor = open_itself(path, OFlag::empty())?;
        let kind = SFlag::from_bits_truncate(fstat(&descriptor)?.st_mode) & SFlag::S_IFMT;
        if kind == SFlag::S_IFLNK {
            return Err(Errno::ELOOP.into());
        }
        Self::of(descriptor, kind == SFlag::S_IFDIR)
    }

    /// Opens the directory at `path`, which may be the root of a file system that does not respond: nothing is
    /// requested from it.
    ///
    /// # Errors
    /// `ENOTDIR` if it is not a directory; the errors of open(2).
    pub fn open_mounted_folder(path: &Path) -> io::Result<Self> {
        Self::of(open_itself(path, OFlag::O_DIRECTORY)?, true)
    }

    fn of(descriptor: OwnedFd, is_folder: bool) -> io::Result<Self> {
        let number = descriptor.as_raw_fd();
        let path = std::fs::read_link(format!("/proc/self/fd/{number}"))?;
        let information = Root::default().read(&format!("/proc/self/fdinfo/{number}"))?;
        let information = String::from_utf8_lossy(&information);
        let mount = information.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
        let mount =
            mount.ok_or_else(|| io::Error::other("the kernel does not report which mount a file is on"))?;
        Ok(Self { descriptor, path, mount, is_folder })
    }

    /// Opens the root of `mount`, which must be the last mount at its path. Nothing is requested from its file
    /// system.
    ///
    /// # Errors
    /// `ESTALE` if another mount is found there; the errors of [`Place::open_mounted_folder`].
    pub fn open_mount(mount: &Mount) -> io::Result<Self> {
        let place = Self::open_mounted_folder(&mount.path)?;
        if place.mount == mount.id { Ok(place) } else { Err(Errno::ESTALE.into()) }
    }

    /// The number of the block device that it is the file of; none of all else.
    pub fn device(&self) -> Option<Number> {
        block_device::number_at(&self.itself())
    }

    /// Leads to it, whatever its path leads to by now.
    fn itself(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.descriptor.as_raw_fd()))
    }
}

impl AsFd for Place {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

fn open_itself(path: &Path, more: OFlag) -> io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | more;
    Ok(open_path(path, flags, Mode::empty())?)
}

/// Object to mount.
#[derive(Debug)]
pub enum What<'a> {
    /// New mount of a file system.
    FileSystem {
        /// The device that it is on, or the server with what that serves.
        source: &'a Path,
        /// File system type, such as `ext4`.
        kind: &'a str,
        /// Options of the file system, separated by commas.
        data: &'a str,
    },
    /// Bind mount of another place.
    Bind {
        /// Place to bind.
        source: &'a Place,
        /// With what is mounted below it.
        recursive: bool,
    },
}

/// Options of a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct How {
    /// `MS_RDONLY`, `MS_NOSUID`, `MS_NODEV`, `MS_NOEXEC`, those about times of access, and for file systems those about
    /// when they write.
    pub flags: MsFlags,
    /// Propagation of later mounts below it; the kernel's default if absent.
    pub propagation: Option<Propagation>,
}

/// Mount propagation between mount namespaces, `mount_namespaces(7)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// No propagation.
    Private,
    /// From where it comes to here.
    Slave,
    /// Propagation in both directions.
    Shared,
}

impl Propagation {
    fn flag(self) -> MsFlags {
        match self {
            Self::Private => MsFlags::MS_PRIVATE,
            Self::Slave => MsFlags::MS_SLAVE,
            Self::Shared => MsFlags::MS_SHARED,
        }
    }
}

/// Mounts `what` on `place`. If this fails, nothing is mounted.
///
/// # Errors
/// The errors of mount(2).
pub fn mount_on(what: &What<'_>, place: &Place, how: How) -> io::Result<()> {
    match what {
        What::FileSystem { source, kind, data } => {
            let data = Some(*data).filter(|data| !data.is_empty());
            mount(Some(*source), &place.itself(), Some(*kind), how.flags, data)?;
        }
        What::Bind { source, recursive } => match bind(source, place, how.flags, *recursive) {
            // Linux before 5.12 lacks `mount_setattr(2)`.
            Err(Errno::ENOSYS) => bind_in_steps(source, place, how.flags, *recursive)?,
            bound => bound?,
        },
    }
    let spread = |propagation| set_propagation(&place.path, propagation);
    how.propagation.map_or(Ok(()), spread).inspect_err(|_| {
        let _ = unmount(&place.path);
    })
}

/// Sets the propagation of later mounts below the mount at `path`.
///
/// # Errors
/// `EINVAL` if nothing is mounted there; the errors of mount(2).
pub fn set_propagation(path: &Path, propagation: Propagation) -> io::Result<()> {
    let place = Place::open(path)?;
    mount(None::<&str>, &place.itself(), None::<&str>, propagation.flag(), None::<&str>)?;
    Ok(())
}

/// Unmounts what is mounted last at `path`.
///
/// # Errors
/// `EINVAL` if nothing is, `EBUSY` if it is in use, `ENOENT` if there is no such path.
pub fn unmount(path: &Path) -> io::Result<()> {
    umount2(path, MntFlags::UMOUNT_NOFOLLOW)?;
    Ok(())
}

/// Takes what is mounted last at `path` out of sight, even if it is in use: it ends with its last use.
///
/// # Errors
/// `EINVAL` if nothing is, `ENOENT` if there is no such path.
pub fn detach(path: &Path) -> io::Result<()> {
    umount2(path, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_DETACH)?;
    Ok(())
}

/// Aborts all pending requests of the file system that was mounted last at `path`, and unmounts it unless it
/// is in use.
///
/// # Errors
/// `EBUSY` if it is in use; `EINVAL` if nothing is mounted there.
pub fn abort(path: &Path) -> io::Result<()> {
    umount2(path, MntFlags::UMOUNT_NOFOLLOW | MntFlags::MNT_FORCE)?;
    Ok(())
}

/// The flags that a bind mount can have, and what `mount_setattr(2)` calls them.
const ATTRIBUTES: &[(MsFlags, u64)] = &[
    (MsFlags::MS_RDONLY, 0x01),
    (MsFlags::MS_NOSUID, 0x02),
    (MsFlags::MS_NODEV, 0x04),
    (MsFlags::MS_NOEXEC, 0x08),
    (MsFlags::MS_NODIRATIME, 0x80),
];
const NO_ACCESS_TIMES: u64 = 0x10;
const STRICT_ACCESS_TIMES: u64 = 0x20;
const WHICH_ACCESS_TIMES: u64 = 0x70;

/// Translates mount flags to the attributes of `mount_setattr(2)` and `fsmount(2)`: those to set, and those to
/// clear first.
pub(super) fn attributes(flags: MsFlags) -> (u64, u64) {
    let named = ATTRIBUTES.iter().filter(|(flag, _)| flags.contains(*flag));
    let set = named.fold(0, |all, (_, attribute)| all | attribute);
    if !flags.intersects(MsFlags::MS_NOATIME | MsFlags::MS_STRICTATIME) {
        return (set, 0);
    }
    let is_none = flags.contains(MsFlags::MS_NOATIME);
    (set | if is_none { NO_ACCESS_TIMES } else { STRICT_ACCESS_TIMES }, WHICH_ACCESS_TIMES)
}

/// `struct mount_attr` of `mount_setattr(2)`
#[repr(C)]
struct Attributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Makes a bind mount, which becomes visible only after its attributes are set.
fn bind(source: &Place, place: &Place, flags: MsFlags, recursive: bool) -> Result<(), Errno> {
    const CLONE: u32 = 1;
    const FROM_AND_TO_THEMSELVES: u32 = 0x04 | 0x40;
    const NOTHING: &CStr = c"";
    let close = libc::O_CLOEXEC.unsigned_abs();
    let itself = libc::AT_EMPTY_PATH.unsigned_abs();
    let all = if recursive { libc::AT_RECURSIVE.unsigned_abs() } else { 0 };
    let call = |number, descriptor: BorrowedFd<'_>, flags: u32| {
        // SAFETY: open_tree(2) takes a descriptor, a path that ends with a zero, and flags.
        Errno::result(unsafe { libc::syscall(number, descriptor.as_raw_fd(), NOTHING.as_ptr(), flags) })
    };
    let tree = call(libc::SYS_open_tree, source.descriptor.as_fd(), CLONE | close | itself | all)?;
    let tree = i32::try_from(tree).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel has just opened it for this caller.
    let tree = unsafe { OwnedFd::from_raw_fd(tree) };
    let (set, clear) = attributes(flags);
    let attributes = Attributes { set, clear, propagation: 0, user_namespace: 0 };
    // SAFETY: mount_setattr(2) takes a descriptor, a path, flags, and a structure with its size.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            NOTHING.as_ptr(),
            itself | all,
            &raw const attributes,
            size_of::<Attributes>(),
        )
    })?;
    // SAFETY: move_mount(2) takes two descriptors with a path each, and flags.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            NOTHING.as_ptr(),
            place.descriptor.as_raw_fd(),
            NOTHING.as_ptr(),
            FROM_AND_TO_THEMSELVES,
        )
    })?;
    Ok(())
}

/// As older kernels do it: bound first, and then what it should be.
fn bind_in_steps(source: &Place, place: &Place, flags: MsFlags, recursive: bool) -> io::Result<()> {
    let all = if recursive { MsFlags::MS_REC } else { MsFlags::empty() };
    let nothing = None::<&str>;
    mount(Some(&source.itself()), &place.itself(), nothing, MsFlags::MS_BIND | all, nothing)?;
    if flags.is_empty() {
        return Ok(());
    }
    let again = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | flags;
    let changed = Place::open(&place.path)
        .and_then(|bound| mount(nothing, &bound.itself(), nothing, again, nothing).map_err(io::Error::from));
    changed.inspect_err(|_| {
        let _ = unmount(&place.path);
    })
}

/// Starts swapping to the swap space at `path`.
///
/// # Errors
/// The errors of swapon(2): `EBUSY` if it is in use already, `EINVAL` if there is no swap space.
pub fn swap_on(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path ends with a zero, and lives until the call returns.
    Errno::result(unsafe { libc::swapon(path.as_ptr(), 0) })?;
    Ok(())
}

/// Stops swapping to the swap space at `path`, after everything in it is moved back to memory.
///
/// # Errors
/// The errors of swapoff(2): `EINVAL` if it is not in use, `ENOMEM` if there is not enough memory.
pub fn swap_off(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path ends with a zero, and lives until the call returns.
    Errno::result(unsafe { libc::swapoff(path.as_ptr()) })?;
    Ok(())
}
