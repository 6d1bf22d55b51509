//! Opening of files that callers name. The target of a path is resolved first, and can be refused before
//! opening it has any effect.
//!
//! A link below /proc can lead into another mount namespace. The kernel then reports the path of the file in
//! that namespace, and the same path is a different file here: [`Place::is_here`] shows whether the path is
//! valid in this namespace.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open as open_path, openat};
use nix::sys::stat::{Mode, fstat};

use super::mount_point::mount_id;

/// Access modes for opening a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::struct_excessive_bools, reason = "open(2) has a flag for each")]
pub struct How {
    /// Open for reading.
    pub read: bool,
    /// Open for writing.
    pub write: bool,
    /// Writes go to its end, wherever that is by then.
    pub append: bool,
    /// Truncate the file (`O_TRUNC`).
    pub truncate: bool,
    /// Create the file if it does not exist (`O_CREAT`).
    pub create: bool,
}

/// Target of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The path when every link is followed, as the kernel has it.
    pub path: PathBuf,
    /// The same file is at that path for this process, too. It is not in another mount namespace, below another mount, or when it
    /// was removed just now.
    pub is_here: bool,
}

/// Mode of a new file, whatever the umask of the process is: root can write to it, everybody can read it.
const NEW_FILE: u32 = 0o644;
/// Attempts to open a file that is created and removed meanwhile.
const TRIES: usize = 5;

/// Opens the file at `path` if `may` lets the place to which every link leads. Never waits for a
/// device or for the other end of a pipe.
///
/// # Errors
/// As `may` and open(2) give them; a link that leads nowhere is not followed to make a file.
pub fn open<E: From<io::Error>>(
    path: &Path,
    how: How,
    may: impl Fn(&Place) -> Result<(), E>,
) -> Result<File, E> {
    let mut last = Errno::ENOENT;
    for tried in 1..=TRIES {
        match open_path(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()) {
            Ok(found) => {
                let place = place(&found)?;
                // Another file may have replaced it meanwhile.
                if !place.is_here && tried < TRIES {
                    continue;
                }
                may(&place)?;
                // Opens the file that was found and checked, not the one that the path may refer to by now.
                return Ok(File::from(open_path(&itself(&found), how.flags(), Mode::empty()).map_err(io)?));
            }
            Err(Errno::ENOENT) if how.create => {}
            Err(error) => return Err(io(error).into()),
        }
        match create(path, how, &may)? {
            Ok(file) => return Ok(file),
            Err(Errno::EEXIST) => last = Errno::EEXIST,
            Err(error) => return Err(io(error).into()),
        }
    }
    Err(io(last).into())
}

/// Makes the file, if it has not come to be meanwhile.
fn create<E: From<io::Error>>(
    path: &Path,
    how: How,
    may: impl Fn(&Place) -> Result<(), E>,
) -> Result<Result<File, Errno>, E> {
    use std::os::unix::ffi::OsStrExt as _;

    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Ok(Err(Errno::EISDIR)) };
    if path.as_os_str().as_bytes().ends_with(b"/") {
        return Ok(Err(Errno::EISDIR));
    }
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let folder = match open_path(folder, flags, Mode::empty()) {
        Ok(folder) => folder,
        Err(error) => return Ok(Err(error)),
    };
    let Place { path, is_here } = place(&folder)?;
    may(&Place { path: path.join(name), is_here })?;
    let flags = how.flags() | OFlag::O_CREAT | OFlag::O_EXCL;
    let file = match openat(&folder, name, flags, Mode::S_IRUSR | Mode::S_IWUSR) {
        Ok(file) => File::from(file),
        Err(error) => return Ok(Err(error)),
    };
    file.set_permissions(Permissions::from_mode(NEW_FILE))?;
    Ok(Ok(file))
}

impl How {
    fn flags(self) -> OFlag {
        let access = match (self.read, self.write) {
            (true, true) => OFlag::O_RDWR,
            (false, true) => OFlag::O_WRONLY,
            (_, false) => OFlag::O_RDONLY,
        };
        let mut flags = access | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
        flags.set(OFlag::O_APPEND, self.append);
        flags.set(OFlag::O_TRUNC, self.truncate);
        flags
    }
}

/// The link that leads to what a descriptor is open for, `proc_pid_fd(5)`.
fn itself(descriptor: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd()))
}

