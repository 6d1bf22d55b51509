//! Who has a disk without being among its [`uses`](super::uses): processes that read or write the device itself and loop
//! devices that are made of it, which do not claim it; and mounts in other mount namespaces, which do.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::guest::disks::identity::KnownDisk;
use crate::sys::block::{self, Number};
use crate::sys::block_device;
use crate::sys::mountinfo;
use crate::sys::root::Root;

/// How many are told.
const MOST: usize = 16;
/// How long is looked for them.
const PATIENCE: Duration = Duration::from_secs(10);

/// Somebody who has a disk, or a part of it, open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opener {
    /// A process.
    Process {
        /// Its number.
        id: u32,
        /// Its name.
        name: String,
        /// The file by which it has opened the disk, as it sees it.
        file: String,
    },
    /// A mount that is not seen from here.
    Mount {
        /// Where it is mounted.
        place: String,
        /// The name of a process that sees it.
        name: String,
        /// The number of that process.
        id: u32,
    },
    /// A loop device.
    Loop {
        /// Such as `loop0`.
        name: String,
        /// The file of the disk.
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

/// There are too many processes to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the open files of all processes cannot be read within {} s", PATIENCE.as_secs())]
pub struct TooMany;

/// Who has `disk` open, this process left out; 16 at most. Blocks for seconds where there are many processes.
///
/// # Errors
/// If they cannot all be looked at in time, and nobody is found before.
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

/// Where `disk` is mounted in other mount namespaces; 16 at most. Blocks for seconds where there are many processes.
///
/// # Errors
/// If they cannot all be looked at in time, and nothing is found before.
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
            // btrfs has a number of its own, and says which of its disks it was mounted from.
            wanted.numbers.contains(&mount.device)
                || mount.device.0 == 0 && wanted.files.contains(&mount.source)
        })?;
        let name = root.line(&format!("/proc/{id}/comm"));
        Some(Opener::Mount { place: mount.mount_point, name, id })
    })
}

/// What `look` finds about each process but this one, and what was `found` before.
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

/// Which devices are looked for.
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

    /// Whether a file called `name`, which `path` leads to, is one of them. A container may call it something else.
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
