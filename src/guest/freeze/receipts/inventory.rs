//! Lists what a freeze covers, and what it does not cover and why, as entries of a receipt. All of it is read
//! before anything is frozen.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::guest::disks::identity::KnownDisk;
use crate::guest::freeze::plan::counts;
use crate::guest::freeze::targets::Target;
use crate::receipt::{Disk, MOST_LISTED, NotFrozen, Volume};
use crate::sys::block_stack::{BlockStack, Device};
use crate::sys::mountinfo::Mount;
use crate::sys::root::Root;
use crate::sys::udev;

/// Limit on the disks of one file system.
const MOST_DISKS: usize = 16;
/// File systems of other kinds that are worth an entry, as people may keep data on them. (All others without a
/// disk belong to the kernel.)
const ELSEWHERE: &[&str] = &[
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "glusterfs",
    "gpfs",
    "lustre",
    "ncpfs",
    "nfs",
    "nfs4",
    "ocfs2",
    "orangefs",
    "smb3",
    "smbfs",
    "virtiofs",
];

/// Lists of what is frozen, in the order of the targets, and of what is not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Entries of the targets, in their order.
    pub volumes: Vec<Volume>,
    /// Entries of the mounts that are not frozen.
    pub not_frozen: Vec<NotFrozen>,
    /// Number of further mounts without an entry.
    pub left_out: u64,
}

/// Describes the targets, and the mounts that are not among them. `is_choice` says that the caller has named the
/// mount points.
pub fn of(
    root: &Root,
    mounts: &[Mount],
    disks: &[Arc<KnownDisk>],
    targets: &[Arc<Target>],
    is_choice: bool,
) -> Inventory {
    let mut stack =
        BlockStack::read(root, mounts.iter().map(|mount| mount.device).filter(|device| device.0 != 0));
    for mount in mounts.iter().filter(|mount| mount.device.0 == 0 && counts(mount)) {
        stack.add_btrfs(root, mount.device, &mount.source);
    }
    let volume = |target: &Arc<Target>| {
        let mount = mounts.iter().rev().find(|mount| mount.device == target.device);
        let below = below(target.device, &stack);
        Volume {
            mount_point: target.mount_point.clone(),
            kind: mount.map(|mount| mount.kind.clone()).unwrap_or_default(),
            source: mount.map(|mount| mount.source.clone()).unwrap_or_default(),
            device: format!("{}:{}", target.device.0, target.device.1),
            uuid: uuid(root, target.device, &stack),
            disks: disks
                .iter()
                .filter(|disk| below.contains(&disk.number))
                .take(MOST_DISKS)
                .map(|disk| self::disk(disk))
                .collect(),
            ..Volume::default()
        }
    };
    let mut inventory = Inventory { volumes: targets.iter().map(volume).collect(), ..Inventory::default() };
    let mut seen: BTreeSet<Device> = targets.iter().map(|target| target.device).collect();
    for mount in mounts.iter().rev() {
        if !seen.insert(mount.device) {
            continue;
        }
        // Prefer a mount of the whole file system to one of a directory in it.
        let of_it = |other: &&Mount| other.device == mount.device && other.root == "/";
        let mount = mounts.iter().rev().find(of_it).unwrap_or(mount);
        let Some(reason) = why_not(mount, is_choice) else { continue };
        if inventory.not_frozen.len() == MOST_LISTED {
            inventory.left_out += 1;
            continue;
        }
        inventory.not_frozen.push(NotFrozen {
            mount_point: mount.mount_point.clone(),
            kind: mount.kind.clone(),
            reason,
            is_held: false,
        });
    }
    inventory
}

/// Returns why a mount is not a target; none if nobody keeps data there.
fn why_not(mount: &Mount, is_choice: bool) -> Option<String> {
    let reason = match mount.kind.as_str() {
        _ if counts(mount) && is_choice => "not requested",
        _ if counts(mount) => "hidden by another mount",
        "zfs" => "zfs cannot be frozen",
        kind if ELSEWHERE.contains(&kind) => "on a server or on the host, not on a disk of this guest",
        kind if kind == "fuse" || kind.starts_with("fuse.") => "a program serves it (FUSE)",
        _ => return None,
    };
    Some(reason.to_owned())
}

fn disk(disk: &KnownDisk) -> Disk {
    let serial = disk.serial().map(|serial| String::from_utf8_lossy(&serial.value).into_owned());
    Disk { file: disk.file.clone(), serial: serial.unwrap_or_default() }
}

/// Returns the devices that a file system is stored on, and those below them.
fn below(device: Device, stack: &BlockStack) -> BTreeSet<Device> {
    let mut found = BTreeSet::new();
    let mut next = stack.disks.get(&device).cloned().unwrap_or_default();
    next.push(device);
    while let Some(device) = next.pop() {
        if found.insert(device) {
            next.extend(stack.devices.get(&device).into_iter().flat_map(|block| block.below.iter().copied()));
        }
    }
    found
}

/// Returns the UUID of a file system, as known to udev.
fn uuid(root: &Root, device: Device, stack: &BlockStack) -> String {
    // btrfs has a device number of its own; its disks have the UUID.
    let own = if device.0 == 0 {
        stack.disks.get(&device).and_then(|disks| disks.first().copied())
    } else {
        Some(device)
    };
    let entry = own.and_then(|device| udev::block_device(root, device)).unwrap_or_default();
    udev::property(&entry, "ID_FS_UUID").unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(device: Device, kind: &str, point: &str) -> Mount {
        Mount {
            id: 1,
            device,
            root: "/".to_owned(),
            mount_point: point.to_owned(),
            path: point.into(),
            kind: kind.to_owned(),
            source: "x".to_owned(),
            options: "rw".to_owned(),
            flags: "rw".to_owned(),
        }
    }

    #[test]
    fn what_is_not_frozen_has_its_reason() {
        let mounts = [
            mount((254, 1), "ext4", "/"),
            mount((0, 5), "proc", "/proc"),
            mount((0, 6), "tmpfs", "/run"),
            mount((0, 7), "nfs4", "/home"),
            mount((0, 8), "fuse.sshfs", "/far"),
            mount((0, 9), "zfs", "/tank"),
        ];
        let root = Root::at(std::path::Path::new("/nowhere"));
        let found = |is_choice| {
            let found = of(&root, &mounts, &[], &[], is_choice).not_frozen.into_iter();
            found.map(|one| format!("{} {}", one.mount_point, one.reason)).collect::<Vec<_>>().join("; ")
        };
        assert_eq!(
            found(true),
            "/tank zfs cannot be frozen; /far a program serves it (FUSE); /home on a server or on the host, \
             not on a disk of this guest; / not requested"
        );
        assert!(found(false).ends_with("/ hidden by another mount"));
    }
}
