//! Record of what rules have mounted, kept until the next boot. Only what is recorded here is ever unmounted.
//!
//! The record is written before the mount, and only where nothing else is mounted. An agent that is killed in
//! between then recognises the mount as its own.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::guest::disk_rules::find::Device;
use crate::guest::disk_rules::rule::How;
use crate::guest::disks::identity::KnownDisk;
use crate::sys::block::Number;
use crate::sys::files;
use crate::sys::mountinfo::Mount;

/// Name of the file in the agent's runtime directory.
pub const FILE: &str = "disk-rules.json";

/// Mount that a rule has made or was about to make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// Instructions of the rule at the time of the mount.
    pub how: How,
    /// Disk that is mounted.
    pub disk: Place,
    /// Number of the partition in its table; absent for the whole disk.
    pub partition: Option<u32>,
    /// Device node, such as `/dev/vdb1`.
    pub file: String,
    /// Device number (major and minor).
    pub number: Number,
    /// Mount ID given by the kernel, 0 for swap space; absent until it is mounted.
    pub mount: Option<u64>,
    /// True once all that the rule says is done, such as owner and permissions.
    pub done: bool,
    /// Size of the disk, in bytes, when its contents were last grown.
    pub grown: u64,
}

/// Disk as it was seen since the last boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Device name, such as `vdb`.
    pub name: String,
    /// Path in sysfs.
    pub place: String,
    /// Number that distinguishes it from other disks that have had the same path.
    pub generation: u64,
}

impl From<&KnownDisk> for Place {
    fn from(disk: &KnownDisk) -> Self {
        Self { name: disk.name.clone(), place: disk.place.clone(), generation: disk.generation }
    }
}

/// Present state of something that a rule has mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Still mounted.
    Mounted,
    /// Still mounted, with another mount over the same mount point.
    Covered(String),
    /// No longer mounted.
    Unmounted,
}

impl Made {
    /// Creates the record of a mount that is about to be made.
    pub fn new(how: &How, device: &Device) -> Self {
        Self {
            how: how.clone(),
            disk: Place::from(&*device.disk),
            partition: device.partition,
            file: device.file.clone(),
            number: device.number,
            mount: None,
            done: false,
            grown: 0,
        }
    }

    /// Returns whether this mount is of `device`.
    pub fn is_of(&self, device: &Device) -> bool {
        self.disk.generation == device.disk.generation && self.partition == device.partition
    }

    /// Returns whether `mount` is the one that was recorded.
    pub fn is(&self, mount: &Mount) -> bool {
        let same = mount.device == self.number
            // btrfs has device numbers of its own.
            || mount.btrfs_source() == Some(&*self.file);
        same && Path::new(&mount.mount_point) == self.how.mount_point
            && self.mount.is_none_or(|number| number == mount.id)
    }

    /// Returns the state of this record, given the present mounts and swap devices.
    pub fn standing(&self, mounts: &[Mount], swaps: &[String]) -> Standing {
        if self.how.is_swap() {
            return if swaps.contains(&self.file) { Standing::Mounted } else { Standing::Unmounted };
        }
        let here = |mount: &&Mount| Path::new(&mount.mount_point) == self.how.mount_point;
        if !mounts.iter().any(|mount| self.is(mount)) {
            return Standing::Unmounted;
        }
        match mounts.iter().filter(here).find(|mount| !self.is(mount)) {
            Some(other) => Standing::Covered(format!("{} ({})", other.source, other.kind)),
            None => Standing::Mounted,
        }
    }
}

/// Contents of the record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Mounts that rules have made.
    pub made: Vec<Made>,
    /// Disks that were released: nothing of them is mounted until they have been unplugged.
    pub released: Vec<Place>,
}

impl Kept {
    /// Returns what a rule has mounted at `mount_point`.
    pub fn at(&self, mount_point: &Path) -> Option<&Made> {
        self.made.iter().find(|made| made.how.mount_point == mount_point)
    }

    /// Forgets what a rule has mounted at `mount_point`.
    pub fn forget(&mut self, mount_point: &Path) {
        self.made.retain(|made| made.how.mount_point != mount_point);
    }
}

/// Keeps the record in a file that outlives the agent.
#[derive(Debug)]
pub struct Memory {
    file: PathBuf,
    kept: Mutex<Kept>,
}

