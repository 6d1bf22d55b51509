//! A directory that is opened once: what is in it is reached through its descriptor, whatever its path leads to later, and
//! no symbolic link in it is followed.

use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat, renameat};
use nix::sys::stat::{Mode, SFlag, fstatat};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{UnlinkatFlags, getegid, geteuid, unlinkat};

/// Never through a link, nor waiting for the other end of a pipe.
const ENTRY: OFlag =
    OFlag::O_NOFOLLOW.union(OFlag::O_NONBLOCK).union(OFlag::O_NOCTTY).union(OFlag::O_CLOEXEC);

/// Open directory, whose entries are accessed relative to its descriptor.
#[derive(Debug)]
pub struct Directory {
    file: File,
    /// Number of syncs, counted for tests.
    #[cfg(test)]
    syncs: std::sync::atomic::AtomicUsize,
}

/// Type of a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// No such entry.
    Nothing,
    /// A symbolic link, wherever it leads.
    Link,
    /// A directory, a device, a pipe or a socket.
    Other,
    /// Regular file.
    File {
        /// Number of hard links.
        links: u64,
        /// Device and inode number.
        itself: (u64, u64),
    },
}

impl Directory {
    /// Opens the directory at `path`; symbolic links in the path are followed.
    ///
    /// # Errors
    /// The errors of open(2).
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let file = File::from(open(path, flags, Mode::empty())?);
        Ok(Self {
            file,
            #[cfg(test)]
            syncs: 0.into(),
        })
    }

    /// Explains why a user other than root and the one of this process can change the contents of the directory;
    /// `None` if no other user can.
    ///
    /// # Errors
    /// The errors of fstat(2).
    pub fn distrust(&self) -> io::Result<Option<String>> {
        let found = self.file.metadata()?;
        let mode = found.mode() & 0o7777;
        let (user, group) = (geteuid().as_raw(), getegid().as_raw());
        Ok(if found.uid() != 0 && found.uid() != user {
            Some(format!(
                "it belongs to the user {}, who can change its contents; chown it to root",
                found.uid()
            ))
        } else if mode & 0o002 != 0 {
            Some(format!("it has mode {mode:04o}, so everybody can write to it; chmod o-w"))
        } else if mode & 0o020 != 0 && found.gid() != 0 && found.gid() != group {
            Some(format!("it has mode {mode:04o}, so the group {} can write to it; chmod g-w", found.gid()))
        } else {
            None
        })
    }

    /// Returns the device and inode number.
    ///
    /// # Errors
    /// The errors of fstat(2).
    pub fn itself(&self) -> io::Result<(u64, u64)> {
        let found = self.file.metadata()?;
        Ok((found.dev(), found.ino()))
    }

    /// Returns the size of its file system in bytes, and the bytes that are available to unprivileged users.
    ///
    /// # Errors
    /// The errors of fstatvfs(3).
    pub fn room(&self) -> io::Result<(u64, u64)> {
        let found = fstatvfs(&self.file)?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.fragment_size());
        Ok((bytes(found.blocks()), bytes(found.blocks_available())))
    }

    /// Returns the names of all entries.
    ///
    /// # Errors
    /// The errors of readdir(3).
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        let itself = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        std::fs::read_dir(itself)?.map(|entry| Ok(entry?.file_name())).collect()
    }

    /// Returns the type of the entry `name`.
    ///
    /// # Errors
    /// The errors of fstatat(2).
    pub fn entry(&self, name: &str) -> io::Result<Entry> {
        let found = match fstatat(&self.file, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => return Ok(Entry::Nothing),
            found => found?,
        };
        let kind = SFlag::from_bits_truncate(found.st_mode & SFlag::S_IFMT.bits());
        Ok(if kind == SFlag::S_IFREG {
            Entry::File { links: found.st_nlink, itself: (found.st_dev, found.st_ino) }
        } else if kind == SFlag::S_IFLNK {
            Entry::Link
        } else {
            Entry::Other
        })
    }

    /// Opens an existing file for reading, or for reading and writing.
    ///
    /// # Errors
    /// The errors of openat(2); also if it is not a regular file.
    pub fn file(&self, name: &str, write: bool) -> io::Result<File> {
        let access = if write { OFlag::O_RDWR } else { OFlag::O_RDONLY };
        let file = File::from(openat(&self.file, name, access | ENTRY, Mode::empty())?);
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        Ok(file)
    }

    /// Opens a file for writing, with access for root and the user of this process only, and creates it if it does
    /// not exist.
    ///
    /// # Errors
    /// The errors of openat(2).
    pub fn file_or_new(&self, name: &str) -> io::Result<File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | ENTRY;
        Ok(File::from(openat(&self.file, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?))
    }

    /// Creates a file for writing, with access for root and the user of this process only.
    ///
    /// # Errors
    /// The errors of openat(2); also if the name exists.
    pub fn new_file(&self, name: &str) -> io::Result<File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | ENTRY;
        let file = File::from(openat(&self.file, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?);
        file.set_permissions(Permissions::from_mode(0o600))?;
        Ok(file)
    }

    /// The bytes of a regular file that may be missing; one that has more than `most` is an error.
    ///
    /// # Errors
    /// As openat(2) and read(2) give them.
    pub fn read(&self, name: &str, most: u64) -> io::Result<Option<Vec<u8>>> {
        let file = match self.file(name, false) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let length = file.metadata()?.len();
        if length > most {
            return Err(io::Error::other(format!("it has {length} bytes")));
        }
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    /// Writes a file that is to be renamed, and has its bytes kept; one of this name that is there is replaced.
    ///
    /// # Errors
    /// As openat(2), write(2) and fsync(2) give them; then nothing is there under this name.
    pub fn prepare(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.remove(name)?;
        let mut file = self.new_file(name)?;
        let written = file.write_all(bytes).and_then(|()| self.sync_file(&file));
        if written.is_err()
            && let Err(error) = self.remove(name)
        {
            tracing::warn!("cannot remove {name}: {error}");
        }
        written
    }

    /// Renames an entry, replacing any entry that has the new name. The change survives a crash once
    /// [`Directory::sync`] has returned.
    ///
    /// # Errors
    /// The errors of renameat(2).
    pub fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.file, from, &self.file, to)?)
    }

    /// Removes an entry that is not a directory; returns whether it existed. The change survives a crash once
    /// [`Directory::sync`] has returned.
    ///
    /// # Errors
    /// The errors of unlinkat(2).
    pub fn remove(&self, name: &str) -> io::Result<bool> {
        match unlinkat(&self.file, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) => Ok(true),
            Err(Errno::ENOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Syncs the directory, so that the names in it survive a crash.
    ///
    /// # Errors
    /// The errors of fsync(2).
    pub fn sync(&self) -> io::Result<()> {
        self.sync_file(&self.file)
    }

    /// Syncs a file in the directory, so that its contents survive a crash.
    ///
    /// # Errors
    /// The errors of fsync(2).
    #[cfg_attr(not(test), allow(clippy::unused_self, reason = "tests count"))]
    pub fn sync_file(&self, file: &File) -> io::Result<()> {
        #[cfg(test)]
        self.syncs.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        file.sync_all()
    }

    /// Returns how often the directory or a file in it was synced.
    #[cfg(test)]
    pub fn syncs(&self) -> usize {
        self.syncs.load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn no_link_is_followed_and_no_pipe_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(folder.path().join("outside"), "secret").unwrap();
        symlink("../outside", path.join("link")).unwrap();
        nix::unistd::mkfifo(&path.join("pipe"), Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        std::fs::write(path.join("file"), "bytes").unwrap();
        let directory = Directory::open(&path).unwrap();
        // Whatever is at its path by now.
        std::fs::rename(&path, folder.path().join("moved")).unwrap();
        for write in [false, true] {
            for name in ["link", "pipe", "nothing"] {
                assert!(directory.file(name, write).is_err(), "{name}");
            }
            directory.file("file", write).unwrap();
        }
        assert!(directory.file_or_new("link").is_err() && directory.new_file("file").is_err());
        assert_eq!(directory.read("nothing", 9).unwrap(), None);
        assert_eq!(directory.read("file", 5).unwrap().unwrap(), b"bytes");
        assert_eq!(directory.read("file", 4).unwrap_err().to_string(), "it has 5 bytes");
        assert_eq!(directory.entry("link").unwrap(), Entry::Link);
        assert_eq!(directory.entry("pipe").unwrap(), Entry::Other);
        assert!(matches!(directory.entry("file").unwrap(), Entry::File { links: 1, .. }));
        directory.prepare("link", b"new").unwrap();
        directory.rename("link", "file").unwrap();
        assert_eq!(std::fs::read(folder.path().join("moved/file")).unwrap(), b"new");
        assert_eq!(std::fs::read(folder.path().join("outside")).unwrap(), b"secret");
        assert!(directory.remove("pipe").unwrap() && !directory.remove("pipe").unwrap());
        assert_eq!(directory.names().unwrap(), ["file"]);
    }

    #[test]
    fn others_may_not_write_to_it() {
        let folder = tempfile::tempdir().unwrap();
        let words = |mode: u32| {
            std::fs::set_permissions(folder.path(), Permissions::from_mode(mode)).unwrap();
            Directory::open(folder.path()).unwrap().distrust().unwrap().unwrap_or_default()
        };
        for mode in [0o700, 0o755, 0o711, 0o770] {
            assert_eq!(words(mode), "", "{mode:o}");
        }
        assert!(words(0o1777).contains("mode 1777, so everybody can write to it; chmod o-w"));
        if !geteuid().is_root() {
            return;
        }
        chown(folder.path(), None, Some(4711)).unwrap();
        assert_eq!(words(0o755), "");
        assert!(words(0o775).contains("the group 4711 can write to it; chmod g-w"));
        chown(folder.path(), Some(4711), None).unwrap();
        assert!(words(0o755).contains("it belongs to the user 4711"));
    }
}
