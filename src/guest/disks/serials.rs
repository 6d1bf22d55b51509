//! Serial numbers of disks: udev's word where it runs, or else the disk's own.
//!
//! To ask a virtual disk for its serial number is a request to the host, which takes longer than everything else
//! that is told of it. It is asked once, until there is another disk at its place.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

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
    /// The serial number of the block device with this number, which is at `place`. May take as long as the disk
    /// does.
    pub fn get(&self, root: &Root, place: &str, number: Number) -> Option<String> {
        let entry = udev::block_device(root, number);
        let told = entry.as_deref().and_then(|entry| udev::property(entry, "ID_SERIAL"));
        told.map(str::to_owned).or_else(|| self.own(root, block::whole(place)))
    }

    fn own(&self, root: &Root, disk: &str) -> Option<String> {
        let generation = block::generation(root, disk)?;
        if let Some(told) = self.known().get(disk).filter(|told| told.generation == generation) {
            return told.serial.clone();
        }
        // Nobody else waits while the disk is asked.
        let serial = disk_serial::read(root, disk);
        let mut known = self.known();
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.insert(disk.to_owned(), Told { generation, serial: serial.clone() });
        serial
    }

    fn known(&self) -> std::sync::MutexGuard<'_, HashMap<String, Told>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
