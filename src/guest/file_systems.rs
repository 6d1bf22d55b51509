//! File systems on disks: their usage, the disks below them, and trimming.
//!
//! Network file systems are left out, as in qemu-ga: one that hangs would block the caller.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use nix::errno::Errno;

use crate::guest::Guest;
use crate::guest::block_devices::{Device, Error, Finder, Wait};
use crate::sys::block::Number;
use crate::sys::effects::Trimmed;
use crate::sys::mountinfo::{Mount, MountList};
use crate::sys::root::Root;
use crate::sys::usage::{Usage, usage};

const MOUNTS: &str = "/proc/self/mountinfo";

/// Mount of a file system that is on disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// Mount point of the file system.
    pub mount_point: String,
    /// Type of the file system, such as `ext4`.
    pub kind: String,
    /// Block device that the file system is on.
    pub device: Arc<Device>,
    /// Usage, if statvfs(3) succeeds.
    pub usage: Option<Usage>,
}

/// Returns the mounts of file systems on disks, the last mounted first. Blocks for as long as a disk does not
/// answer: a file system need not have its usage, or the path to its mount point, in memory.
///
/// # Errors
/// If the kernel's list of mounts cannot be read.
pub fn list(guest: &Guest) -> Result<Vec<FileSystem>, Error> {
    let mut finder = Finder::new(guest, Wait::Can);
    let mut file_system = |mount: Mount, number: Number| {
        Ok(FileSystem {
            device: finder.find(number)?,
            usage: usage(&guest.root.path_of(&mount.path)).ok(),
            mount_point: mount.mount_point,
            kind: mount.kind,
        })
    };
    let all = mounts(&guest.root)?.into_iter().rev();
    all.filter_map(|mount| number(&guest.root, &mount).map(|number| file_system(mount, number))).collect()
}

/// Result of trimming one file system.
#[derive(Debug)]
pub struct Trim {
    /// Mount point of the file system.
    pub mount_point: String,
    /// Bytes that were trimmed: 0 if another mount of the same file system in this list was trimmed already.
    pub outcome: Result<Trimmed, NotTrimmed>,
}

/// Reason why a file system was not trimmed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotTrimmed {
    /// The file system or its device does not support trimming.
    #[error("trim not supported")]
    Unsupported,
    /// No file system is mounted at the requested mount point.
    #[error("no file system of a disk is mounted there")]
    NotMounted,
    /// Trimming failed, with the message of the system.
    #[error("failed to trim: {0}")]
    Failed(String),
}

/// Trims the unused blocks of all file systems on disks, in ranges of at least `minimum` bytes, one after another.
/// Each file system is trimmed once, even if it is mounted several times. If `mount_points` is not empty, only
/// those mounted there are trimmed. Blocks for as long as the disks take.
///
/// # Errors
/// If the kernel's list of mounts cannot be read.
pub fn trim(guest: &Guest, minimum: u64, mount_points: &[String]) -> Result<Vec<Trim>, Error> {
    let mut done: HashMap<Number, Result<Trimmed, NotTrimmed>> = HashMap::new();
    let mut trims = Vec::new();
    for mount in mounts(&guest.root)? {
        if !mount_points.is_empty() && !mount_points.contains(&mount.mount_point) {
            continue;
        }
        let Some(number) = number(&guest.root, &mount) else { continue };
        let outcome = if let Some(outcome) = done.get(&number) {
            outcome.clone().map(|trimmed| Trimmed { bytes: 0, ..trimmed })
        } else {
            let outcome = guest.effects.trim(&mount.path, minimum);
            let outcome = outcome.map_err(|error| why_not(&error));
            // A failure is not remembered: another mount of the same file system may succeed.
            if !matches!(outcome, Err(NotTrimmed::Failed(_))) {
                done.insert(number, outcome.clone());
            }
            outcome
        };
        trims.push(Trim { mount_point: mount.mount_point, outcome });
    }
    trims.reverse();
    for absent in mount_points {
        if !trims.iter().any(|trim| trim.mount_point == *absent) {
            trims.push(Trim { mount_point: absent.clone(), outcome: Err(NotTrimmed::NotMounted) });
        }
    }
    Ok(trims)
}

fn why_not(error: &io::Error) -> NotTrimmed {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EOPNOTSUPP | Errno::ENOTTY) => NotTrimmed::Unsupported,
        _ => NotTrimmed::Failed(error.to_string()),
    }
}

/// Returns all mounts, in the kernel's order.
fn mounts(root: &Root) -> Result<Vec<Mount>, Error> {
    let mounts = MountList::open(root).and_then(|list| list.read());
    mounts.map_err(|source| Error::Unreadable { path: MOUNTS, source })
}

/// Returns the number of the block device below a mount, or `None` if it is not on a disk. btrfs may span several
/// devices, and the kernel shows no number for it: the device named as the source of the mount is taken.
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