/// Returns the path of the file that a descriptor is open for, without symbolic links.
///
/// # Errors
/// If the kernel does not report the path.
pub fn place(descriptor: &OwnedFd) -> io::Result<Place> {
    let path = std::fs::read_link(itself(descriptor))?;
    // If this cannot be determined, the file counts as not being here.
    let is_here = path.is_absolute() && is_at(descriptor, &path).unwrap_or(false);
    Ok(Place { path, is_here })
}

/// Returns whether `path` refers, for this process, to the file that a descriptor is open for, on the same
/// mount. Mounts belong to one mount namespace, and their IDs are unique across all of them.
fn is_at(descriptor: &OwnedFd, path: &Path) -> io::Result<bool> {
    let again = open_path(path, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
    let identity = |file: &OwnedFd| -> io::Result<_> {
        let found = fstat(file)?;
        Ok((mount_id(file)?, found.st_dev, found.st_ino))
    };
    Ok(identity(descriptor)? == identity(&again)?)
}

fn io(error: Errno) -> io::Error {
    error.into()
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::cell::RefCell;
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::symlink;

    use super::*;

    const READ: How = How { read: true, write: false, append: false, truncate: false, create: false };
    const WRITE: How = How { read: false, write: true, append: false, truncate: true, create: true };

    /// Returns the result of opening, and the path that the check was called with.
    fn try_open(path: &Path, how: How, allowed: bool) -> (io::Result<File>, Option<PathBuf>) {
        let asked = RefCell::new(None);
        let file = open(path, how, |place| {
            assert!(place.is_here, "{place:?}");
            *asked.borrow_mut() = Some(place.path.clone());
            if allowed { Ok(()) } else { Err(io::Error::other("no")) }
        });
        (file, asked.into_inner())
    }

    #[test]
    fn every_link_is_followed_before_it_is_asked() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        std::fs::create_dir(folder.join("real")).unwrap();
        std::fs::write(folder.join("real/file"), "kept").unwrap();
        symlink("real", folder.join("to-folder")).unwrap();
        symlink("real/file", folder.join("to-file")).unwrap();
        for name in ["to-file", "to-folder/file", "to-folder/../real/./file"] {
            let (file, asked) = try_open(&folder.join(name), READ, true);
            assert!(file.is_ok(), "{name}");
            assert_eq!(asked, Some(folder.join("real/file")), "{name}");
        }
        let (refused, _) = try_open(&folder.join("to-file"), WRITE, false);
        assert_eq!(refused.unwrap_err().to_string(), "no");
        assert_eq!(std::fs::read_to_string(folder.join("real/file")).unwrap(), "kept");
        let (refused, asked) = try_open(&folder.join("to-folder/new"), WRITE, false);
        assert!(refused.is_err());
        assert_eq!(asked, Some(folder.join("real/new")));
        assert!(!folder.join("real/new").exists());
    }

    #[test]
    fn a_file_that_has_no_path_any_more_is_not_here() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gone");
        let held = OwnedFd::from(File::create(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        // The name that the kernel gives it then may be that of another file.
        std::fs::write(folder.path().join("gone (deleted)"), "another").unwrap();
        let asked = RefCell::new(None);
        let file = open(&itself(&held), READ, |place| {
            *asked.borrow_mut() = Some(place.clone());
            Ok::<_, io::Error>(())
        });
        file.unwrap();
        let place = asked.into_inner().unwrap();
        assert!(place.path.ends_with("gone (deleted)") && !place.is_here, "{place:?}");
    }

    #[test]
    fn files_are_made_with_a_mode_of_their_own_and_never_through_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        try_open(&path, WRITE, true).0.unwrap().write_all(b"x").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, NEW_FILE);
        symlink(folder.path().join("nowhere"), folder.path().join("link")).unwrap();
        let error = try_open(&folder.path().join("link"), WRITE, true).0.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::EEXIST as i32));
        assert!(!folder.path().join("nowhere").exists());
        let error = try_open(Path::new(&format!("{}/slash/", folder.path().display())), WRITE, true).0;
        assert_eq!(error.unwrap_err().raw_os_error(), Some(Errno::EISDIR as i32));
    }

    #[test]
    fn a_pipe_without_another_end_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let error = try_open(&path, WRITE, true).0.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::ENXIO as i32));
        let mut reader = try_open(&path, READ, true).0.unwrap();
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }
}
