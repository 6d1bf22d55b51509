//! Access to the contents of a directory through descriptors. No symbolic link is followed, even one that is
//! put in place during the access, and no path leads out of the directory. (Each part of a path is opened
//! separately with `O_NOFOLLOW`, which also works on kernels without openat2(2).)

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat, readlinkat, renameat};
use nix::libc;
use nix::sys::stat::{
    FileStat, Mode, SFlag, UtimensatFlags, fchmod, fstat, fstatat, futimens, mkdirat, utimensat,
};
use nix::sys::time::TimeSpec;
use nix::unistd::{
    Gid, LinkatFlags, Uid, UnlinkatFlags, Whence, fchownat, fsync, linkat, lseek, symlinkat, unlinkat,
};

/// Type of a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Regular file.
    Regular,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// A device, a pipe or a socket.
    Special,
}

/// A moment, as file systems have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moment {
    /// Seconds since 1970 (Unix time); negative before.
    pub seconds: i64,
    /// And so many nanoseconds.
    pub nanoseconds: u32,
}

/// Metadata that the file system keeps for an entry, as fstat(2) returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Type of the entry.
    pub kind: Kind,
    /// Bytes of its content.
    pub size: u64,
    /// The twelve bits of chmod(2).
    pub mode: u32,
    /// User ID of the owner.
    pub user: u32,
    /// Group ID of the owner.
    pub group: u32,
    /// When its content was changed.
    pub modified: Moment,
    /// When anything of it was changed.
    pub changed: Moment,
    /// Device number of the file system.
    pub device: u64,
    /// Inode number in that file system.
    pub inode: u64,
    /// Number of hard links.
    pub links: u64,
    /// Bytes that it takes on the disk.
    pub allocated: u64,
}

impl Facts {
    #[allow(clippy::unnecessary_cast, reason = "other architectures have other types")]
    fn of(found: &FileStat) -> Self {
        let moment = |seconds, nanoseconds| Moment {
            seconds,
            nanoseconds: u32::try_from(nanoseconds).unwrap_or_default(),
        };
        let kind = match SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT {
            SFlag::S_IFREG => Kind::Regular,
            SFlag::S_IFDIR => Kind::Directory,
            SFlag::S_IFLNK => Kind::Symlink,
            _ => Kind::Special,
        };
        Self {
            kind,
            size: u64::try_from(found.st_size).unwrap_or_default(),
            mode: (found.st_mode & 0o7777) as u32,
            user: found.st_uid,
            group: found.st_gid,
            modified: moment(found.st_mtime, found.st_mtime_nsec),
            changed: moment(found.st_ctime, found.st_ctime_nsec),
            device: found.st_dev as u64,
            inode: found.st_ino as u64,
            links: found.st_nlink as u64,
            allocated: u64::try_from(found.st_blocks).unwrap_or_default() * 512,
        }
    }
}

/// Returns the metadata of the file that a descriptor is open for.
///
/// # Errors
/// The errors of fstat(2).
pub fn facts(descriptor: impl AsFd) -> io::Result<Facts> {
    Ok(Facts::of(&fstat(descriptor)?))
}

/// Returns the metadata of the entry `name` in a directory, or `None` if there is no such entry. A symbolic
/// link is not followed: the result describes the link itself.
///
/// # Errors
/// The errors of fstatat(2), except `ENOENT`.
pub fn look(directory: &OwnedFd, name: &OsStr) -> io::Result<Option<Facts>> {
    match fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(Facts::of(&found))),
        Err(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the target of a symbolic link.
///
/// # Errors
/// The errors of readlinkat(2).
pub fn link_target(directory: &OwnedFd, name: &OsStr) -> io::Result<OsString> {
    Ok(readlinkat(directory, name)?)
}

/// Finds what is at a path whose links are all followed, without opening it.
///
/// # Errors
/// As open(2).
pub fn find(path: &Path) -> io::Result<OwnedFd> {
    Ok(open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?)
}

/// Finds something in a directory, without opening it; a link itself.
///
/// # Errors
/// As openat(2).
pub fn find_in(directory: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    Ok(openat(directory, name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?)
}

/// Enters a directory in another one.
///
/// # Errors
/// As openat(2); `ENOTDIR` for a link as well.
pub fn enter(directory: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    Ok(openat(directory, name, flags, Mode::empty())?)
}

/// The link that leads to what a descriptor is open for, `proc_pid_fd(5)`.
pub fn itself(descriptor: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))
}

