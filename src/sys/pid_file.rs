//! PID file of the daemon, which is also the lock that ensures a single instance.
//!
//! The lock covers the first byte of the file, as in qemu-ga, so that the two agents exclude each other.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

/// A locked file with this process's id; dropping it removes it.
#[derive(Debug)]
pub struct PidFile {
    file: File,
    path: PathBuf,
}

/// Reason why the PID file could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Locked by another process.
    #[error("the pid file {0} is locked by another process: the agent is running already")]
    Locked(PathBuf),
    /// Error of the operating system.
    #[error("cannot write the pid file {path}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Cause of the failure.
        source: io::Error,
    },
}

impl PidFile {
    /// Creates the file at `path`, or takes over one that is not locked.
    ///
    /// # Errors
    /// If another process holds it, or it cannot be written.
    pub fn take(path: &Path) -> Result<Self, Error> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        loop {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let file = options.open(path).map_err(io)?;
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&first_byte())) {
                Ok(_) => {}
                Err(Errno::EAGAIN | Errno::EACCES) => return Err(Error::Locked(path.to_owned())),
                Err(error) => return Err(io(error.into())),
            }
            // The one who had it may have removed it between the opening and the lock.
            if !is_at(&file, path) {
                continue;
            }
            file.set_len(0).map_err(io)?;
            (&file).write_all(format!("{}\n", std::process::id()).as_bytes()).map_err(io)?;
            return Ok(Self { file, path: path.to_owned() });
        }
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        if is_at(&self.file, &self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Returns whether the file at `path` is still this open file.
fn is_at(file: &File, path: &Path) -> bool {
    let same = |file: io::Result<std::fs::Metadata>| file.map(|found| (found.dev(), found.ino())).ok();
    let (ours, there) = (same(file.metadata()), same(std::fs::symlink_metadata(path)));
    ours.is_some() && ours == there
}

#[allow(clippy::cast_possible_truncation, reason = "the constants are small")]
fn first_byte() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 1,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn one_at_a_time_and_gone_in_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pid");
        std::fs::write(&path, "4711 of somebody who was killed\n").unwrap();
        let held = PidFile::take(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        assert!(matches!(PidFile::take(&path), Err(Error::Locked(_))));
        drop(held);
        assert!(!path.exists());
        drop(PidFile::take(&path).unwrap());
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn the_file_of_somebody_else_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pid");
        let held = PidFile::take(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "1\n").unwrap();
        drop(held);
        assert!(path.exists());
    }
}
