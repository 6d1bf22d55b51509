//! Finds openers of a disk that are not among its [`uses`](super::uses): processes that read or write the device
//! itself and loop devices that are built on it, which do not claim it; and mounts in other mount namespaces,
//! which do.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::guest::disks::identity::KnownDisk;
use crate::sys::block::{self, Number};
use crate::sys::block_device;
use crate::sys::mountinfo;
use crate::sys::root::Root;

/// Limit on the openers that are reported.
const MOST: usize = 16;
/// Time limit for the search.
const PATIENCE: Duration = Duration::from_secs(10);

/// Process, mount or loop device that has a disk or a part of it open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opener {
    /// Process with the device open.
    Process {
        /// Process ID.
        id: u32,
        /// Name of the process (`comm`).
        name: String,
        /// File by which it has opened the disk, in the view of that process.
        file: String,
    },
    /// Mount in another mount namespace.
    Mount {
        /// Mount point in that namespace.
        place: String,
        /// Name of a process in that namespace.
        name: String,
        /// ID of that process.
        id: u32,
    },
    /// Loop device with the disk as its backing file.
    Loop {
        /// Device name, such as `loop0`.
        name: String,
        /// Backing file: a device node of the disk.
        file: String,
    },
}

impl fmt::Display for Opener {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { id, name, file } => write!(formatter, "{name} (process {id}) has {file} open"),
            Self::Mount { place, name, id } => {
                write!(formatter, "mounted at {place} in the mount namespace of {name} (process {id})")
            }
            Self::Loop { name, file } => write!(formatter, "{name} is built on {file}"),
        }
    }
}

/// Error: the processes could not all be inspected in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the open files of all processes cannot be read within {} s", PATIENCE.as_secs())]
pub struct TooMany;

/// Returns who has `disk` open, except for this process; 16 at most. May block for seconds where there are many
/// processes.
///
/// # Errors
/// If the processes cannot all be inspected in time and no opener has been found by then.
pub fn of(root: &Root, disk: &KnownDisk) -> Result<Vec<Opener>, TooMany> {
    let until = Instant::now() + PATIENCE;
    let wanted = Wanted::of(root, disk);
    let mut found = Vec::new();
    for name in names(root, "/sys/block").filter(|name| name.starts_with("loop")) {
        let file = root.line(&format!("/sys/block/{name}/loop/backing_file"));
        if !file.is_empty() && wanted.is(&file, &root.path(&file)) {
            found.push(Opener::Loop { name, file });
        }
    }
    each_process(root, until, found, |id| process(&wanted, id))
}

/// Returns the mount points of `disk` in other mount namespaces; 16 at most. May block for seconds where there are
/// many processes.
///
/// # Errors
/// If the processes cannot all be inspected in time and no mount has been found by then.
pub fn mounts_elsewhere(root: &Root, disk: &KnownDisk) -> Result<Vec<Opener>, TooMany> {
    let wanted = Wanted::of(root, disk);
    let namespace = |id: &str| std::fs::read_link(root.path(&format!("/proc/{id}/ns/mnt"))).ok();
    let mut seen = BTreeSet::from([namespace("self")]);
    each_process(root, Instant::now() + PATIENCE, Vec::new(), |id| {
        if !seen.insert(namespace(&id.to_string())) {
            return None;
        }
        let mounts = mountinfo::parse(&root.read(&format!("/proc/{id}/mountinfo")).ok()?);
        let mount = mounts.into_iter().find(|mount| {
            // btrfs has a device number of its own, and names one of its disks as the source.
            wanted.numbers.contains(&mount.device)
                || mount.device.0 == 0 && wanted.files.contains(&mount.source)
        })?;
        let name = root.line(&format!("/proc/{id}/comm"));
        Some(Opener::Mount { place: mount.mount_point, name, id })
    })
}

/// Calls `look` for each process except this one, and adds its results to those `found` before.
fn each_process(
    root: &Root,
    until: Instant,
    mut found: Vec<Opener>,
    mut look: impl FnMut(u32) -> Option<Opener>,
) -> Result<Vec<Opener>, TooMany> {
    let mut ids: Vec<u32> = names(root, "/proc").filter_map(|name| name.parse().ok()).collect();
    ids.sort_unstable();
    for id in ids.into_iter().filter(|id| *id != std::process::id()) {
        if found.len() >= MOST {
            break;
        }
        if Instant::now() > until {
            return if found.is_empty() { Err(TooMany) } else { Ok(found) };
        }
        found.extend(look(id));
    }
    found.truncate(MOST);
    Ok(found)
}

/// Device nodes and numbers of the disk and its partitions.
struct Wanted<'a> {
    root: &'a Root,
    files: BTreeSet<String>,
    numbers: BTreeSet<Number>,
}

impl<'a> Wanted<'a> {
    fn of(root: &'a Root, disk: &KnownDisk) -> Self {
        let parts = disk.partitions.iter();
        let files = parts.clone().map(|part| block::file(&part.name));
        Self {
            root,
            files: [disk.file.clone()].into_iter().chain(files).collect(),
            numbers: [disk.number].into_iter().chain(parts.map(|part| part.number)).collect(),
        }
    }

    /// Returns whether the file `name`, opened by way of `path`, is one of them. In a container it may have a
    /// different name, so the device number counts as well.
    fn is(&self, name: &str, path: &Path) -> bool {
        self.files.contains(name)
            || self.root.is_the_machine()
                && name.starts_with('/')
                && block_device::number_at(path).is_some_and(|number| self.numbers.contains(&number))
    }
}

fn process(wanted: &Wanted<'_>, id: u32) -> Option<Opener> {
    let folder = format!("/proc/{id}/fd");
    names(wanted.root, &folder).find_map(|number| {
        let path = wanted.root.path(&format!("{folder}/{number}"));
        let file = std::fs::read_link(&path).ok()?.to_string_lossy().into_owned();
        wanted.is(&file, &path).then(|| {
            let name = wanted.root.line(&format!("/proc/{id}/comm"));
            Opener::Process { id, name, file }
        })
    })
}

fn names(root: &Root, folder: &str) -> impl Iterator<Item = String> + use<> {
    let entries = std::fs::read_dir(root.path(folder)).ok();
    entries.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok())
}