/// Opens what was found, to read it. Never waits for a device or the other end of a pipe.
///
/// # Errors
/// As open(2).
pub fn read(found: &OwnedFd) -> io::Result<File> {
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    Ok(open(&itself(found), flags, Mode::empty())?.into())
}

/// The names in a directory, in no order.
///
/// # Errors
/// As opendir(3).
pub fn names(directory: &OwnedFd) -> io::Result<impl Iterator<Item = io::Result<OsString>>> {
    Ok(std::fs::read_dir(itself(directory))?.map(|entry| entry.map(|entry| entry.file_name())))
}

/// Makes a file that was not there, for its owner alone, to be read and written.
///
/// # Errors
/// As openat(2).
pub fn create(directory: &OwnedFd, name: &OsStr) -> io::Result<File> {
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(openat(directory, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
}

/// Opens a plain file that is there, to be read and written.
///
/// # Errors
/// As openat(2); `ELOOP` for a link.
pub fn edit(directory: &OwnedFd, name: &OsStr) -> io::Result<File> {
    let flags = OFlag::O_RDWR | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    Ok(openat(directory, name, flags, Mode::empty())?.into())
}

/// Makes a directory that its owner can use, whatever its mode is; whether it was not there.
///
/// # Errors
/// As mkdirat(2), except that one that is there is enough.
pub fn make_directory(directory: &OwnedFd, name: &OsStr, mode: u32) -> io::Result<bool> {
    let mode = Mode::from_bits_truncate((mode & 0o777 | 0o700) as libc::mode_t);
    match mkdirat(directory, name, mode) {
        Ok(()) => Ok(true),
        Err(Errno::EEXIST) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Makes a symbolic link.
///
/// # Errors
/// As symlinkat(2).
pub fn make_symlink(target: &OsStr, directory: &OwnedFd, name: &OsStr) -> io::Result<()> {
    Ok(symlinkat(target, directory, name)?)
}

/// Removes a file or a link.
///
/// # Errors
/// As unlinkat(2).
pub fn remove(directory: &OwnedFd, name: &OsStr) -> io::Result<()> {
    Ok(unlinkat(directory, name, UnlinkatFlags::NoRemoveDir)?)
}

/// Gives a file in a directory another name, and takes it from what had it.
///
/// # Errors
/// As renameat(2).
pub fn replace(directory: &OwnedFd, from: &OsStr, to: &OsStr) -> io::Result<()> {
    Ok(renameat(directory, from, directory, to)?)
}

/// The same with a name that nothing has.
///
/// # Errors
/// As linkat(2): `EEXIST` if something has it.
pub fn rename_new(directory: &OwnedFd, from: &OsStr, to: &OsStr) -> io::Result<()> {
    match linkat(directory, from, directory, to, LinkatFlags::empty()) {
        Ok(()) => remove(directory, from),
        // The file system has no hard links, or they are not permitted.
        Err(Errno::EPERM | Errno::EACCES | Errno::EOPNOTSUPP | Errno::ENOSYS) => match look(directory, to)? {
            Some(_) => Err(Errno::EEXIST.into()),
            None => replace(directory, from, to),
        },
        Err(error) => Err(error.into()),
    }
}

/// Writes the names in a directory to the disk.
///
/// # Errors
/// As fsync(2).
pub fn sync_names(directory: &OwnedFd) -> io::Result<()> {
    let opened = read(directory)?;
    match fsync(&opened) {
        // A file system that has no disk.
        Ok(()) | Err(Errno::EINVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Sets the owner of an open file.
///
/// # Errors
/// As fchown(2).
pub fn set_owner(file: &File, user: u32, group: u32) -> io::Result<()> {
    Ok(nix::unistd::fchown(file, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?)
}

/// Sets the mode of an open file.
///
/// # Errors
/// As fchmod(2).
pub fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    Ok(fchmod(file, Mode::from_bits_truncate(mode as libc::mode_t))?)
}

fn time(moment: Moment) -> TimeSpec {
    TimeSpec::new(moment.seconds, moment.nanoseconds.into())
}

/// Sets when the content of an open file was changed.
///
/// # Errors
/// As futimens(3).
pub fn set_modified(file: &File, moment: Moment) -> io::Result<()> {
    Ok(futimens(file, &TimeSpec::UTIME_OMIT, &time(moment))?)
}

/// Sets owner and time of a link itself.
///
/// # Errors
/// As fchownat(2) and utimensat(2).
pub fn set_of_link(
    directory: &OwnedFd,
    name: &OsStr,
    owner: Option<(u32, u32)>,
    modified: Option<Moment>,
) -> io::Result<()> {
    if let Some((user, group)) = owner {
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        fchownat(directory, name, Some(user), Some(group), AtFlags::AT_SYMLINK_NOFOLLOW)?;
    }
    if let Some(moment) = modified {
        let flags = UtimensatFlags::NoFollowSymlink;
        utimensat(directory, name, &TimeSpec::UTIME_OMIT, &time(moment), flags)?;
    }
    Ok(())
}

/// Finds the first range of data of a file at or after the offset `from`, and returns where it begins and
/// ends; `None` if there is only a hole up to `end`. On a file system that does not report holes, everything
/// counts as data.
///
/// # Errors
/// The errors of lseek(2).
pub fn next_data(file: &File, from: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    let offset = |at: u64| libc::off_t::try_from(at).map_err(|_| io::Error::from(Errno::EOVERFLOW));
    let begin = match lseek(file, offset(from)?, Whence::SeekData) {
        Ok(begin) => u64::try_from(begin).unwrap_or(from),
        Err(Errno::ENXIO) => return Ok(None),
        Err(Errno::EINVAL) => return Ok((from < end).then_some((from, end))),
        Err(error) => return Err(error.into()),
    };
    if begin >= end {
        return Ok(None);
    }
    let stop = match lseek(file, offset(begin)?, Whence::SeekHole) {
        Ok(stop) => u64::try_from(stop).unwrap_or(end),
        Err(Errno::ENXIO | Errno::EINVAL) => end,
        Err(error) => return Err(error.into()),
    };
    Ok(Some((begin, stop.clamp(begin, end))))
}

/// Returns the bytes of the file system that are available to unprivileged users.
///
/// # Errors
/// The errors of fstatvfs(3).
#[allow(clippy::unnecessary_cast, reason = "other architectures have other types")]
pub fn free_space(found: &OwnedFd) -> io::Result<u64> {
    let system = nix::sys::statvfs::statvfs(&itself(found))?;
    Ok((system.blocks_available() as u64).saturating_mul(system.fragment_size() as u64))
}

/// The bytes of a name.
pub fn name(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

/// The path of these bytes.
pub fn path(bytes: Vec<u8>) -> PathBuf {
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::os::unix::fs::{FileExt as _, symlink};

    use super::*;

    #[test]
    fn links_are_not_entered_and_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("real")).unwrap();
        std::fs::write(folder.path().join("real/file"), "x").unwrap();
        symlink("real", folder.path().join("link")).unwrap();
        symlink("real/file", folder.path().join("to-file")).unwrap();
        let root = find(folder.path()).unwrap();
        let real = enter(&root, name(b"real")).unwrap();
        assert_eq!(look(&real, name(b"file")).unwrap().unwrap().size, 1);
        assert_eq!(look(&real, name(b"nothing")).unwrap(), None);
        assert_eq!(enter(&root, name(b"link")).unwrap_err().raw_os_error(), Some(libc::ENOTDIR));
        assert_eq!(edit(&root, name(b"to-file")).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert_eq!(facts(find_in(&root, name(b"to-file")).unwrap()).unwrap().kind, Kind::Symlink);
        assert_eq!(link_target(&root, name(b"link")).unwrap(), "real");
    }

    #[test]
    fn a_name_that_is_taken_is_not_taken_again() {
        let folder = tempfile::tempdir().unwrap();
        let root = find(folder.path()).unwrap();
        drop(create(&root, name(b"new")).unwrap());
        std::fs::write(folder.path().join("old"), "kept").unwrap();
        let refused = rename_new(&root, name(b"new"), name(b"old")).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EEXIST));
        rename_new(&root, name(b"new"), name(b"newer")).unwrap();
        let mut found: Vec<_> = names(&root).unwrap().map(Result::unwrap).collect();
        found.sort();
        assert_eq!(found, ["newer", "old"]);
    }

    #[test]
    fn data_and_holes_are_told_apart() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"x", 10 << 20).unwrap();
        file.set_len(20 << 20).unwrap();
        let (begin, stop) = next_data(&file, 0, 20 << 20).unwrap().unwrap();
        assert!(begin <= 10 << 20 && stop > 10 << 20, "{begin} {stop}");
        assert!(free_space(&find(Path::new("/tmp")).unwrap()).unwrap() > 0);
    }
}
