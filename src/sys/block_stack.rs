//! Layers of block devices, as the kernel shows them in /sys: partitions, device mapper (LVM, LUKS), md,
//! bcache, loop devices, and the disks of a btrfs file system.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use crate::sys::mountinfo::Mount;
use crate::sys::root::Root;

/// Major and minor number.
pub type Device = (u32, u32);

/// Requested devices, and all devices below them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockStack {
    /// Each device, with the devices right below it.
    pub devices: BTreeMap<Device, Block>,
    /// The disks of each file system that has a number of its own (major 0), as btrfs does.
    pub disks: BTreeMap<Device, Vec<Device>>,
}

/// One device of the stack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Block {
    /// The devices right below it.
    pub below: Vec<Device>,
    /// Backing file, for a loop device only.
    pub file: Option<BackingFile>,
}

/// The file behind a loop device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingFile {
    /// The number of the file system that it is on; absent if the kernel does not tell.
    pub device: Option<Device>,
    /// Path as seen from this mount namespace.
    pub path: String,
}

/// The longest chain of devices; the kernel's own limits are lower.
const DEEPEST: usize = 64;

impl BlockStack {
    /// Reads what `devices` are made of, and what that is made of.
    pub fn read(root: &Root, devices: impl IntoIterator<Item = Device>) -> Self {
        let mut stack = Self::default();
        for device in devices {
            stack.add(root, device, 0);
        }
        stack
    }

    /// Adds the disks of a btrfs file system with the number `device`, one of which is `source`, such as `/dev/vdb`.
    pub fn add_btrfs(&mut self, root: &Root, device: Device, source: &str) {
        let disks = btrfs_disks(root, source);
        for disk in &disks {
            self.add(root, *disk, 0);
        }
        self.disks.insert(device, disks);
    }

    fn add(&mut self, root: &Root, device: Device, depth: usize) {
        if depth > DEEPEST || self.devices.contains_key(&device) {
            return;
        }
        let (major, minor) = device;
        let folder = format!("/sys/dev/block/{major}:{minor}");
        let mut below = entries(&root.path(&format!("{folder}/slaves")))
            .iter()
            .filter_map(|name| number(root, &format!("{folder}/slaves/{name}/dev")))
            .collect::<Vec<_>>();
        if !root.line(&format!("{folder}/partition")).is_empty() {
            below.extend(number(root, &format!("{folder}/../dev")));
        }
        let path = root.line(&format!("{folder}/loop/backing_file"));
        let file = (!path.is_empty()).then(|| BackingFile {
            device: loop_file_system(root, &folder),
            path: path.strip_suffix(" (deleted)").unwrap_or(&path).to_owned(),
        });
        self.devices.insert(device, Block { below: below.clone(), file });
        for lower in below {
            self.add(root, lower, depth + 1);
        }
    }
}

