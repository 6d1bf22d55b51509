//! File systems that are mounted from disks or from the network.
//!
//! Each is one entry, wherever else it is mounted: of several mounts that show the same files, or a directory of
//! them, the first in the kernel's list counts. So the bind mounts of containers and pods (kubelet's subpaths) are
//! left out, while two subvolumes of one btrfs are two entries. A CSI volume that kubelet gives to a pod also
//! counts, be it a file system or a device: the entry shows which pod has it.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::io;

use crate::guest::Guest;
use crate::guest::events::Kind;
use crate::guest::monitor::{Source, follow};
use crate::sys::block;
use crate::sys::mountinfo::{Mount, MountList, REMOVED};
use crate::wire::proto::v1::{FileSystemMounted, FileSystemUnmounted, MountedFileSystem};

/// Types of network file systems. Of FUSE only known ones: most others are private to a program.
const NETWORK: &[&str] = &[
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.ceph",
    "fuse.ceph-fuse",
    "fuse.glusterfs",
    "fuse.juicefs",
    "fuse.rclone",
    "fuse.s3fs",
    "fuse.sshfs",
    "lustre",
    "nfs",
    "nfs4",
    "orangefs",
    "smb3",
    "virtiofs",
];

/// Types of file systems that may span several block devices, and so have no device number of one.
const SEVERAL_DEVICES: &[&str] = &["bcachefs", "btrfs", "zfs"];

/// Types of read-only images, such as snaps.
const IMAGES: &[&str] = &["squashfs"];

impl Source for MountList {
    async fn changed(&self) -> io::Result<()> {
        MountList::changed(self).await
    }

    fn has_changed(&self) -> io::Result<bool> {
        MountList::has_changed(self)
    }
}

pub(super) async fn watch(guest: Guest) -> io::Result<Infallible> {
    let list = MountList::open(&guest.root)?;
    let mut known = Vec::new();
    follow(&guest, &list, || {
        let file_systems = select(list.read()?);
        for event in changes(&known, &file_systems) {
            guest.events.tell(event);
        }
        known = file_systems;
        Ok(())
    })
    .await
}