impl Memory {
    /// Opens the record in the directory `folder`. An unreadable record counts as empty, with a warning.
    pub fn open(folder: &Path) -> Self {
        let file = folder.join(FILE);
        let kept = match files::read(&file).map(|bytes| serde_json::from_slice(&bytes)) {
            Some(Ok(kept)) => kept,
            Some(Err(error)) => {
                tracing::warn!("{} cannot be understood: {error}", file.display());
                Kept::default()
            }
            None => Kept::default(),
        };
        Self { file, kept: Mutex::new(kept) }
    }

    /// Returns a copy of the present record.
    pub fn kept(&self) -> Kept {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the record and writes it to the file.
    ///
    /// # Errors
    /// If the file cannot be written. The record is then unchanged.
    pub fn change(&self, change: impl FnOnce(&mut Kept)) -> io::Result<()> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = kept.clone();
        change(&mut changed);
        if changed != *kept {
            files::replace(&self.file, &serde_json::to_vec(&changed)?)?;
            *kept = changed;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(id: u64, device: Number, mount_point: &str) -> Mount {
        Mount {
            id,
            device,
            root: "/".into(),
            mount_point: mount_point.into(),
            path: mount_point.into(),
            kind: if device.0 == 0 { "btrfs" } else { "ext4" }.into(),
            source: "/dev/vdb".into(),
            options: "rw".into(),
            flags: "rw".into(),
        }
    }

    fn made(number: Option<u64>) -> Made {
        Made {
            how: How { mount_point: "/a".into(), ..How::default() },
            disk: Place { name: "vdb".into(), place: "/sys/x".into(), generation: 7 },
            partition: None,
            file: "/dev/vdb".into(),
            number: (254, 16),
            mount: number,
            done: false,
            grown: 0,
        }
    }

    #[test]
    fn only_what_a_rule_mounted_is_its_own() {
        let ours = mount(5, (254, 16), "/a");
        for (case, list, expected) in [
            ("there", vec![ours.clone()], Standing::Mounted),
            ("elsewhere", vec![mount(5, (254, 16), "/b")], Standing::Unmounted),
            ("another disk", vec![mount(5, (254, 32), "/a")], Standing::Unmounted),
            ("mounted again by somebody", vec![mount(6, (254, 16), "/a")], Standing::Unmounted),
            ("btrfs", vec![mount(5, (0, 40), "/a")], Standing::Mounted),
            ("below", vec![ours.clone(), mount(9, (0, 3), "/a/b")], Standing::Mounted),
            ("none", vec![], Standing::Unmounted),
        ] {
            assert_eq!(made(Some(5)).standing(&list, &[]), expected, "{case}");
        }
        let over = made(Some(5)).standing(&[ours, mount(8, (254, 48), "/a")], &[]);
        assert_eq!(over, Standing::Covered("/dev/vdb (ext4)".to_owned()));
        // The agent was killed before the mount ID was recorded.
        assert_eq!(made(None).standing(&[mount(6, (254, 16), "/a")], &[]), Standing::Mounted);
    }

    #[test]
    fn swap_space_is_where_the_kernel_swaps_to() {
        let mut swap = made(Some(0));
        swap.how = How { mount_point: "swap (serial a)".into(), kind: Some("swap".into()), ..How::default() };
        assert_eq!(swap.standing(&[], &["/dev/vdb".to_owned()]), Standing::Mounted);
        assert_eq!(
            swap.standing(&[mount(0, (254, 16), "/a")], &["/dev/vdc".to_owned()]),
            Standing::Unmounted
        );
    }

    #[test]
    fn it_outlives_the_agent() {
        let folder = tempfile::tempdir().unwrap();
        let memory = Memory::open(folder.path());
        memory.change(|kept| kept.made.push(made(Some(5)))).unwrap();
        memory.change(|kept| kept.released.push(made(None).disk)).unwrap();
        let again = Memory::open(folder.path());
        assert_eq!((again.kept(), again.kept().made.len()), (memory.kept(), 1));
        assert!(again.kept().at(Path::new("/a")).is_some());
        again.change(|kept| kept.forget(Path::new("/a"))).unwrap();
        assert_eq!(Memory::open(folder.path()).kept().made, []);
        // A change that cannot be written to the file is not made in memory either.
        drop(folder);
        again.change(|kept| kept.released.clear()).unwrap_err();
        assert_eq!(again.kept().released.len(), 1);
    }
}
