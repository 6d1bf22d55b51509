//! The list of disks and partitions.

use std::collections::{HashMap, HashSet};

use crate::guest::Guest;
use crate::guest::block_devices::{Disk, Error, Wait, disk};
use crate::guest::disks::location::Bus;
use crate::sys::block::{self, Number, Sized};
use crate::sys::error_chain;
use crate::sys::nvme::{self, Health};

/// So many disks that the list is not made in passing: more than 1 ms of work.
const MANY: usize = 64;

/// A disk or a partition of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Such as `/dev/vda1`.
    pub file: String,
    /// A partition, not a whole disk.
    pub partition: bool,
    /// Files of the devices that it is made of; of a partition: the disk's. None if the kernel does not say.
    pub parts: Option<Vec<String>>,
    /// Where it is; none for partitions, and for disks that exist in the kernel only.
    pub disk: Option<Disk>,
    /// The name that device-mapper has for it.
    pub alias: Option<String>,
    /// How it is, if it is an NVMe disk that says so.
    pub health: Option<Health>,
}

impl Listed {
    fn named(file: String) -> Self {
        Self { file, partition: false, parts: None, disk: None, alias: None, health: None }
    }
}

/// The disks that have a size, and their partitions, in qemu-ga's order: the last in the kernel's comes first, and
/// the partitions before their disk.
///
/// # Errors
/// If the kernel has no list of disks, or if it must be [waited](Wait).
pub fn list(guest: &Guest, wait: Wait) -> Result<Vec<Listed>, Error> {
    const PATH: &str = "/sys/block";
    let root = &guest.root;
    let disks = block::disks(root).map_err(|source| Error::Unreadable { path: PATH, source })?;
    if wait == Wait::Cannot && disks.len() > MANY {
        return Err(Error::MustWait);
    }
    let partitions = root.read("/proc/partitions").ok();
    let known = partitions
        .as_deref()
        .map(|file| Known::new(&disks, &String::from_utf8_lossy(file)))
        .unwrap_or_default();
    let mut list = Vec::new();
    for name in &disks {
        let Ok(place) = block::disk_place(root, name) else { continue };
        let number = known.numbers.get(name.as_str()).copied();
        // What is in /proc/partitions has a size. Linux before 5.17 leaves drives with media that can be taken
        // out away from there; what exists in the kernel only is none.
        let has_size = number.is_some()
            || (partitions.is_none() || !block::is_virtual(&place))
                && !matches!(root.line(&format!("{place}/size")).as_str(), "" | "0");
        if has_size {
            list.push(whole(guest, name, &place, number, wait)?);
            let partition = |partition: &String| Listed {
                partition: true,
                parts: Some(vec![block::file(name)]),
                ..Listed::named(block::file(partition))
            };
            list.extend(known.partitions.get(name.as_str()).into_iter().flatten().map(partition));
        }
    }
    list.reverse();
    Ok(list)
}

fn whole(
    guest: &Guest,
    name: &str,
    place: &str,
    number: Option<Number>,
    wait: Wait,
) -> Result<Listed, Error> {
    let root = &guest.root;
    let file = block::file(name);
    if !block::is_virtual(place) {
        let disk = disk(guest, place, number, wait)?;
        let health = match (disk.location.kind, wait) {
            (Bus::Nvme, Wait::Cannot) => return Err(Error::MustWait),
            (Bus::Nvme, Wait::Can) => health(guest, &file),
            _ => None,
        };
        // It is made of itself only.
        return Ok(Listed { parts: Some(Vec::new()), disk: Some(disk), health, ..Listed::named(file) });
    }
    let parts = block::parts(root, place)
        .ok()
        .flatten()
        .map(|parts| parts.iter().rev().map(|part| block::file(block::name(part))).collect());
    let alias = name.starts_with("dm-").then(|| root.line(&format!("{place}/dm/name")));
    Ok(Listed { parts, alias: alias.filter(|alias| !alias.is_empty()), ..Listed::named(file) })
}

fn health(guest: &Guest, file: &str) -> Option<Health> {
    let log = guest.effects.nvme_health(&guest.root.path(file)).inspect_err(|error| {
        tracing::debug!("{file}: no health log: {}", error_chain::words(error));
    });
    log.ok().map(|log| nvme::parse(&log))
}

/// What /proc/partitions says.
#[derive(Debug, Default)]
struct Known {
    /// Of whole disks and partitions.
    numbers: HashMap<String, Number>,
    /// The names of partitions, by that of their disk.
    partitions: HashMap<String, Vec<String>>,
}

impl Known {
    fn new(disks: &[String], file: &str) -> Self {
        let disks: HashSet<&str> = disks.iter().map(String::as_str).collect();
        let mut known = Self::default();
        for Sized { number, name } in block::parse_partitions(file) {
            if !disks.contains(name.as_str())
                && let Some(disk) = block::disk_of(&name).filter(|disk| disks.contains(disk))
            {
                known.partitions.entry(disk.to_owned()).or_default().push(name.clone());
            }
            known.numbers.insert(name, number);
        }
        known
    }
}
