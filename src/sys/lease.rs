//! Check that no other process on this machine has a file open: a write lease, fcntl(2) `F_SETLEASE`. The
//! kernel grants it only if there is no other descriptor for the file, in any mount namespace.
//!
//! The check is valid only for file systems that are local to this machine. For one that other machines may
//! use too, the result is unknown.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;

use nix::errno::Errno;
use nix::libc;
use nix::sys::statfs::{
    BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, F2FS_SUPER_MAGIC, FsType, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC,
    XFS_SUPER_MAGIC, fstatfs,
};

/// Command that sets the signal for a lease break (asm-generic/fcntl.h), which is missing in the libc crate.
const F_SETSIG: libc::c_int = 10;
/// The magic number of ZFS (`ZFS_SUPER_MAGIC`).
const ZFS: i64 = 0x2fc1_2fc1;
/// Magic number of bcachefs (`BCACHEFS_STATFS_MAGIC` of linux/magic.h).
const BCACHEFS: i64 = 0xca45_1a4e;

/// Lease on a file that no other process has open. A process that opens it blocks until this value is dropped
/// (but no longer than `/proc/sys/fs/lease-break-time`, 45 s).
#[derive(Debug)]
pub struct Lease {
    file: File,
}

/// Reason why there is no lease.
#[derive(Debug, thiserror::Error)]
pub enum Denied {
    /// File that another process has open.
    #[error("another program has it open")]
    InUse,
    /// Failure to find out whether another process has the file open.
    #[error("cannot tell whether another program has it open: {0}")]
    Untold(io::Error),
}

impl Lease {
    /// Takes a lease on a file for which the caller has only this descriptor.
    ///
    /// # Errors
    /// If another process has it open, or the file system cannot tell; or if this process may not take one: it
    /// needs `CAP_LEASE` for files of other users.
    pub fn take(file: File) -> Result<Self, Denied> {
        let kind = fstatfs(&file).map_err(|errno| Denied::Untold(errno.into()))?.filesystem_type();
        if !is_of_this_machine(kind) {
            let words = "its file system may be used by other machines too";
            return Err(Denied::Untold(io::Error::new(io::ErrorKind::Unsupported, words)));
        }
        // When another process opens the file, the kernel sends a signal to this process. The default, SIGIO, would
        // end the process; the signal that is set here is ignored by default.
        set(&file, F_SETSIG, libc::SIGURG).map_err(Denied::Untold)?;
        match set(&file, libc::F_SETLEASE, libc::F_WRLCK) {
            Ok(()) => Ok(Self { file }),
            Err(error) if error.raw_os_error() == Some(Errno::EAGAIN as i32) => Err(Denied::InUse),
            Err(error) => Err(Denied::Untold(error)),
        }
    }

    /// Returns the file, which stays open for as long as the lease.
    pub fn file(&self) -> &File {
        &self.file
    }
}

fn is_of_this_machine(kind: FsType) -> bool {
    let named = [
        BTRFS_SUPER_MAGIC,
        EXT4_SUPER_MAGIC,
        F2FS_SUPER_MAGIC,
        OVERLAYFS_SUPER_MAGIC,
        TMPFS_MAGIC,
        XFS_SUPER_MAGIC,
    ];
    named.contains(&kind) || [FsType(ZFS), FsType(BCACHEFS)].contains(&kind)
}

fn set(file: &File, command: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: both commands take an int and no pointer, and the descriptor is open.
    Errno::result(unsafe { libc::fcntl(file.as_raw_fd(), command, value) })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn it_is_given_only_while_nobody_else_has_the_file_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        File::create(&path).unwrap();
        for write in [false, true] {
            let other = OpenOptions::new().read(true).write(write).open(&path).unwrap();
            assert!(matches!(Lease::take(File::open(&path).unwrap()), Err(Denied::InUse)), "{write}");
            drop(other);
            Lease::take(File::open(&path).unwrap()).unwrap();
        }
        // The same holds for a file whose name was removed.
        let other = File::open(&path).unwrap();
        let own = File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Lease::take(own), Err(Denied::InUse)));
        drop(other);
    }

    #[test]
    fn who_opens_the_file_waits_and_this_process_lives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let lease = Lease::take(File::create(&path).unwrap()).unwrap();
        let (told, tell) = mpsc::channel();
        let opening = std::thread::Builder::new().spawn(move || {
            drop(File::open(path).unwrap());
            told.send(()).unwrap();
        });
        assert!(tell.recv_timeout(Duration::from_millis(300)).is_err(), "it waits");
        assert_eq!(lease.file().metadata().unwrap().len(), 0);
        drop(lease);
        tell.recv().unwrap();
        opening.unwrap().join().unwrap();
    }

    #[test]
    fn of_a_file_system_of_others_nothing_is_said() {
        let file = File::open("/proc/self/stat").unwrap();
        assert!(matches!(Lease::take(file), Err(Denied::Untold(_))));
    }
}
