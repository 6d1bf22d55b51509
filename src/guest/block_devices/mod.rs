//! Block devices as QGA clients and their hosts know them: the present disks and partitions ([`list`]), the disks
//! that file systems are on ([`Finder`]), and read and write statistics ([`statistics`]). Nothing is cached: each
//! call reads what the kernel shows, apart from the [`serials`] that the monitor of disks has read already.

pub mod list;
pub mod serials;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use crate::guest::Guest;
use crate::guest::disks::location::{self, Location};
use crate::sys::block::{self, Number};
use crate::sys::diskstats::{self, Statistics};
use crate::sys::error_chain;
use crate::sys::root::Root;

/// Maximum depth of stacked devices; deeper ones are left out.
const MAX_DEPTH: usize = 16;

/// Permission of a call to wait for disks to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The caller may block, because nothing else waits for its thread.
    Can,
    /// The caller must not block, and gets [`Error::MustWait`] instead. Data that the kernel has at hand is returned
    /// at once.
    Cannot,
}

/// Reason why no device is returned.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One of the kernel's lists cannot be read.
    #[error("cannot read {path}")]
    Unreadable {
        /// Path of the list.
        path: &'static str,
        /// Error of reading it.
        source: io::Error,
    },
    /// A disk has to be queried, or there are many to look up, and the caller [cannot](Wait::Cannot) wait.
    #[error("this has to be waited for")]
    MustWait,
}

/// Disk, or partition of one, as a host knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Location of the disk on its bus.
    pub location: Location,
    /// Serial number from udev, or else from the disk itself.
    pub serial: Option<String>,
    /// Device file, such as `/dev/vda1`.
    pub file: String,
}

/// Block device that a file system is on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Kernel name, such as `vda1` or `dm-0`; the device number where sysfs does not show the device.
    pub name: String,
    /// Disks and partitions that the device is, or is made of, in qemu-ga's order, which is the kernel's order
    /// reversed.
    pub disks: Vec<Disk>,
}

/// Finder of devices that looks up each one only once.
#[derive(Debug)]
pub struct Finder<'a> {
    guest: &'a Guest,
    wait: Wait,
    found: HashMap<Number, Arc<Device>>,
}

impl<'a> Finder<'a> {
    /// Creates a finder that has looked up no device yet.
    pub fn new(guest: &'a Guest, wait: Wait) -> Self {
        Self { guest, wait, found: HashMap::new() }
    }

    /// Returns the device with this number.
    ///
    /// # Errors
    /// [`Error::MustWait`] only.
    pub fn find(&mut self, number: Number) -> Result<Arc<Device>, Error> {
        if let Some(device) = self.found.get(&number) {
            return Ok(Arc::clone(device));
        }
        let device = Arc::new(device(self.guest, number, self.wait)?);
        self.found.insert(number, Arc::clone(&device));
        Ok(device)
    }
}

fn device(guest: &Guest, number: Number, wait: Wait) -> Result<Device, Error> {
    let Ok(place) = block::place(&guest.root, number) else {
        let (major, minor) = number;
        return Ok(Device { name: format!("{major}:{minor}"), disks: Vec::new() });
    };
    let mut disks = Vec::new();
    collect(guest, &place, Some(number), wait, MAX_DEPTH, &mut disks)?;
    disks.reverse();
    Ok(Device { name: block::name(&place).to_owned(), disks })
}

/// Adds the disks below a device, in the kernel's order.
fn collect(
    guest: &Guest,
    place: &str,
    number: Option<Number>,
    wait: Wait,
    depth: usize,
    disks: &mut Vec<Disk>,
) -> Result<(), Error> {
    if !block::is_virtual(place) {
        disks.push(disk(guest, place, number, wait)?);
        return Ok(());
    }
    // A partition of a virtual disk has no lower devices of its own: use those of the disk.
    let parts = block::parts(&guest.root, block::whole(place)).unwrap_or_else(|error| {
        tracing::debug!("{place}: {}", error_chain::words(&error));
        None
    });
    if let Some(depth) = depth.checked_sub(1) {
        for part in parts.unwrap_or_default() {
            collect(guest, &part, None, wait, depth, disks)?;
        }
    }
    Ok(())
}

/// Returns the disk or partition at the sysfs path `place`; reads its number if that is not given.
fn disk(guest: &Guest, place: &str, number: Option<Number>, wait: Wait) -> Result<Disk, Error> {
    let root = &guest.root;
    let controller = block::controller(root, place);
    let serial = match number.or_else(|| block::number(root, place)) {
        Some(number) => serials::get(guest, place, number, wait)?,
        None => None,
    };
    let driver = |device: &str| block::driver(root, device);
    let numbered = |folder: &str, name: &str| block::numbered(root, folder, name);
    Ok(Disk {
        location: location::locate(controller.as_deref().unwrap_or(place), driver, numbered),
        serial,
        file: block::file(block::name(place)),
    })
}

/// Returns the read and write statistics of every disk and partition, in the kernel's order.
///
/// # Errors
/// If /proc/diskstats cannot be read.
pub fn statistics(root: &Root) -> Result<Vec<Statistics>, Error> {
    const PATH: &str = "/proc/diskstats";
    let file = root.read(PATH).map_err(|source| Error::Unreadable { path: PATH, source })?;
    Ok(diskstats::parse(&String::from_utf8_lossy(&file)))
}
