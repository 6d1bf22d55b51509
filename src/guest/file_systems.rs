//! File systems that are on disks: how full they are, on which disks, and trimming them.
//!
//! Those of other machines are left out, as qemu-ga does: one that hangs would hang who asks for them.

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

/// The mounts of file systems that are on disks, the last mounted first. Blocks for as long as a disk does not answer: no
/// file system has promised to know out of memory how full it is, nor what is on the way to its mount point.
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
    /// Asked for by its mount point, and not there.
    #[error("no file system of a disk is mounted there")]
    NotMounted,
    /// The file system's or the disk's words.
    #[error("failed to trim: {0}")]
    Failed(String),
}

/// Gives the unused blocks of all file systems on disks back, in ranges of at least `minimum` bytes: one after the
/// other, each file system once, wherever else it is mounted; of those mounted at `mount_points` only, if there are any. Blocks
/// for as long as the disks take.
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
            // Another mount may be reached where this one cannot.
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
