//! Whether anybody has an image open: what the kernel says of it is a [`Lease`]; and, for file systems where others may have
//! it, the locks that QEMU holds on images (its file driver's `locking`).

use std::fs::File;
use std::io;
use std::thread::sleep;
use std::time::Duration;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use crate::sys::lease::{Denied, Lease};

/// The bytes of an image that QEMU locks to say how it uses it (`RAW_LOCK_PERM_BASE` and `RAW_LOCK_SHARED_BASE` of
/// block/file-posix.c, with room for all permissions).
const LOCKS: std::ops::Range<i64> = 100..300;
/// How often, and after which time, it is looked again at an image that somebody has open.
const AGAIN: usize = 10;
const MOMENT: Duration = Duration::from_millis(20);

/// Whether somebody has an image open.
#[derive(Debug)]
pub enum Use {
    /// Nobody has, and nobody opens it as long as this lives.
    Nobody(Claim),
    /// Somebody has.
    Somebody,
    /// It cannot be told; in words why.
    Untold(String),
}

/// An image that nobody else opens as long as this lives.
#[derive(Debug)]
pub struct Claim {
    _held: Held,
}

/// By what nobody else opens it.
#[derive(Debug)]
enum Held {
    /// By anybody.
    Leased { _lease: Lease },
    /// By a QEMU: it finds these locks, and takes the image for one that another one uses.
    Locked { _image: File },
}

/// Looks whether anybody else has the image open. Blocks.
///
/// # Errors
/// As `open` gives them, which opens the image anew, and as fcntl(2) does.
pub fn look(open: impl Fn() -> io::Result<File>) -> io::Result<Use> {
    // Who has just let go of it, or ends, may have it for some moments more.
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

/// All locks of QEMU, of this type.
fn locks(kind: libc::c_int) -> io::Result<libc::flock> {
    Ok(libc::flock {
        l_type: narrow(kind)?,
        l_whence: narrow(libc::SEEK_SET)?,
        l_start: LOCKS.start,
        l_len: LOCKS.end - LOCKS.start,
        l_pid: 0,
    })
}

/// Whether a QEMU, on whatever machine, says by its locks that it uses the image.
fn is_locked(file: &File) -> io::Result<bool> {
    let mut lock = locks(libc::F_WRLCK)?;
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(lock.l_type != narrow(libc::F_UNLCK)?)
}

/// Takes the locks by which QEMU says that it uses an image in every way and shares it in none. A QEMU takes its own, and looks
/// for those of others after that: so one that has begun to open the image is found here, or finds these.
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

/// Claims the image of a volume that is to be removed, and that nobody is remembered to have. Blocks.
///
/// # Errors
/// As [`look`]; and [`io::ErrorKind::ResourceBusy`] if somebody has it open.
pub fn claim(open: impl Fn() -> io::Result<File>) -> io::Result<Claim> {
    match look(&open)? {
        Use::Nobody(claim) => Ok(claim),
        Use::Somebody => Err(in_use()),
        // Nobody is remembered to have it, which takes proof, and no QEMU says that it has; nor is one to begin to.
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