/// A file that holds `major:minor`.
fn number(root: &Root, path: &str) -> Option<Device> {
    let line = root.line(path);
    let (major, minor) = line.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn entries(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// Returns whether the mounted file system is on the device, or for btrfs has the device as one of its disks.
pub fn is_on(root: &Root, mount: &Mount, device: Device) -> bool {
    mount.device == device
        || mount.btrfs_source().is_some_and(|source| btrfs_disks(root, source).contains(&device))
}

/// The disks of the btrfs file system that was mounted from `source`, which is one of them.
pub fn btrfs_disks(root: &Root, source: &str) -> Vec<Device> {
    // /dev/mapper/… are links to the kernel's names.
    let path = root.path(source);
    let path = std::fs::canonicalize(&path).unwrap_or(path);
    let known = |name: &str| number(root, &format!("/sys/class/block/{name}/dev"));
    let own = block_device(&path).or_else(|| known(path.file_name()?.to_str()?));
    let Some(own) = own else { return Vec::new() };
    for uuid in entries(&root.path("/sys/fs/btrfs")) {
        let names = entries(&root.path(&format!("/sys/fs/btrfs/{uuid}/devices")));
        let disks: Vec<_> = names.iter().filter_map(|name| known(name)).collect();
        if disks.contains(&own) {
            return disks;
        }
    }
    vec![own]
}

/// The number of the block device that has this file.
fn block_device(path: &Path) -> Option<Device> {
    let found = std::fs::metadata(path).ok().filter(|found| found.file_type().is_block_device())?;
    let (major, minor) = (nix::sys::stat::major(found.rdev()), nix::sys::stat::minor(found.rdev()));
    Some((u32::try_from(major).ok()?, u32::try_from(minor).ok()?))
}

/// The number of the file system that a loop device's file is on, loop(4).
fn loop_file_system(root: &Root, folder: &str) -> Option<Device> {
    let event = root.read(&format!("{folder}/uevent")).ok()?;
    let event = String::from_utf8_lossy(&event);
    let name = event.lines().find_map(|line| line.strip_prefix("DEVNAME="))?;
    let device = File::open(root.path(&format!("/dev/{name}"))).ok()?;
    let mut status = ioctl::LoopInfo { device: 0, rest: [0; 224] };
    // SAFETY: the status has the size of a `struct loop_info64`, which the kernel writes.
    unsafe { ioctl::loop_get_status64(device.as_raw_fd(), &raw mut status) }.ok()?;
    let number = u32::try_from(status.device).ok()?;
    // As the kernel packs it for user space: 8 bits of the minor number, 12 of the major one, 12 of the minor one.
    Some(((number >> 8) & 0xfff, (number & 0xff) | ((number >> 12) & !0xff)))
        .filter(|device| *device != (0, 0))
}

/// Structures of linux/loop.h.
mod ioctl {
    /// `struct loop_info64`, of which only the beginning counts here.
    #[repr(C)]
    pub struct LoopInfo {
        pub device: u64,
        pub rest: [u8; 224],
    }

    nix::ioctl_read_bad!(loop_get_status64, 0x4c05, LoopInfo);
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        for (path, text) in files {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (folder, root)
    }

    #[test]
    fn luks_on_lvm_on_a_partition() {
        let (_folder, root) = tree(&[
            ("/sys/dev/block/253:1/slaves/dm-0/dev", "253:0\n"),
            ("/sys/dev/block/253:0/slaves/vda3/dev", "254:3\n"),
            ("/sys/dev/block/dev", "254:0\n"),
            ("/sys/dev/block/254:3/partition", "3\n"),
        ]);
        let stack = BlockStack::read(&root, [(253, 1)]);
        let below = |device| stack.devices.get(&device).unwrap().below.clone();
        assert_eq!(below((253, 1)), [(253, 0)]);
        assert_eq!(below((253, 0)), [(254, 3)]);
        assert_eq!(below((254, 3)), [(254, 0)]);
        assert!(below((254, 0)).is_empty());
    }

    #[test]
    fn a_loop_device_and_a_btrfs_of_two_disks() {
        let (folder, root) = tree(&[
            ("/sys/dev/block/7:0/loop/backing_file", "/srv/disk image (deleted)\n"),
            ("/sys/class/block/vdb/dev", "254:16\n"),
            ("/sys/class/block/dm-3/dev", "253:3\n"),
            ("/sys/fs/btrfs/features/x", ""),
            ("/sys/fs/btrfs/0a/devices/vdb", ""),
            ("/sys/fs/btrfs/0a/devices/dm-3", ""),
            ("/dev/dm-3", ""),
            ("/dev/mapper/nothing", ""),
        ]);
        std::os::unix::fs::symlink("../dm-3", folder.path().join("dev/mapper/data")).unwrap();
        let mut stack = BlockStack::read(&root, [(7, 0)]);
        let file = stack.devices.get(&(7, 0)).unwrap().file.clone().unwrap();
        assert_eq!(file, BackingFile { device: None, path: "/srv/disk image".to_owned() });
        stack.add_btrfs(&root, (0, 40), "/dev/mapper/data");
        assert_eq!(stack.disks.get(&(0, 40)).unwrap(), &[(253, 3), (254, 16)]);
    }

    #[test]
    fn a_circle_that_cannot_be_does_no_harm() {
        let (_folder, root) = tree(&[
            ("/sys/dev/block/253:1/slaves/a/dev", "253:0\n"),
            ("/sys/dev/block/253:0/slaves/b/dev", "253:1\n"),
        ]);
        assert_eq!(BlockStack::read(&root, [(253, 1)]).devices.len(), 2);
    }
}
