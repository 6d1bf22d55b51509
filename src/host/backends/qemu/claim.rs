//! Determines whether an image is open in any process: by a kernel lease ([`Lease`]) and, on file systems that
//! other machines may use too, by the locks that QEMU holds on images (the `locking` option of its file
//! driver).

use std::fs::File;
use std::io;
use std::thread::sleep;
use std::time::Duration;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::sys::lease::{Denied, Lease};

/// Byte range of an image that QEMU locks to announce its use of the image (`RAW_LOCK_PERM_BASE` and
/// `RAW_LOCK_SHARED_BASE` of block/file-posix.c, with room for all permissions).
const LOCKS: std::ops::Range<i64> = 100..300;
/// Number of further checks of an image that is open, and the interval between them.
const AGAIN: usize = 10;
const MOMENT: Duration = Duration::from_millis(20);

/// Use of an image.
#[derive(Debug)]
pub enum Use {
    /// No process has it open, and none can open it while the claim lives.
    Nobody(Claim),
    /// A process has it open.
    Somebody,
    /// The use cannot be determined; the text is the reason.
    Untold(String),
}

/// Claim on an image that no other process opens as long as this lives.
#[derive(Debug)]
pub struct Claim {
    _held: Held,
}

/// Means by which the claim keeps the image from being opened.
#[derive(Debug)]
enum Held {
    /// Lease of the kernel, which holds off every process.
    Leased { _lease: Lease },
    /// QEMU's own locks: another QEMU finds them, and treats the image as in use.
    Locked { _image: File },
}

/// Determines whether any other process has the image open. Blocks.
///
/// # Errors
/// Those of `open`, which opens the image anew, and of fcntl(2).
pub fn look(open: impl Fn() -> io::Result<File>) -> io::Result<Use> {
    // A process that has just closed it, or is ending, may still hold it for a moment.
    for _ in 0..AGAIN {
        match look_once(open()?)? {
            Use::Somebody => sleep(MOMENT),
            found => return Ok(found),
        }
    }
    look_once(open()?)
}

fn look_once(image: File) -> io::Result<Use> {
    if is_locked(&image)? {
        return Ok(Use::Somebody);
    }
    Ok(match Lease::take(image) {
        Ok(lease) => Use::Nobody(Claim { _held: Held::Leased { _lease: lease } }),
        Err(Denied::InUse) => Use::Somebody,
        Err(denied @ Denied::Untold(_)) => Use::Untold(denied.to_string()),
    })
}

fn narrow(constant: libc::c_int) -> io::Result<libc::c_short> {
    libc::c_short::try_from(constant).map_err(io::Error::other)
}

/// Returns a lock request of this type that covers all of QEMU's lock bytes.
fn locks(kind: libc::c_int) -> io::Result<libc::flock> {
    Ok(libc::flock {
        l_type: narrow(kind)?,
        l_whence: narrow(libc::SEEK_SET)?,
        l_start: LOCKS.start,
        l_len: LOCKS.end - LOCKS.start,
        l_pid: 0,
    })
}

/// Reports whether the locks show that a QEMU, on whatever machine, uses the image.
fn is_locked(file: &File) -> io::Result<bool> {
    let mut lock = locks(libc::F_WRLCK)?;
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(lock.l_type != narrow(libc::F_UNLCK)?)
}

/// Takes the locks of a QEMU that uses the image in every way and shares it in none. A QEMU first takes its own
/// locks and then checks for those of others. So a QEMU that is opening the image is either detected here, or
/// detects these locks.
fn lock(image: File) -> io::Result<Claim> {
    fcntl(&image, FcntlArg::F_OFD_SETLK(&locks(libc::F_RDLCK)?))?;
    if is_locked(&image)? {
        return Err(in_use());
    }
    Ok(Claim { _held: Held::Locked { _image: image } })
}

fn in_use() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "it is open in another program")
}

/// Claims the image of a volume that is to be removed and has no VM on record. Blocks.
///
/// # Errors
/// Those of [`look`]; and [`io::ErrorKind::ResourceBusy`] if any process has it open.
pub fn claim(open: impl Fn() -> io::Result<File>) -> io::Result<Claim> {
    match look(&open)? {
        Use::Nobody(claim) => Ok(claim),
        Use::Somebody => Err(in_use()),
        // The caller has proof that no VM is on record for it, and no QEMU holds its locks; keep any from starting to
        // use it.
        Use::Untold(_) => lock(open()?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_somebody_has_open_is_not_claimed() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("a.raw");
        let open = || File::open(&image);
        assert_eq!(claim(open).unwrap_err().kind(), io::ErrorKind::NotFound);
        let other = File::create(&image).unwrap();
        assert_eq!(claim(open).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(other);
        let claim = claim(open).unwrap();
        std::fs::remove_file(&image).unwrap();
        drop(claim);
    }

    #[test]
    fn an_image_of_which_the_kernel_cannot_tell_is_kept_from_every_qemu() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("a.raw");
        drop(File::create(&image).unwrap());
        let open = || File::open(&image).unwrap();
        let claim = lock(open()).unwrap();
        assert!(is_locked(&open()).unwrap(), "another one sees it");
        drop(claim);
        assert!(!is_locked(&open()).unwrap());
        let other = open();
        fcntl(&other, FcntlArg::F_OFD_SETLK(&locks(libc::F_RDLCK).unwrap())).unwrap();
        assert_eq!(lock(open()).unwrap_err().kind(), io::ErrorKind::ResourceBusy, "it was there first");
    }

    #[test]
    fn the_locks_of_qemu_are_seen() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("a.raw");
        let holder = File::create(&image).unwrap();
        let other = File::open(&image).unwrap();
        assert!(!is_locked(&other).unwrap());
        let lock = libc::flock {
            l_type: libc::c_short::try_from(libc::F_RDLCK).unwrap(),
            l_whence: libc::c_short::try_from(libc::SEEK_SET).unwrap(),
            l_start: 203,
            l_len: 1,
            l_pid: 0,
        };
        let readable = File::open(&image).unwrap();
        fcntl(&readable, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
        assert!(is_locked(&other).unwrap());
        drop((holder, readable));
        assert!(!is_locked(&other).unwrap());
    }
}
