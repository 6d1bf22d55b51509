//! File systems that are on disks: how full they are, on which disks, and trimming them.
//!
//! Those of other machines are left out, as qemu-ga does: one that hangs would hang who asks for them.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;

use crate::guest::Guest;
use crate::guest::disks::{Device, Error, Finder, Wait};
use crate::sys::block::Number;
use crate::sys::effects::Trimmed;
use crate::sys::mountinfo::{Mount, MountList};
use crate::sys::root::Root;
use crate::sys::usage::{Usage, usage};

const MOUNTS: &str = "/proc/self/mountinfo";

/// A mount of a file system that is on disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// Where it is mounted.
    pub mount_point: String,
    /// Such as `ext4`.
    pub kind: String,
    /// What it is on.
    pub device: Arc<Device>,
    /// How full it is, if that can be told.
    pub usage: Option<Usage>,
}

/// The mounts of file systems that are on disks, the last mounted first.
///
/// # Errors
/// If the kernel's list of mounts cannot be read, or if it must be [waited](Wait).
pub fn list(guest: &Guest, wait: Wait) -> Result<Vec<FileSystem>, Error> {
    let all = mounts(&guest.root)?;
    let slow = slow_places(&all);
    let chosen: Vec<_> = all.iter().filter_map(|mount| Some((mount, number(&guest.root, mount)?))).collect();
    if wait == Wait::Cannot && (chosen.len() > MANY || chosen.iter().any(|(mount, _)| may_wait(mount, &slow)))
    {
        return Err(Error::MustWait);
    }
    let mut finder = Finder::new(guest, wait);
    let file_system = |(mount, number): (&Mount, Number)| {
        Ok(FileSystem {
            device: finder.find(number)?,
            usage: usage(&guest.root.path_of(&mount.path)).ok(),
            mount_point: mount.mount_point.clone(),
            kind: mount.kind.clone(),
        })
    };
    chosen.into_iter().rev().map(file_system).collect()
}

/// File systems that answer out of memory how full they are.
const QUICK: &[&str] = &[
    "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "ntfs3", "squashfs", "udf", "vfat",
    "xfs",
];

/// Others that a path leads through without waiting for anything.
const IN_MEMORY: &[&str] = &[
    "bpf",
    "cgroup",
    "cgroup2",
    "devpts",
    "devtmpfs",
    "hugetlbfs",
    "mqueue",
    "proc",
    "ramfs",
    "rootfs",
    "sysfs",
    "tmpfs",
];

/// So many mounts that they are not listed in passing: more than 1 ms of work.
const MANY: usize = 64;

/// Mount points of network file systems, of programs' own and of whatever is not known.
fn slow_places(mounts: &[Mount]) -> Vec<&Path> {
    let slow = |mount: &&Mount| {
        let kind = mount.kind.as_str();
        !QUICK.contains(&kind) && !IN_MEMORY.contains(&kind)
    };
    mounts.iter().filter(slow).map(|mount| mount.path.as_path()).collect()
}

/// Whether it may have to be waited for how full a file system is: for itself, or for those on the way to it.
fn may_wait(mount: &Mount, slow: &[&Path]) -> bool {
    let place = mount.path.as_path();
    !QUICK.contains(&mount.kind.as_str()) || slow.iter().any(|slow| place.starts_with(slow))
}

/// What became of a file system that was to be trimmed.
#[derive(Debug)]
pub struct Trim {
    /// Where it is mounted.
    pub mount_point: String,
    /// What was given back; nothing if it was trimmed already by another mount of this list.
    pub outcome: Result<Trimmed, NotTrimmed>,
}

/// Why a file system was not trimmed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotTrimmed {
    /// It cannot be.
    #[error("trim not supported")]
    Unsupported,
    /// The file system's or the disk's words.
    #[error("failed to trim: {0}")]
    Failed(String),
}

/// Gives the unused blocks of all file systems on disks back, in ranges of at least `minimum` bytes: one after the
/// other, each file system once, wherever else it is mounted. Blocks for as long as the disks take.
///
/// # Errors
/// If the kernel's list of mounts cannot be read.
pub fn trim(guest: &Guest, minimum: u64) -> Result<Vec<Trim>, Error> {
    let mut done: HashMap<Number, Result<Trimmed, NotTrimmed>> = HashMap::new();
    let mut trims = Vec::new();
    for mount in mounts(&guest.root)? {
        let Some(number) = number(&guest.root, &mount) else { continue };
        let outcome = if let Some(outcome) = done.get(&number) {
            outcome.clone().map(|trimmed| Trimmed { bytes: 0, ..trimmed })
        } else {
            let outcome = guest.effects.trim(&mount.path, minimum);
            let outcome = outcome.map_err(|error| why_not(&error));
            // Another mount may be reached where this one cannot.
            if !matches!(outcome, Err(NotTrimmed::Failed(_))) {
                done.insert(number, outcome.clone());
            }
            outcome
        };
        trims.push(Trim { mount_point: mount.mount_point, outcome });
    }
    trims.reverse();
    Ok(trims)
}

fn why_not(error: &io::Error) -> NotTrimmed {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EOPNOTSUPP | Errno::ENOTTY) => NotTrimmed::Unsupported,
        _ => NotTrimmed::Failed(error.to_string()),
    }
}

/// All mounts, in the kernel's order.
fn mounts(root: &Root) -> Result<Vec<Mount>, Error> {
    let mounts = MountList::open(root).and_then(|list| list.read());
    mounts.map_err(|source| Error::Unreadable { path: MOUNTS, source })
}

/// The number of the block device that a mount is of; none if it is of nothing that is on disks. btrfs may be on several, and tells none: it is the one that
/// was named when it was mounted.
fn number(root: &Root, mount: &Mount) -> Option<Number> {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};

    if mount.device.0 != 0 {
        return Some(mount.device);
    }
    if mount.kind != "btrfs" {
        return None;
    }
    let file = std::fs::metadata(root.path(&mount.source)).ok()?;
    let number = || {
        let number = file.rdev();
        Some((nix::sys::stat::major(number).try_into().ok()?, nix::sys::stat::minor(number).try_into().ok()?))
    };
    file.file_type().is_block_device().then(number).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mountinfo;

    #[test]
    fn what_is_behind_something_slow_is_waited_for() {
        let mounts = mountinfo::parse(
            b"27 1 254:1 / / rw - ext4 /dev/vda1 rw\n28 27 0:25 / /run rw - tmpfs tmpfs rw\n\
            29 27 0:60 / /mnt/nfs rw - nfs4 server:/ rw\n30 29 8:1 / /mnt/nfs/a rw - xfs /dev/sda1 rw\n\
            31 27 8:2 / /mnt/nfs2 rw - xfs /dev/sda2 rw\n32 27 0:61 / /boot rw - autofs systemd-1 rw\n\
            33 32 8:3 / /boot rw - vfat /dev/sda3 rw\n34 27 8:4 / /windows rw - fuseblk /dev/sda4 rw\n\
            35 28 8:5 / /run/a rw - ext4 /dev/sda5 rw\n",
        );
        let slow = slow_places(&mounts);
        let waited: Vec<_> = mounts
            .iter()
            .filter(|mount| mount.device.0 != 0 && may_wait(mount, &slow))
            .map(|mount| mount.mount_point.as_str())
            .collect();
        assert_eq!(waited, ["/mnt/nfs/a", "/boot", "/windows"]);
    }
}
