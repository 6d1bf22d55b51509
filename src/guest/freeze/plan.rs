//! Decides which file systems are frozen, and in which order: a pure function of the mounts and of the devices
//! below them.
//!
//! A file system on a disk can be frozen, and so can btrfs. Each counts once, however often it is mounted. The one
//! that was mounted last is frozen first, and each is frozen before all that it is stored on, because freezing a
//! file system writes to what is below it:
//!
//! ```text
//!   frozen first   /srv/inner      ext4 in a file of /srv            (loop device)
//!        │         /srv            xfs on LUKS on LVM                (dm-1 ─ dm-0 ─ vdb, vdc)
//!        │         /ovl            overlay: itself not frozen, but what is stored on it goes before
//!        ▼         /var            ext4, with the overlay's upper directory
//!   frozen last    /               ext4 on vda1
//! ```
//!
//! They are thawed in the reverse order, so that no thaw has to wait for a file system below it that is still
//! frozen.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::sys::block_stack::{BlockStack, Device};
use crate::sys::mountinfo::Mount;

/// File system to freeze.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSystem {
    /// Device number of the file system.
    pub device: Device,
    /// Mounts of the file system: those of its root come first, and among these the last one mounted.
    pub mounts: Vec<Mount>,
}

impl FileSystem {
    /// Returns the mount point, for people.
    pub fn name(&self) -> &str {
        self.mounts.first().map_or("?", |mount| mount.mount_point.as_str())
    }
}

/// Returns whether the file system of a mount could be frozen: it is on a block device, or is a btrfs, which may
/// be on several.
pub fn counts(mount: &Mount) -> bool {
    mount.device.0 != 0 || mount.kind == "btrfs"
}

/// Returns the file systems in the order in which they are frozen.
pub fn plan(mounts: &[Mount], stack: &BlockStack) -> Vec<FileSystem> {
    let mut order = Order { above: BTreeMap::new(), last_mounted_first: Vec::new(), seen: HashSet::new() };
    for mount in mounts.iter().rev() {
        if !order.last_mounted_first.contains(&mount.device) {
            order.last_mounted_first.push(mount.device);
        }
        for lower in lives_on(mount, mounts, stack) {
            if lower != mount.device {
                order.above.entry(lower).or_default().insert(mount.device);
            }
        }
    }
    order.all().into_iter().filter_map(|device| file_system(device, mounts)).collect()
}

fn file_system(device: Device, mounts: &[Mount]) -> Option<FileSystem> {
    let mut mounts: Vec<_> =
        mounts.iter().rev().filter(|mount| mount.device == device && counts(mount)).cloned().collect();
    mounts.sort_by_key(|mount| mount.root != "/");
    (!mounts.is_empty()).then_some(FileSystem { device, mounts })
}

struct Order {
    /// File systems that are stored on each file system.
    above: BTreeMap<Device, BTreeSet<Device>>,
    last_mounted_first: Vec<Device>,
    seen: HashSet<Device>,
}

impl Order {
    fn all(mut self) -> Vec<Device> {
        let mut ordered = Vec::new();
        for device in std::mem::take(&mut self.last_mounted_first) {
            self.visit(device, &mut ordered);
        }
        ordered
    }

    /// Appends the file systems that are stored on this one, then the file system itself. Depth-first search with
    /// an explicit stack instead of recursion, as the depth is not under our control.
    fn visit(&mut self, device: Device, ordered: &mut Vec<Device>) {
        let mut path = vec![(device, false)];
        while let Some((device, done)) = path.pop() {
            if done {
                ordered.push(device);
            } else if self.seen.insert(device) {
                path.push((device, true));
                path.extend(self.above.get(&device).into_iter().flatten().map(|above| (*above, false)));
            }
        }
    }
}

