//! What a disk is used for: what is mounted from it, swap space on it, what is made of it.

use std::collections::BTreeMap;
use std::fmt;

use crate::guest::disks::identity::{Holder, KnownDisk};
use crate::sys::block::{self, Number};
use crate::sys::mountinfo;
use crate::sys::root::Root;

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
    let mut mounted: Vec<_> = mounts
        .into_iter()
        // btrfs has a number of its own, and says which of its disks it was mounted from.
        .filter(|mount| devices.contains_key(&mount.device) || mount.device.0 == 0 && is_file(&mount.source))
        .map(|mount| Use::Mounted(mount.mount_point))
        .collect();
    let swaps = root.read("/proc/swaps").unwrap_or_default();
    let swaps = String::from_utf8_lossy(&swaps);
    let first_words = swaps.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().next());
    mounted.extend(first_words.filter(|file| is_file(file)).map(|file| Use::Swap(file.to_owned())));
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
