//! Temporary file beside a final name, which receives content until it is complete.
//!
//! ```text
//! open ──▶ (digest of what is there) ──▶ data … ──▶ complete ──▶ synced ──▶ has the final name
//!   │ locked by another: busy              │ cannot be written: removed
//! ```
//!
//! The file belongs to the user of the writer, has the mode 0600, and is locked while it is written. An
//! existing one is continued only if it has these properties; any other file of its name is removed.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::rc::Rc;

use nix::errno::Errno;
use nix::unistd::geteuid;

use super::paths::{MAX_NAME, is_name as is_file_name};
use crate::sys::beneath::{self, Facts, Kind};

/// Separator between a file's name and the identifier of its copy.
const MARK: &[u8] = b".guestlet-";
/// Number of digits of the identifier.
const ID: usize = 16;

/// Returns whether this is the identifier of a copy.
pub fn is_id(id: &[u8]) -> bool {
    id.len() == ID && id.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns the name of the temporary file for a final name.
pub fn name(of: &[u8], id: &str) -> OsString {
    let room = MAX_NAME - 1 - MARK.len() - ID;
    OsString::from_vec([b".", &of[..of.len().min(room)], MARK, id.as_bytes()].concat())
}

/// Returns whether a temporary file can have this name.
pub fn is_name(name: &[u8]) -> bool {
    let end = name.len().saturating_sub(ID);
    let (before, id) = name.split_at(end);
    is_file_name(name) && before.starts_with(b".") && before.ends_with(MARK) && is_id(id)
}

/// Reasons why a temporary file cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another copy writes to the file.
    #[error("another copy is writing to {}", .0.display())]
    Busy(OsString),
    /// The name belongs to something that no copy has made.
    #[error("{} exists and was not left behind by a copy; remove it", .0.display())]
    Foreign(OsString),
    /// System call that failed.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Temporary file, locked.
#[derive(Debug)]
pub struct Aside {
    directory: Rc<OwnedFd>,
    name: OsString,
    file: File,
    facts: Facts,
}

impl Aside {
    /// Opens the existing file, or creates it.
    ///
    /// # Errors
    /// Fails if it is locked, is not a temporary file of a copy, or a system call fails.
    pub fn open(directory: &Rc<OwnedFd>, of: &[u8], id: &str) -> Result<Self, Error> {
        let name = name(of, id);
        // Others may create and remove it between two calls.
        for _ in 0..5 {
            let file = match beneath::create(directory, &name) {
                Ok(file) => file,
                Err(error) if error.raw_os_error() == Some(Errno::EEXIST as i32) => {
                    match beneath::edit(directory, &name) {
                        Ok(file) => file,
                        Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                        Err(error) if error.raw_os_error() == Some(Errno::ELOOP as i32) => {
                            beneath::remove(directory, &name)?;
                            continue;
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(error) => return Err(error.into()),
            };
            let facts = beneath::facts(&file)?;
            if facts.kind != Kind::Regular {
                return Err(Error::Foreign(name));
            }
            match file.try_lock() {
                Ok(()) => {}
                Err(std::fs::TryLockError::WouldBlock) => return Err(Error::Busy(name)),
                Err(std::fs::TryLockError::Error(error)) => return Err(error.into()),
            }
            let is_own = facts.user == geteuid().as_raw() && facts.mode == 0o600 && facts.links == 1;
            if !is_own {
                // The copy was interrupted after the file had its final mode, or somebody else created the file.
                beneath::remove(directory, &name)?;
                continue;
            }
            let this = Self { directory: Rc::clone(directory), name, file, facts };
            // The former holder of the lock may have renamed it to its final name.
            if this.is_there()? {
                return Ok(this);
            }
            return Self::open_again(this, of, id);
        }
        Err(Error::Busy(name))
    }

    fn open_again(this: Self, of: &[u8], id: &str) -> Result<Self, Error> {
        let directory = Rc::clone(&this.directory);
        drop(this);
        Self::open(&directory, of, id)
    }

    /// Returns whether the file still has its name.
    ///
    /// # Errors
    /// The errors of fstatat(2).
    pub fn is_there(&self) -> io::Result<bool> {
        let found = beneath::look(&self.directory, &self.name)?;
        Ok(found.is_some_and(|found| self.is_this(&found)))
    }

    /// Returns whether these facts belong to this file.
    pub fn is_this(&self, found: &Facts) -> bool {
        (found.device, found.inode) == (self.facts.device, self.facts.inode)
    }

    /// Returns the open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the open file, to be read from its current position.
    pub fn file_mut(&mut self) -> &mut File {
        &mut self.file
    }

    /// Returns the directory of the file.
    pub fn directory(&self) -> &Rc<OwnedFd> {
        &self.directory
    }

    /// Returns the file's name in its directory.
    pub fn name(&self) -> &OsString {
        &self.name
    }

    /// Returns the facts about the file at the time it was opened.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Renames the file to its final name, and returns once that is on the disk.
    ///
    /// # Errors
    /// The errors of rename(2); `EEXIST` if the final name exists and is to be kept; `ESTALE` if somebody has
    /// replaced the temporary file.
    pub fn finish(self, to: &[u8], keep: bool) -> io::Result<()> {
        if !self.is_there()? {
            return Err(Errno::ESTALE.into());
        }
        let to = beneath::name(to);
        if keep {
            beneath::rename_new(&self.directory, &self.name, to)?;
        } else {
            beneath::replace(&self.directory, &self.name, to)?;
        }
        let found = beneath::look(&self.directory, to)?;
        if !found.is_some_and(|found| self.is_this(&found)) {
            return Err(Errno::ESTALE.into());
        }
        beneath::sync_names(&self.directory)
    }

    /// Removes the file.
    pub fn remove(self) {
        if self.is_there().unwrap_or(false) {
            drop(beneath::remove(&self.directory, &self.name));
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    const OF: &str = "0123456789abcdef";

    #[test]
    fn its_name_tells_the_copy_and_is_never_too_long() {
        assert_eq!(name(b"file", OF), ".file.guestlet-0123456789abcdef");
        for length in [1, 227, 228, 255] {
            let name = name(&vec![b'x'; length], OF);
            assert!(name.len() <= MAX_NAME && is_name(name.as_encoded_bytes()), "{length}");
        }
        for wrong in ["file.guestlet-0123456789abcdef", ".file.guestlet-0123456789abcdeF", ".guestlet-1", ""]
        {
            assert!(!is_name(wrong.as_bytes()), "{wrong}");
        }
    }

    #[test]
    fn what_is_not_ones_own_is_not_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Rc::new(beneath::find(folder.path()).unwrap());
        let path = folder.path().join(name(b"file", OF));
        std::fs::write(folder.path().join("other"), "kept").unwrap();
        symlink("other", &path).unwrap();
        assert_eq!(Aside::open(&directory, b"file", OF).unwrap().facts().size, 0);
        for mode in [0o644, 0o600] {
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, "other").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            std::fs::hard_link(&path, folder.path().join(format!("second-{mode}"))).unwrap();
            assert_eq!(Aside::open(&directory, b"file", OF).unwrap().facts().size, 0);
            assert_eq!(std::fs::read(folder.path().join(format!("second-{mode}"))).unwrap(), b"other");
        }
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(Aside::open(&directory, b"file", OF).is_err());
        std::fs::remove_dir(&path).unwrap();
        let first = Aside::open(&directory, b"file", OF).unwrap();
        assert!(matches!(Aside::open(&directory, b"file", OF), Err(Error::Busy(_))));
        first.finish(b"file", true).unwrap();
        let again = Aside::open(&directory, b"file", OF).unwrap();
        assert_eq!(again.finish(b"file", true).unwrap_err().raw_os_error(), Some(Errno::EEXIST as i32));
        assert_eq!(std::fs::read(folder.path().join("other")).unwrap(), b"kept");
    }
}
