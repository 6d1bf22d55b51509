//! Small files in a subdirectory of a user's home, accessed with no more rights than the user has.
//!
//! The user can change the contents at any time. Therefore nothing is accessed by path: the home directory is
//! opened once, everything below it is opened relative to its descriptor, and links are not followed. The
//! access also runs as the user (setfsuid(2)): whatever the user does to the home directory, it cannot lead to
//! a file that the user could not access anyway, and new files belong to the user.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat, renameat};
use nix::sys::stat::{Mode, SFlag, fchmod, fstat, fstatat, mkdirat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fsync, geteuid, setfsgid, setfsuid, unlinkat};

use crate::sys::accounts::Account;
use crate::sys::extended_attributes;
use crate::sys::root::Root;

/// Bytes of a file; more is refused.
const MAX_SIZE: u64 = 16 << 20;

/// A user's home, open. As long as this lives the thread has the user's rights on files, and not its own.
#[derive(Debug)]
pub struct Home {
    folder: OwnedFd,
    _rights: Rights,
}

/// Directory directly in a user's home directory.
#[derive(Debug)]
pub struct Folder<'h> {
    home: &'h Home,
    name: &'static str,
    /// Descriptor of the directory; absent if it does not exist.
    open: Option<OwnedFd>,
}

impl Home {
    /// Opens the home directory.
    ///
    /// # Errors
    /// The errors of open(2): `ENOTDIR` if it is not a directory; also if this thread cannot take the user's
    /// rights.
    pub fn open(root: &Root, account: &Account) -> io::Result<Self> {
        let home = account.home.to_string_lossy();
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let folder = open(&root.path(&home), flags, Mode::empty())?;
        Ok(Self { folder, _rights: Rights::take(account)? })
    }

    /// Opens a directory in the home directory.
    ///
    /// # Errors
    /// If the name belongs to something else, such as a link, or the directory cannot be entered.
    pub fn folder(&self, name: &'static str) -> io::Result<Folder<'_>> {
        let open = match open_folder(&self.folder, name) {
            Err(Errno::ENOENT) => None,
            Err(Errno::ENOTDIR | Errno::ELOOP) => return Err(not_followed(&self.folder, name)),
            open => Some(open?),
        };
        Ok(Folder { home: self, name, open })
    }
}

fn open_folder(within: &OwnedFd, name: &str) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(within, name, flags, Mode::empty())
}

/// Returns an error that explains why the entry of this name is not opened.
fn not_followed(folder: impl AsFd, name: &str) -> io::Error {
    let kind = fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW)
        .map(|found| SFlag::from_bits_truncate(found.st_mode));
    let link = kind.is_ok_and(|kind| kind & SFlag::S_IFMT == SFlag::S_IFLNK);
    let what = if link { "a symbolic link, which is not followed" } else { "not of the expected type" };
    io::Error::other(format!("{name} is {what}"))
}

impl Folder<'_> {
    /// Reads a file in the directory; `None` if it does not exist.
    ///
    /// # Errors
    /// If the name belongs to something else, the file is larger than 16 MiB, or it cannot be read.
    pub fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let Some(file) = self.open_file(name)? else { return Ok(None) };
        let mut bytes = Vec::new();
        File::from(file).take(MAX_SIZE + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_SIZE {
            return Err(io::Error::other(format!("{name} is larger than {} MiB", MAX_SIZE >> 20)));
        }
        Ok(Some(bytes))
    }

    fn open_file(&self, name: &str) -> io::Result<Option<OwnedFd>> {
        let Some(folder) = &self.open else { return Ok(None) };
        // Nonblocking, so that opening a pipe does not wait for its other end.
        let flags =
            OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        let file = match openat(folder, name, flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(None),
            Err(Errno::ELOOP | Errno::ENXIO) => return Err(not_followed(folder, name)),
            file => file?,
        };
        if SFlag::from_bits_truncate(fstat(&file)?.st_mode) & SFlag::S_IFMT != SFlag::S_IFREG {
            return Err(not_followed(folder, name));
        }
        Ok(Some(file))
    }

    /// Replaces a file in the directory atomically: a reader sees the old bytes or the new ones, also after a
    /// crash. The directory is created if it does not exist. Only the user has access: a directory that is
    /// created, or that other users can write to, gets mode 0700, and the file gets 0600.
    ///
    /// # Errors
    /// If something cannot be created or written; the file is then unchanged.
    pub fn replace(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let folder = match &self.open {
            Some(folder) => folder,
            None => self.open.insert(self.make()?),
        };
        if fstat(folder)?.st_mode & 0o022 != 0 {
            fchmod(folder, Mode::S_IRWXU)?;
        }
        let before = self.open_file(name)?;
        let Some(folder) = &self.open else { return Err(io::ErrorKind::NotFound.into()) };
        let beside = format!(".{name}.new");
        // An earlier run may have left this file when it was interrupted.
        match unlinkat(folder, beside.as_str(), UnlinkatFlags::NoRemoveDir) {
            Err(Errno::ENOENT) | Ok(()) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mut file = File::from(openat(folder, beside.as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR)?);
        let mut put = || -> io::Result<()> {
            fchmod(&file, Mode::S_IRUSR | Mode::S_IWUSR)?;
            if let Some(before) = &before {
                extended_attributes::copy_security_label(before, &file);
            }
            file.write_all(bytes)?;
            file.sync_all()?;
            renameat(folder, beside.as_str(), folder, name)?;
            Ok(())
        };
        let put = put();
        if put.is_err() {
            let _ = unlinkat(folder, beside.as_str(), UnlinkatFlags::NoRemoveDir);
            return put;
        }
        fsync(folder)?;
        Ok(())
    }

    fn make(&self) -> io::Result<OwnedFd> {
        match mkdirat(&self.home.folder, self.name, Mode::S_IRWXU) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let folder = open_folder(&self.home.folder, self.name)?;
        fchmod(&folder, Mode::S_IRWXU)?;
        Ok(folder)
    }
}

/// The rights on files that this thread had before.
#[derive(Debug)]
struct Rights {
    user: Uid,
    group: Gid,
}

impl Rights {
    /// Takes those of a user. For root they are those that it has.
    fn take(account: &Account) -> io::Result<Self> {
        // The group first: with the user's rights it could not be taken.
        let before = Self { group: setfsgid(account.group), user: setfsuid(account.user) };
        // setfsuid(2) does not report failure. A call with an invalid ID changes nothing and returns the current one.
        let nobody = u32::MAX;
        let taken = setfsuid(Uid::from_raw(nobody)) == account.user
            && setfsgid(Gid::from_raw(nobody)) == account.group;
        if taken || (!geteuid().is_root() && account.user == geteuid()) {
            return Ok(before);
        }
        Err(io::Error::new(io::ErrorKind::PermissionDenied, "the user's privileges cannot be assumed"))
    }
}

impl Drop for Rights {
    fn drop(&mut self) {
        setfsuid(self.user);
        setfsgid(self.group);
    }
}
