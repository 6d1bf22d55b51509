//! Serial numbers of disks for lists of disks: from udev where it runs, or else from the disk itself.
//!
//! Reading the serial number of a virtual disk is a request to the host, which takes longer than all other
//! properties of the disk together. The monitor of disks keeps the serial numbers that it has read in the
//! [`Room`]; only where the monitor does not run is the disk queried here.
//!
//! [`Room`]: crate::guest::disks::room::Room

use crate::guest::Guest;
use crate::guest::block_devices::{Error, Wait};
use crate::guest::disks::identity::Serial;
use crate::sys::block::{self, Number};
use crate::sys::{disk_serial, udev};

/// Returns the serial number of the block device with this number, whose sysfs path is `place`.
///
/// # Errors
/// [`Error::MustWait`] only.
pub fn get(guest: &Guest, place: &str, number: Number, wait: Wait) -> Result<Option<String>, Error> {
    let root = &guest.root;
    let entry = udev::block_device(root, number);
    if let Some(told) = entry.as_deref().and_then(|entry| udev::property(entry, "ID_SERIAL")) {
        return Ok(Some(told.to_owned()));
    }
    let disk = block::whole(place);
    let Some(generation) = block::generation(root, disk) else { return Ok(None) };
    if let Some(known) = guest.disks.all().iter().find(|known| known.generation == generation) {
        return Ok(known.serial().map(Serial::text));
    }
    if wait == Wait::Cannot {
        return Err(Error::MustWait);
    }
    Ok(disk_serial::read(root, disk))
}
