//! List of disks and partitions, for `guest-get-disks`.

use std::collections::{HashMap, HashSet};

use crate::guest::Guest;
use crate::guest::block_devices::{Disk, Error, Wait, disk};
use crate::guest::disks::location::Bus;
use crate::sys::block::{self, Number, Sized};
use crate::sys::error_chain;
use crate::sys::nvme::{self, Health};

/// Number of disks above which the list takes more than 1 ms and is not made on the event loop.
const MANY: usize = 64;

/// Disk, or partition of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Device file, such as `/dev/vda1`.
    pub file: String,
    /// True for a partition, false for a whole disk.
    pub partition: bool,
    /// Device files that the device is made of; for a partition, that of its disk. `None` if the kernel does not show
    /// them.
    pub parts: Option<Vec<String>>,
    /// Location and serial number; `None` for partitions and for virtual disks, which exist in the kernel only.
    pub disk: Option<Disk>,
    /// Name of a device-mapper device.
    pub alias: Option<String>,
    /// Health of an NVMe disk, if it reports that.
    pub health: Option<Health>,
}

impl Listed {
    fn named(file: String) -> Self {
        Self { file, partition: false, parts: None, disk: None, alias: None, health: None }
    }
}

/// Returns the disks that have a size, and their partitions, in qemu-ga's order: the kernel's order reversed, so
/// that the partitions come before their disk.
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
        // A disk in /proc/partitions has a size. Linux before 5.17 leaves drives with removable media out of that file;
        // virtual disks, which exist in the kernel only, are not such drives.
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
        // A disk with hardware behind it is not made of other devices.
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

/// Contents of /proc/partitions.
#[derive(Debug, Default)]
struct Known {
    /// Device numbers of disks and partitions, by name.
    numbers: HashMap<String, Number>,
    /// Names of partitions, by the name of their disk.
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
