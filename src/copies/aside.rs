//! The file beside a final name, to which content goes until it is complete.
//!
//! ```text
//! open ──▶ (digest of what is there) ──▶ data … ──▶ complete ──▶ synced ──▶ has the final name
//!   │ locked by another: busy              │ cannot be written: removed
//! ```
//!
//! It belongs to who writes, with the mode 0600, and is locked while it is written. One that is there already is gone on with only if
//! it is such a file; another one of its name is removed.

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

/// What is between a file's name and the identifier of its copy.
const MARK: &[u8] = b".guestlet-";
/// Digits of that.
const ID: usize = 16;

/// Whether this identifies a copy.
pub fn is_id(id: &[u8]) -> bool {
    id.len() == ID && id.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The name of the file beside that of a name.
pub fn name(of: &[u8], id: &str) -> OsString {
    let room = MAX_NAME - 1 - MARK.len() - ID;
    OsString::from_vec([b".", &of[..of.len().min(room)], MARK, id.as_bytes()].concat())
}

/// Whether a file beside can have this name.
pub fn is_name(name: &[u8]) -> bool {
    let end = name.len().saturating_sub(ID);
    let (before, id) = name.split_at(end);
    is_file_name(name) && before.starts_with(b".") && before.ends_with(MARK) && is_id(id)
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another copy writes to it.
    #[error("another copy is writing to {}", .0.display())]
    Busy(OsString),
    /// It is something else.
    #[error("{} exists and was not left behind by a copy; remove it", .0.display())]
    Foreign(OsString),
    /// The system's refusal.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The file, locked.
#[derive(Debug)]
pub struct Aside {
    directory: Rc<OwnedFd>,
    name: OsString,
    file: File,
    facts: Facts,
}

impl Aside {
    /// Opens the one that there is, or makes it.
    ///
    /// # Errors
    /// If it is locked, is something else, or the system refuses.
    pub fn open(directory: &Rc<OwnedFd>, of: &[u8], id: &str) -> Result<Self, Error> {
        let name = name(of, id);
        // It may come and go meanwhile.
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
                // It was complete when it was interrupted, and has its final mode; or somebody has put it there.
                beneath::remove(directory, &name)?;
                continue;
            }
            let this = Self { directory: Rc::clone(directory), name, file, facts };
            // Who had it locked may have given it its final name.
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

    /// Whether it still has its name.
    ///
    /// # Errors
    /// As fstatat(2).
    pub fn is_there(&self) -> io::Result<bool> {
        let found = beneath::look(&self.directory, &self.name)?;
        Ok(found.is_some_and(|found| self.is_this(&found)))
    }

    /// Whether that is this file.
    pub fn is_this(&self, found: &Facts) -> bool {
        (found.device, found.inode) == (self.facts.device, self.facts.inode)
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The same, to be read from where it is.
    pub fn file_mut(&mut self) -> &mut File {
        &mut self.file
    }

    /// The directory that it is in.
    pub fn directory(&self) -> &Rc<OwnedFd> {
        &self.directory
    }

    /// Its name there.
    pub fn name(&self) -> &OsString {
        &self.name
    }

    /// What it was when it was opened.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Gives it its final name, which is on the disk then.
    ///
    /// # Errors
    /// As rename(2); `EEXIST` if something has the name and is to be kept; `ESTALE` if somebody has put something else there.
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

    /// Removes it.
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
