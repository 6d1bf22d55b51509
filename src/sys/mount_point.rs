//! Opens what is mounted at a path: that mount, and no other one.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open as open_path};
use nix::sys::stat::{Mode, SFlag, fstat};

use crate::sys::mountinfo::Mount;
use crate::sys::root::Root;

/// Opens the directory or file at which `mount` is mounted. This has no effect on running programs, nor on a
/// device, pipe or socket that is mounted there.
///
/// # Errors
/// `ESTALE` if another mount hides this one, or it was unmounted; `EINVAL` if it is neither a directory nor a
/// regular file; the errors of open(2).
pub fn open(mount: &Mount) -> io::Result<OwnedFd> {
    let path = mount.path.as_path();
    // A look first: to open a device can do something to it.
    let found = open_path(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let kind = SFlag::from_bits_truncate(fstat(&found)?.st_mode) & SFlag::S_IFMT;
    if kind != SFlag::S_IFDIR && kind != SFlag::S_IFREG {
        return Err(Errno::EINVAL.into());
    }
    if mount_id(&found)? != mount.id {
        return Err(Errno::ESTALE.into());
    }
    let itself = format!("/proc/self/fd/{}", found.as_raw_fd());
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    // Reading through the descriptor would update the access time; where this is permitted, `O_NOATIME` avoids
    // that write.
    match open_path(itself.as_str(), flags | OFlag::O_NOATIME, Mode::empty()) {
        Err(Errno::EPERM) => Ok(open_path(itself.as_str(), flags, Mode::empty())?),
        opened => Ok(opened?),
    }
}

/// The number of the mount that an open file is on, `proc_pid_fdinfo(5)`.
///
/// # Errors
/// If the kernel does not say it.
pub fn mount_id(file: &OwnedFd) -> io::Result<u64> {
    let text = Root::default().read(&format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let text = String::from_utf8_lossy(&text);
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    id.ok_or_else(|| io::Error::other("the kernel does not report which mount an open file is on"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mountinfo::MountList;

    #[test]
    fn a_mount_is_opened_and_what_is_not_there_is_not() {
        let mounts = MountList::open(&Root::default()).unwrap().read().unwrap();
        // The last one at its place, which hides those before it.
        let proc = mounts.iter().rfind(|mount| mount.mount_point == "/proc").unwrap();
        open(proc).unwrap();
        let other = Mount { id: proc.id + 1_000_000, ..proc.clone() };
        assert_eq!(open(&other).unwrap_err().raw_os_error(), Some(Errno::ESTALE as i32));
        let device = Mount { path: "/dev/null".into(), ..proc.clone() };
        assert_eq!(open(&device).unwrap_err().raw_os_error(), Some(Errno::EINVAL as i32));
        let missing = Mount { path: "/proc/nothing".into(), ..proc.clone() };
        assert_eq!(open(&missing).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
