//! Serial numbers of disks: udev's word where it runs, or else the disk's own.
//!
//! To ask a virtual disk for its serial number is a request to the host, which takes longer than everything else
//! that is told of it. It is asked once, until there is another disk at its place.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::guest::disks::{Error, Wait};
use crate::sys::block::{self, Number};
use crate::sys::root::Root;
use crate::sys::{disk_serial, udev};

/// Disks that are known at the same time; more than any machine has.
const MAX_KNOWN: usize = 4096;

/// Serial numbers that disks have told.
#[derive(Debug, Default)]
pub struct Serials(Mutex<HashMap<String, Told>>);

#[derive(Debug)]
struct Told {
    generation: u64,
    serial: Option<String>,
}

impl Serials {
    /// The serial number of the block device with this number, which is at `place`.
    ///
    /// # Errors
    /// [`Error::MustWait`] only.
    pub fn get(&self, root: &Root, place: &str, number: Number, wait: Wait) -> Result<Option<String>, Error> {
        let entry = udev::block_device(root, number);
        match entry.as_deref().and_then(|entry| udev::property(entry, "ID_SERIAL")) {
            Some(told) => Ok(Some(told.to_owned())),
            None => self.own(root, block::whole(place), wait),
        }
    }

    fn own(&self, root: &Root, disk: &str, wait: Wait) -> Result<Option<String>, Error> {
        let Some(generation) = block::generation(root, disk) else { return Ok(None) };
        if let Some(told) = self.known().get(disk).filter(|told| told.generation == generation) {
            return Ok(told.serial.clone());
        }
        if wait == Wait::Cannot {
            return Err(Error::MustWait);
        }
        // Nobody else waits for the lock while the disk is asked.
        let serial = disk_serial::read(root, disk);
        let mut known = self.known();
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.insert(disk.to_owned(), Told { generation, serial: serial.clone() });
        Ok(serial)
    }

    fn known(&self) -> MutexGuard<'_, HashMap<String, Told>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
