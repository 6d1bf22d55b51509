//! Block devices as QGA clients and their hosts know them: the disks and partitions that there are ([`list`]), what file systems are
//! on ([`Finder`]), what was read and written ([`statistics`]). Nothing is kept: each question reads what the kernel shows, beside
//! the [`serials`] that the monitor of disks has already asked for.

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

/// How deep devices may be stacked; deeper ones are left out.
const MAX_DEPTH: usize = 16;

/// Whether who asks can wait for disks to answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// It blocks nobody else.
    Can,
    /// It is told [`Error::MustWait`] instead. What the kernel knows by itself is told at once.
    Cannot,
}

/// Why nothing is told.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A list of the kernel's is missing.
    #[error("cannot read {path}")]
    Unreadable {
        /// Where it should be.
        path: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// A disk has to be asked, or there is much to look up, and who asks [cannot](Wait::Cannot) wait.
    #[error("this has to be waited for")]
    MustWait,
}

/// A disk, or a partition of one, as a host knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Where it is.
    pub location: Location,
    /// udev's word, or else the disk's own.
    pub serial: Option<String>,
    /// Such as `/dev/vda1`.
    pub file: String,
}

/// A block device that a file system is on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Such as `vda1` or `dm-0`; its number where the kernel does not show it.
    pub name: String,
    /// The disks and partitions that it is, or is made of, in qemu-ga's order: the last in the kernel's comes first.
    pub disks: Vec<Disk>,
}

/// Looks devices up, each one once.
#[derive(Debug)]
pub struct Finder<'a> {
    guest: &'a Guest,
    wait: Wait,
    found: HashMap<Number, Arc<Device>>,
}

impl<'a> Finder<'a> {
    /// Nothing is known yet.
    pub fn new(guest: &'a Guest, wait: Wait) -> Self {
        Self { guest, wait, found: HashMap::new() }
    }

    /// The device with this number.
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

/// The disks below a device, in the kernel's order.
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
    // A partition of a virtual disk has no parts of its own: it is where the disk is.
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

/// The disk or partition at `place`, whose number is read where it is not known.
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

/// What every disk and partition has read and written, in the kernel's order.
///
/// # Errors
/// If the kernel keeps no such list.
pub fn statistics(root: &Root) -> Result<Vec<Statistics>, Error> {
    const PATH: &str = "/proc/diskstats";
    let file = root.read(PATH).map_err(|source| Error::Unreadable { path: PATH, source })?;
    Ok(diskstats::parse(&String::from_utf8_lossy(&file)))
}