/// Returns the device numbers of the file systems directly below that of a mount.
fn lives_on(mount: &Mount, mounts: &[Mount], stack: &BlockStack) -> Vec<Device> {
    let mut found = Vec::new();
    let mut disks = stack.disks.get(&mount.device).cloned().unwrap_or_default();
    if mount.device.0 != 0 {
        disks.push(mount.device);
    }
    // External logs and journals are given as devices, and so are not found; they are no file systems.
    let mut seen = HashSet::new();
    while let Some(disk) = disks.pop() {
        let Some(block) = stack.devices.get(&disk).filter(|_| seen.insert(disk)) else { continue };
        disks.extend(&block.below);
        if let Some(file) = &block.file {
            let exact = file.device.filter(|device| mounts.iter().any(|mount| mount.device == *device));
            found.extend(exact.or_else(|| holder_of(&file.path, mounts)));
        }
    }
    if mount.device.0 == 0 {
        let upper = mount.options.split(',').find_map(|option| option.strip_prefix("upperdir="));
        // Source of a stacked file system such as ecryptfs, or FUSE's bindfs. Devices and names that are no path do
        // not count.
        let source = Some(mount.source.as_str()).filter(|source| !source.starts_with("/dev/"));
        let folders = upper.into_iter().chain(source).filter(|path| path.starts_with('/'));
        found.extend(folders.filter_map(|path| holder_of(path, mounts)));
    }
    found
}

