//! Small files in a folder of a user's home, with no more rights than the user has.
//!
//! The user may change what lies there at any time. So nothing is done by path: the home is opened once, what is below
//! by its descriptor, and links are not followed. And it is done as the user (setfsuid(2)): whatever the user makes
//! of the home, it leads to nothing that the user could not reach alone, and what is made belongs to the user.

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

/// A folder directly in a user's home.
#[derive(Debug)]
pub struct Folder<'h> {
    home: &'h Home,
    name: &'static str,
    /// Nothing, if it is not there.
    open: Option<OwnedFd>,
}

impl Home {
    /// Opens the home.
    ///
    /// # Errors
    /// As open(2) gives them: `ENOTDIR` if it is no folder; and if the user's rights cannot be taken.
    pub fn open(root: &Root, account: &Account) -> io::Result<Self> {
        let home = account.home.to_string_lossy();
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let folder = open(&root.path(&home), flags, Mode::empty())?;
        Ok(Self { folder, _rights: Rights::take(account)? })
    }

    /// Opens a folder in it.
    ///
    /// # Errors
    /// If something else has its name, such as a link, or it cannot be entered.
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

/// In words, why what has that name is not opened.
fn not_followed(folder: impl AsFd, name: &str) -> io::Error {
    let kind = fstatat(folder, name, AtFlags::AT_SYMLINK_NOFOLLOW)
        .map(|found| SFlag::from_bits_truncate(found.st_mode));
    let link = kind.is_ok_and(|kind| kind & SFlag::S_IFMT == SFlag::S_IFLNK);
    let what = if link { "a symbolic link, which is not followed" } else { "not of the expected type" };
    io::Error::other(format!("{name} is {what}"))
}

impl Folder<'_> {
    /// Reads a file in it; nothing if it is not there.
    ///
    /// # Errors
    /// If something else has its name, it is larger than 16 MiB, or cannot be read.
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
        // Without waiting for whoever is at the other end of a pipe.
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

    /// Replaces a file in it: whoever reads sees the old bytes or the new ones, and so does whoever boots after a
    /// crash. The folder is made if it is not there. Both are for the user alone: mode 0700 for a folder that is made
    /// or that others may write to, 0600 for the file.
    ///
    /// # Errors
    /// If something cannot be made or written; the file is as it was then.
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
        // What a run before has left when it was interrupted.
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
        // Neither call says whether it succeeded; who asks for what is not possible is told what it is now.
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
