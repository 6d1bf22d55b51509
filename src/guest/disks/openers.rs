//! Who has a disk open without having claimed it: processes that read or write the device itself, and loop devices
//! that are made of it. What claims a disk (mounts, swap space, volumes) is among its [`uses`](super::uses).

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::guest::disks::identity::KnownDisk;
use crate::sys::block::{self, Number};
use crate::sys::block_device;
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
            Self::Loop { name, file } => write!(formatter, "{name} is made of {file}"),
        }
    }
}

/// There are too many processes to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("what the processes have open cannot be found out within {} s", PATIENCE.as_secs())]
pub struct TooMany;

/// Who has `disk` open, this process left out; 16 at most. Blocks for seconds where there are many processes.
///
/// # Errors
/// If they cannot all be looked at in time, and nobody is found before.
pub fn of(root: &Root, disk: &KnownDisk) -> Result<Vec<Opener>, TooMany> {
    let until = Instant::now() + PATIENCE;
    let parts = disk.partitions.iter();
    let wanted = Wanted {
        root,
        files: [disk.file.clone()]
            .into_iter()
            .chain(parts.clone().map(|part| block::file(&part.name)))
            .collect(),
        numbers: [disk.number].into_iter().chain(parts.map(|part| part.number)).collect(),
    };
    let mut found = Vec::new();
    for name in names(root, "/sys/block").filter(|name| name.starts_with("loop")) {
        let file = root.line(&format!("/sys/block/{name}/loop/backing_file"));
        if !file.is_empty() && wanted.is(&file, &root.path(&file)) {
            found.push(Opener::Loop { name, file });
        }
    }
    let mut ids: Vec<u32> = names(root, "/proc").filter_map(|name| name.parse().ok()).collect();
    ids.sort_unstable();
    for id in ids.into_iter().filter(|id| *id != std::process::id()) {
        if found.len() >= MOST {
            break;
        }
        if Instant::now() > until {
            return if found.is_empty() { Err(TooMany) } else { Ok(found) };
        }
        found.extend(process(&wanted, id));
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

impl Wanted<'_> {
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
