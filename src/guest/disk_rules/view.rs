//! Collects the input of the decisions: mounts, disks of the system itself, and disks that have disappeared.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use crate::guest::disk_rules::made::{Kept, Made};
use crate::guest::disk_rules::plan::{Seen, View};
use crate::guest::disks::identity::KnownDisk;
use crate::sys::block::{self, Number};
use crate::sys::block_stack::{BlockStack, btrfs_disks};
use crate::sys::mountinfo::{Mount, MountList};
use crate::sys::root::Root;
use crate::sys::swaps;

/// Mount points whose disks are never touched.
const SYSTEM: &[&str] = &["/", "/boot", "/boot/efi", "/usr"];

/// Returns the present state, without labels. Blocks, but not on disks.
///
/// # Errors
/// If the list of mounts or of swap spaces cannot be read.
pub(super) fn view(root: &Root, disks: &[Arc<KnownDisk>], kept: Kept) -> io::Result<View> {
    let mounts = MountList::open(root)?.read()?;
    let numbers = system(root, &mounts);
    let is_system = |disk: &&Arc<KnownDisk>| {
        let parts = disk.partitions.iter().map(|partition| partition.number);
        std::iter::once(disk.number).chain(parts).any(|number| numbers.contains(&number))
    };
    let swaps = swaps::devices(root)?;
    let seen = |made: Made| Seen {
        standing: made.standing(&mounts, &swaps),
        gone: block::generation(root, &made.disk.place) != Some(made.disk.generation),
        made,
    };
    Ok(View {
        system: disks.iter().filter(is_system).map(|disk| disk.generation).collect(),
        disks: disks.to_vec(),
        made: kept.made.into_iter().map(seen).collect(),
        released: kept.released.iter().map(|disk| disk.generation).collect(),
        ..View::default()
    })
}

/// Returns the numbers of all devices that the system itself is on.
fn system(root: &Root, mounts: &[Mount]) -> BTreeSet<Number> {
    let mut numbers = BTreeSet::new();
    let mut from: Vec<Number> = Vec::new();
    for mount in mounts.iter().filter(|mount| SYSTEM.contains(&mount.mount_point.as_str())) {
        if mount.device.0 != 0 {
            from.push(mount.device);
        } else if let Some(source) = mount.btrfs_source() {
            from.extend(btrfs_disks(root, source));
        }
    }
    // The backing file of a loop device is on a disk as well.
    while !from.is_empty() {
        let stack = BlockStack::read(root, std::mem::take(&mut from));
        for (number, device) in stack.devices {
            let behind = device.file.and_then(|file| file.device).filter(|behind| behind.0 != 0);
            if numbers.insert(number) {
                from.extend(behind);
            }
        }
    }
    numbers
}