/// Returns the file system that a path is on: that of the longest mount point above it, and there the last one
/// mounted.
fn holder_of(path: &str, mounts: &[Mount]) -> Option<Device> {
    let above = |mount: &&Mount| {
        let rest = path.strip_prefix(mount.mount_point.trim_end_matches('/'));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    mounts.iter().filter(above).max_by_key(|mount| mount.mount_point.len()).map(|mount| mount.device)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sys::block_stack::{BackingFile, Block};
    use crate::sys::mountinfo;

    fn names(mounts: &str, stack: &BlockStack) -> Vec<String> {
        let plan = plan(&mountinfo::parse(mounts.as_bytes()), stack);
        plan.iter().map(|file_system| file_system.name().to_owned()).collect()
    }

    fn block(below: &[Device], file: Option<&str>) -> Block {
        let file = file.map(|path| BackingFile { device: None, path: path.to_owned() });
        Block { below: below.to_vec(), file }
    }

    /// Mounts of a Debian guest with a data disk, btrfs and network file systems.
    const GUEST: &str = "\
22 27 0:21 / /proc rw - proc proc rw\n\
27 1 254:1 / / rw shared:1 - ext4 /dev/vda1 rw\n\
28 27 0:25 / /run rw - tmpfs tmpfs rw\n\
29 27 254:15 / /boot/efi rw - vfat /dev/vda15 rw\n\
30 27 254:16 / /srv rw - xfs /dev/vdb rw\n\
31 27 254:16 /data /mnt/bind rw - xfs /dev/vdb rw\n\
32 27 0:40 /@ /pool rw - btrfs /dev/vdc rw,subvol=/@\n\
33 27 0:40 /@home /pool/home rw - btrfs /dev/vdc rw,subvol=/@home\n\
34 27 0:70 / /mnt/nfs rw - nfs4 server:/export rw\n\
35 27 0:75 / /tank rw - zfs tank rw\n\
36 27 254:1 /etc/hosts /srv/hosts rw - ext4 /dev/vda1 rw\n";

    #[test]
    fn on_disks_only_once_each_the_last_mounted_first() {
        let stack = BlockStack::default();
        // As in qemu-ga the last mount decides: / comes first, because a file of it was bind-mounted last. The
        // mount of its root directory is the one that is opened.
        assert_eq!(names(GUEST, &stack), ["/", "/pool/home", "/srv", "/boot/efi"]);
        let plan = plan(&mountinfo::parse(GUEST.as_bytes()), &stack);
        let points: Vec<_> = plan[2].mounts.iter().map(|mount| mount.mount_point.as_str()).collect();
        assert_eq!(points, ["/srv", "/mnt/bind"]);
    }

    #[test]
    fn what_lives_on_another_goes_before_it_however_it_was_mounted() {
        // The file system in the disk image is bind-mounted before the disk that holds the image is mounted a
        // second time.
        let mounts = "\
27 1 254:1 / / rw - ext4 /dev/vda1 rw\n\
30 27 253:1 / /srv rw - xfs /dev/mapper/secret rw\n\
31 30 7:0 / /srv/inner rw - ext4 /dev/loop0 rw\n\
32 27 7:1 / /img rw - ext4 /dev/loop1 rw\n\
33 27 0:50 / /ovl rw - overlay overlay rw,lowerdir=/usr,upperdir=/var/upper,workdir=/var/work\n\
34 27 254:2 / /var rw - ext4 /dev/vda2 rw\n\
35 27 254:1 / /again rw - ext4 /dev/vda1 rw\n\
36 27 253:1 / /srv2 rw - xfs /dev/mapper/secret rw\n";
        let stack = BlockStack {
            devices: BTreeMap::from([
                ((253, 1), block(&[(253, 0)], None)),
                ((253, 0), block(&[(254, 16)], None)),
                ((254, 16), block(&[], None)),
                ((7, 0), block(&[], Some("/srv/disk.img"))),
                ((7, 1), block(&[], Some("/ovl/disk.img"))),
            ]),
            disks: BTreeMap::new(),
        };
        assert_eq!(names(mounts, &stack), ["/srv/inner", "/srv2", "/again", "/img", "/var"]);
    }

    #[test]
    fn a_disk_of_btrfs_may_be_a_file() {
        let mounts = "\
27 1 254:1 / / rw - ext4 /dev/vda1 rw\n\
30 27 0:40 / /pool rw - btrfs /dev/loop0 rw\n\
31 27 254:1 / /bind rw - ext4 /dev/vda1 rw\n";
        let stack = BlockStack {
            devices: BTreeMap::from([
                ((254, 16), block(&[], None)),
                ((259, 1), block(&[(7, 0)], None)),
                ((7, 0), block(&[], Some("/disk.img"))),
            ]),
            disks: BTreeMap::from([((0, 40), vec![(254, 16), (259, 1)])]),
        };
        assert_eq!(names(mounts, &stack), ["/pool", "/bind"]);
    }

    #[test]
    fn the_kernels_word_on_which_file_system_a_file_is_wins() {
        // The directory of the file is hidden by a later mount.
        let mounts = "\
27 1 254:1 / / rw - ext4 /dev/vda1 rw\n\
30 27 254:2 / /a rw - ext4 /dev/vda2 rw\n\
31 27 7:0 / /b rw - ext4 /dev/loop0 rw\n\
32 30 0:60 / /a rw - tmpfs none rw\n\
33 27 254:2 / /c rw - ext4 /dev/vda2 rw\n";
        let file = BackingFile { device: Some((254, 2)), path: "/a/disk.img".to_owned() };
        let block = Block { below: Vec::new(), file: Some(file) };
        let stack = BlockStack { devices: BTreeMap::from([((7, 0), block)]), disks: BTreeMap::new() };
        assert_eq!(names(mounts, &stack), ["/b", "/c", "/"]);
    }

    #[test]
    fn a_circle_ends() {
        let mounts = "\
30 27 7:0 / /a rw - ext4 /dev/loop0 rw\n\
31 27 7:1 / /b rw - ext4 /dev/loop1 rw\n";
        let stack = BlockStack {
            devices: BTreeMap::from([
                ((7, 0), block(&[(7, 1)], Some("/b/x"))),
                ((7, 1), block(&[(7, 0)], Some("/a/x"))),
            ]),
            disks: BTreeMap::new(),
        };
        assert_eq!(names(mounts, &stack).len(), 2);
    }

    /// Generates a machine on which file system `n` is stored on file systems with smaller numbers, in one of
    /// several ways, mounted in any order; and for each pair, whether the first is stored on the second.
    fn machine() -> impl Strategy<Value = (Vec<Mount>, BlockStack, Vec<(usize, usize)>)> {
        let layers =
            prop::collection::vec((0_u8..5, prop::collection::vec(any::<prop::sample::Index>(), 1..3)), 1..9);
        (layers, any::<u64>()).prop_map(|(layers, shuffle)| {
            let count = u32::try_from(layers.len()).unwrap();
            let number = |n: usize| u32::try_from(n).unwrap();
            let mut stack = BlockStack::default();
            let mut mounts = Vec::new();
            let mut pairs = Vec::new();
            for (n, (how, lower)) in layers.iter().enumerate() {
                let lower: Vec<usize> =
                    if n == 0 { Vec::new() } else { lower.iter().map(|index| index.index(n)).collect() };
                let mut below = Vec::new();
                // Each disk is a loop device whose file is on a lower file system; the layers above differ.
                for (place, lower) in lower.iter().enumerate() {
                    let disk = (7, number(n) * 10 + number(place));
                    let path = format!("/fs{lower}/image");
                    stack.devices.insert(disk, block(&[], Some(&path)));
                    below.push(disk);
                }
                let first = lower.first().copied().filter(|_| *how == 4);
                pairs.extend(lower.iter().take(if *how == 4 { 1 } else { 9 }).map(|lower| (n, *lower)));
                let mut mount = Mount {
                    id: u64::from(number(n)),
                    device: (253, number(n)),
                    root: "/".to_owned(),
                    mount_point: format!("/fs{n}"),
                    path: format!("/fs{n}").into(),
                    kind: "ext4".to_owned(),
                    source: format!("/dev/disk{n}"),
                    options: "rw".to_owned(),
                    flags: "rw".to_owned(),
                };
                match (*how, first) {
                    // btrfs on these disks.
                    (3, _) => {
                        mount.device = (0, 100 + number(n));
                        mount.kind = "btrfs".to_owned();
                        stack.disks.insert(mount.device, below);
                    }
                    // An overlay, with its upper directory on a lower file system.
                    (4, Some(lower)) => {
                        mount.device = (0, 100 + number(n));
                        mount.kind = "overlay".to_owned();
                        mount.options = format!("rw,lowerdir=/,upperdir=/fs{lower}/upper,workdir=/w");
                    }
                    // A stack of several devices.
                    _ => {
                        let middle = (252, number(n));
                        stack.devices.insert(middle, block(&below, None));
                        stack.devices.insert(mount.device, block(&[middle], None));
                    }
                }
                mounts.push(mount.clone());
                if shuffle >> n & 1 == 1 {
                    mount.mount_point = format!("/bind{n}");
                    mounts.insert(
                        usize::try_from(shuffle % u64::from(count)).unwrap().min(mounts.len()),
                        mount,
                    );
                }
            }
            let turn = usize::try_from(shuffle >> 32).unwrap() % mounts.len();
            mounts.rotate_left(turn);
            (mounts, stack, pairs)
        })
    }

    proptest! {
        #[test]
        fn no_file_system_is_frozen_before_one_that_lives_on_it((mounts, stack, pairs) in machine()) {
            let plan = plan(&mounts, &stack);
            let device = |n: usize| mounts.iter().find(|mount| mount.mount_point == format!("/fs{n}")).unwrap().device;
            let place = |n: usize| plan.iter().position(|file_system| file_system.device == device(n));
            // Overlays pass the relation on.
            let mut pairs = pairs;
            loop {
                let more: Vec<_> = pairs.iter().flat_map(|(upper, middle)| {
                    pairs.iter().filter(move |(other, _)| other == middle).map(move |(_, lower)| (*upper, *lower))
                }).filter(|pair| !pairs.contains(pair)).collect();
                if more.is_empty() {
                    break;
                }
                pairs.extend(more.into_iter().collect::<BTreeSet<_>>());
            }
            for (upper, lower) in pairs {
                if let (Some(upper), Some(lower)) = (place(upper), place(lower)) {
                    prop_assert!(upper < lower, "{plan:?}");
                }
            }
            // The plan has all that count, and each once.
            let all: BTreeSet<_> = mounts.iter().filter(|mount| counts(mount)).map(|mount| mount.device).collect();
            prop_assert_eq!(plan.iter().map(|it| it.device).collect::<BTreeSet<_>>(), all);
            prop_assert_eq!(plan.len(), plan.iter().map(|it| it.device).collect::<BTreeSet<_>>().len());
        }
    }
}
