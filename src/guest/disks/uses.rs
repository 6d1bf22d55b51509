//! What a disk is used for: what is mounted from it, swap space on it, what is made of it.

use std::collections::BTreeMap;
use std::fmt;

use crate::guest::disks::identity::{Holder, KnownDisk};
use crate::sys::block::{self, Number};
use crate::sys::block_stack::btrfs_disks;
use crate::sys::root::Root;
use crate::sys::{mountinfo, swaps};

/// How deep devices may be stacked; deeper ones are left out.
const MAX_DEPTH: usize = 16;
/// Uses that are told.
const MOST: usize = 64;

/// One use of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Use {
    /// It, a part of it, or what is made of it is mounted there.
    Mounted(String),
    /// Its file is bound to this place, as pods have it that use it as a device.
    Bound(String),
    /// Swap space is on this device.
    Swap(String),
    /// This device is made of it.
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

/// The uses of `disk`, which may be gone already: mounts outlive it.
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
    // A btrfs has a number of its own, and is on others of its disks, too, than the one that it was mounted from, which
    // may be gone.
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

/// What is made of the device called `name`, and of that.
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