fn select(mounts: Vec<Mount>) -> Vec<MountedFileSystem> {
    let mut shown = HashSet::new();
    let mut selected = Vec::new();
    for mount in mounts {
        if let Some(source) = device_of_a_pod(&mount) {
            selected.push(MountedFileSystem { mount_point: mount.mount_point, source, r#type: mount.kind });
            continue;
        }
        if !counts(&mount) {
            continue;
        }
        let covered =
            folders_up(&mount.root).any(|folder| shown.contains(&(mount.device, folder.to_owned())));
        if !covered || is_volume_of_a_pod(&mount.mount_point) {
            shown.insert((mount.device, mount.root));
            selected.push(MountedFileSystem {
                mount_point: mount.mount_point,
                source: mount.source,
                r#type: mount.kind,
            });
        }
    }
    selected
}

fn counts(mount: &Mount) -> bool {
    let kind = mount.kind.as_str();
    let on_disk = mount.device.0 != 0 || SEVERAL_DEVICES.contains(&kind);
    (on_disk && !IMAGES.contains(&kind)) || NETWORK.contains(&kind)
}

/// Returns whether this is kubelet's mount point for a CSI volume,
/// `<root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount`.
fn is_volume_of_a_pod(mount_point: &str) -> bool {
    let end: Vec<_> = mount_point.rsplit('/').take(6).collect();
    matches!(end[..], ["mount", _, "kubernetes.io~csi", "volumes", _, "pods"])
}

/// Returns the device that is bound to kubelet's path for a CSI raw block volume,
/// `<root>/plugins/kubernetes.io/csi/volumeDevices/publish/<volume>/<pod>`.
fn device_of_a_pod(mount: &Mount) -> Option<String> {
    let end: Vec<_> = mount.mount_point.rsplit('/').take(4).collect();
    let is_place = matches!(end[..], [_, _, "publish", "volumeDevices"]);
    // A device node whose disk was removed no longer has a name.
    (is_place && mount.kind == "devtmpfs" && !mount.root.ends_with(REMOVED))
        .then(|| block::file(mount.root.trim_start_matches('/')))
}

/// Iterates over the directory and all directories above it, up to `/`.
fn folders_up(folder: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(folder), |folder| {
        let (above, last) = folder.rsplit_once('/')?;
        match (above, last) {
            ("", "") => None,
            ("", _) => Some("/"),
            _ => Some(above),
        }
    })
}

/// Returns the changes between two lists: first unmounted file systems, the one mounted last first, then new ones
/// in the order in which they were mounted. Duplicate entries count separately.
fn changes(before: &[MountedFileSystem], now: &[MountedFileSystem]) -> Vec<Kind> {
    let mut changes: Vec<Kind> = surplus(before.iter().rev(), now).map(unmounted).collect();
    changes.extend(surplus(now.iter(), before).map(mounted));
    changes
}

fn mounted(file_system: MountedFileSystem) -> Kind {
    FileSystemMounted { file_system: Some(file_system) }.into()
}

fn unmounted(file_system: MountedFileSystem) -> Kind {
    FileSystemUnmounted { file_system: Some(file_system) }.into()
}

/// Returns the entries of `listed` that `counted` lacks or contains less often.
fn surplus<'a>(
    listed: impl Iterator<Item = &'a MountedFileSystem>,
    counted: &'a [MountedFileSystem],
) -> impl Iterator<Item = MountedFileSystem> {
    let mut left: HashMap<&MountedFileSystem, usize> = HashMap::new();
    for file_system in counted {
        *left.entry(file_system).or_default() += 1;
    }
    listed
        .filter(move |file_system| match left.get_mut(file_system) {
            Some(count) if *count > 0 => {
                *count -= 1;
                false
            }
            _ => true,
        })
        .cloned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::events::state::{Kept, Unbounded};
    use crate::sys::mountinfo;

    /// Mounts of a Kubernetes node on Debian with a btrfs disk; the numbers do not matter.
    const NODE: &[u8] = b"\
22 27 0:21 / /proc rw - proc proc rw\n\
24 27 0:6 / /dev rw - devtmpfs udev rw\n\
27 1 254:1 / / rw shared:1 - ext4 /dev/vda1 rw\n\
28 27 0:25 / /run rw - tmpfs tmpfs rw\n\
29 28 0:4 net:[4026532281] /run/netns/cni-1 rw - nsfs nsfs rw\n\
30 27 7:0 / /snap/core20/1 ro - squashfs /dev/loop0 ro\n\
31 27 254:17 / /var/lib/kubelet/plugins/kubernetes.io/csi/a/globalmount rw - xfs /dev/vdb1 rw\n\
32 27 254:17 / /var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pv/mount rw - xfs /dev/vdb1 rw\n\
33 27 254:17 /data /var/lib/kubelet/pods/1/volume-subpaths/pv/c/0 rw - xfs /dev/vdb1 rw\n\
34 27 254:1 /var/lib/data /srv/bind rw - ext4 /dev/vda1 rw\n\
35 27 0:60 / /run/containerd/io.containerd.runtime.v2.task/k8s.io/1/rootfs rw - overlay overlay rw\n\
36 27 0:40 /@ /mnt/a rw - btrfs /dev/vdc rw\n\
37 27 0:40 /@home /mnt/b rw - btrfs /dev/vdc rw\n\
38 27 0:40 /@home/me /mnt/c rw - btrfs /dev/vdc rw\n\
39 27 0:70 / /mnt/nfs rw - nfs4 server:/export rw\n\
40 27 0:71 / /mnt/share rw - virtiofs share rw\n\
41 27 0:72 / /run/user/1/doc rw - fuse.portal portal rw\n\
42 27 0:73 / /mnt/ssh rw - fuse.sshfs me@server:/ rw\n\
43 27 8:1 / /mnt/windows rw - fuseblk /dev/sda1 rw\n\
44 28 0:74 / /run/rpc_pipefs rw - rpc_pipefs sunrpc rw\n\
45 27 0:75 / /tank rw - zfs tank rw\n\
46 27 0:6 /vdd /var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pv-raw/2 rw - devtmpfs udev rw\n\
47 27 0:6 /vde//deleted /var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pv-raw/3 rw - devtmpfs udev rw\n";

    #[test]
    fn file_systems_of_a_node() {
        let selected = select(mountinfo::parse(NODE));
        let told: Vec<_> = selected.iter().map(|it| format!("{} {}", it.r#type, it.mount_point)).collect();
        assert_eq!(
            told,
            [
                "ext4 /",
                "xfs /var/lib/kubelet/plugins/kubernetes.io/csi/a/globalmount",
                "xfs /var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pv/mount",
                "btrfs /mnt/a",
                "btrfs /mnt/b",
                "nfs4 /mnt/nfs",
                "virtiofs /mnt/share",
                "fuse.sshfs /mnt/ssh",
                "fuseblk /mnt/windows",
                "zfs /tank",
                "devtmpfs /var/lib/kubelet/plugins/kubernetes.io/csi/volumeDevices/publish/pv-raw/2",
            ]
        );
        assert_eq!(selected.last().unwrap().source, "/dev/vdd");
    }

    #[test]
    fn folders_up_to_the_root() {
        assert_eq!(folders_up("/a/b").collect::<Vec<_>>(), ["/a/b", "/a", "/"]);
        assert_eq!(folders_up("/").collect::<Vec<_>>(), ["/"]);
        assert_eq!(folders_up("").collect::<Vec<_>>(), [""]);
    }

    fn file_system(number: u8) -> MountedFileSystem {
        MountedFileSystem {
            mount_point: format!("/{number}"),
            source: "/dev/vda".into(),
            r#type: "xfs".into(),
        }
    }

    #[test]
    fn the_last_mounted_goes_first() {
        let [a, b, c] = [1, 2, 3].map(file_system);
        let before = [a.clone(), b.clone(), b.clone()];
        let now = [b.clone(), c.clone()];
        assert_eq!(changes(&before, &now), [unmounted(b), unmounted(a), mounted(c)]);
    }

    proptest! {
        #[test]
        fn the_changes_make_the_new_state_of_the_old_one(
            before in prop::collection::vec(0_u8..8, 0..20),
            now in prop::collection::vec(0_u8..8, 0..20),
        ) {
            let [before, now] = [before, now].map(|numbers| {
                numbers.into_iter().map(file_system).collect::<Vec<_>>()
            });
            let mut kept = Kept::default();
            for file_system in &before {
                kept.apply(&mounted(file_system.clone()), None, &Unbounded).unwrap();
            }
            let changes = changes(&before, &now);
            prop_assert!(changes.len() <= before.len() + now.len());
            for event in &changes {
                kept.apply(event, None, &Unbounded).unwrap();
            }
            let sorted = |mut list: Vec<MountedFileSystem>| {
                list.sort_by(|one, other| one.mount_point.cmp(&other.mount_point));
                list
            };
            prop_assert_eq!(sorted(kept.state.unwrap_or_default().file_systems.clone()), sorted(now));
        }
    }
}
