//! Finds the uses of a disk: mounts, swap space, and devices built on it.

use std::collections::BTreeMap;
use std::fmt;

use crate::guest::disks::identity::{Holder, KnownDisk};
use crate::sys::block::{self, Number};
use crate::sys::block_stack::btrfs_disks;
use crate::sys::root::Root;
use crate::sys::{mountinfo, swaps};

/// Limit on the depth of stacked devices; deeper ones are left out.
const MAX_DEPTH: usize = 16;
/// Limit on the uses that are reported.
const MOST: usize = 64;

/// Use of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Use {
    /// The disk, a part of it, or a device built on it is mounted at this mount point.
    Mounted(String),
    /// Bind mount of its device node at this path, as in pods that use it as a block device.
    Bound(String),
    /// Swap space on this device.
    Swap(String),
    /// Device that is built on the disk.
    Holder(String),
}

impl fmt::Display for Use {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted(place) | Self::Bound(place) => formatter.write_str(place),
            Self::Swap(device) => write!(formatter, "swap on {device}"),
            Self::Holder(device) => formatter.write_str(device),
        }
    }
}

/// Returns the uses of `disk`. The disk may have disappeared already: mounts outlive it.
pub fn of(root: &Root, disk: &KnownDisk) -> Vec<Use> {
    let mut devices: BTreeMap<Number, String> = [(disk.number, disk.name.clone())].into();
    devices.extend(disk.partitions.iter().map(|partition| (partition.number, partition.name.clone())));
    let mut aliases = Vec::new();
    let mut uses = Vec::new();
    for Holder { name, number, alias, .. } in &disk.holders {
        uses.push(Use::Holder(match alias {
            Some(alias) => format!("{name} ({alias})"),
            None => name.clone(),
        }));
        aliases.extend(alias.iter().map(|alias| format!("/dev/mapper/{alias}")));
        devices.extend(number.map(|number| (number, name.clone())));
        above(root, name, MAX_DEPTH, &mut devices, &mut aliases);
    }
    let is_file = |path: &str| {
        devices.values().any(|name| block::file(name) == path) || aliases.iter().any(|alias| alias == path)
    };
    let mounts = root.read("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mountinfo::parse(&mounts);
    let is_its_file = |mount: &mountinfo::Mount| {
        let name = mount.root.strip_prefix('/').filter(|_| mount.kind == "devtmpfs");
        name.is_some_and(|name| devices.values().any(|device| device == name))
    };
    let bound = mounts.iter().filter(|mount| is_its_file(mount));
    let bound: Vec<_> = bound.map(|mount| Use::Bound(mount.mount_point.clone())).collect();
    // A btrfs has a device number of its own, and is also on disks other than the one that it was mounted from,
    // which may have disappeared.
    let is_of_source = |mount: &mountinfo::Mount| {
        let is_disk = |disk: &Number| devices.contains_key(disk);
        mount.device.0 == 0 && is_file(&mount.source)
            || mount.btrfs_source().is_some_and(|source| btrfs_disks(root, source).iter().any(is_disk))
    };
    let mut mounted: Vec<_> = mounts
        .into_iter()
        .filter(|mount| devices.contains_key(&mount.device) || is_of_source(mount))
        .map(|mount| Use::Mounted(mount.mount_point))
        .collect();
    let swaps = swaps::devices(root).unwrap_or_default();
    mounted.extend(swaps.into_iter().filter(|file| is_file(file)).map(Use::Swap));
    mounted.extend(bound);
    mounted.append(&mut uses);
    mounted.truncate(MOST);
    mounted
}

/// Collects the devices that are built on the device `name`, directly or indirectly.
fn above(
    root: &Root,
    name: &str,
    depth: usize,
    devices: &mut BTreeMap<Number, String>,
    aliases: &mut Vec<String>,
) {
    let Some(depth) = depth.checked_sub(1) else { return };
    for holder in block::holders(root, &format!("/sys/class/block/{name}")) {
        let place = format!("/sys/class/block/{holder}");
        let alias = root.line(&format!("{place}/dm/name"));
        if !alias.is_empty() {
            aliases.push(format!("/dev/mapper/{alias}"));
        }
        if let Some(number) = block::number(root, &place)
            && devices.insert(number, holder.clone()).is_none()
        {
            above(root, &holder, depth, devices, aliases);
        }
    }
}
