//! Places in a VM where a disk can be plugged, taken from the controllers and ports in QEMU's object tree.
//!
//! The object tree is accurate at any time, whereas `query-pci` shows the devices behind a port only after the
//! guest has enumerated the buses.

use serde_json::{Value, json};

use super::super::super::disks::{Bus, DiskError};
use super::super::link::{CallError, Link};
use super::seen::{PERIPHERAL, properties};

/// QOM path of the devices without an identifier.
const ANONYMOUS: &str = "/machine/peripheral-anon";
/// Number of targets of a virtio-scsi controller.
const TARGETS: usize = 256;

/// Finds a bus with a free place for a disk of this kind, and returns its QEMU name.
///
/// # Errors
/// If there is no free place.
pub async fn find(link: &Link, bus: Bus) -> Result<String, DiskError> {
    match bus {
        Bus::Scsi => controller(link).await,
        Bus::VirtioBlk => port(link).await,
    }
}

/// Returns the number of free places for disks of this kind.
///
/// # Errors
/// If QEMU does not answer, or has no controller or port for such disks.
pub async fn free(link: &Link, bus: Bus) -> Result<usize, DiskError> {
    match bus {
        Bus::Scsi => {
            let free = controllers(link).await?.into_iter().map(|(_, count)| TARGETS.saturating_sub(count));
            free.reduce(usize::saturating_add).ok_or_else(no_controller)
        }
        Bus::VirtioBlk => Ok(ports(link, usize::MAX).await?.len()),
    }
}

/// Returns the virtio-scsi controller with the fewest disks.
async fn controller(link: &Link) -> Result<String, DiskError> {
    match controllers(link).await?.into_iter().min_by_key(|(_, count)| *count) {
        None => Err(no_controller()),
        Some((_, TARGETS..)) => Err(DiskError::ControllersFull),
        Some((bus, _)) => Ok(bus),
    }
}

/// Returns the buses of the virtio-scsi controllers, with the number of disks on each.
async fn controllers(link: &Link) -> Result<Vec<(String, usize)>, DiskError> {
    let mut found = Vec::new();
    for controller in of_kinds(link, |kind| kind.starts_with("virtio-scsi-")).await? {
        found.extend(buses(link, &format!("{controller}/virtio-backend"), "SCSI").await?);
    }
    Ok(found)
}

/// Returns the error for a VM without a virtio-scsi controller.
pub fn no_controller() -> DiskError {
    let words =
        "the VM has no virtio-scsi controller; give QEMU -device virtio-scsi-pci, or use the virtio bus";
    DiskError::NoController(words.to_owned())
}

/// Returns an empty port.
async fn port(link: &Link) -> Result<String, DiskError> {
    let words = "the VM has no free PCI Express root port; give QEMU more -device pcie-root-port, or use the scsi bus";
    ports(link, 1).await?.pop().ok_or_else(|| DiskError::NoPort(words.to_owned()))
}

/// Returns the buses of the first empty ports, at most `most` because each takes several queries.
async fn ports(link: &Link, most: usize) -> Result<Vec<String>, DiskError> {
    let mut free = Vec::new();
    for port in of_kinds(link, |kind| matches!(kind, "pcie-root-port" | "ioh3420")).await? {
        let pluggable = link.call("qom-get", json!({ "path": port, "property": "hotplug" })).await;
        match pluggable {
            Ok(Value::Bool(false)) => continue,
            // Ports without the property always support hot-plug.
            Ok(_) | Err(CallError::Refused { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        if let Some((bus, 0)) = buses(link, &port, "PCIE").await?.into_iter().next() {
            free.push(bus);
            if free.len() == most {
                break;
            }
        }
    }
    Ok(free)
}

/// Returns the paths of all devices of the wanted types.
async fn of_kinds(link: &Link, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>, DiskError> {
    let mut paths = Vec::new();
    for folder in [PERIPHERAL, ANONYMOUS] {
        let list = properties(link, folder).await?;
        let devices = list.iter().filter(|one| one.child().is_some_and(&wanted));
        paths.extend(devices.map(|one| format!("{folder}/{}", one.name)));
    }
    // Sort the ports by name, because QEMU's order is not defined.
    paths.sort();
    Ok(paths)
}

/// Returns the buses of this type that a device has, with the number of devices on each.
async fn buses(link: &Link, device: &str, kind: &str) -> Result<Vec<(String, usize)>, DiskError> {
    let mut found = Vec::new();
    for bus in properties(link, device).await? {
        if bus.child() == Some(kind) {
            let on_it = properties(link, &format!("{device}/{}", bus.name)).await?;
            let count = on_it.iter().filter(|one| one.name.starts_with("child[")).count();
            found.push((bus.name, count));
        }
    }
    Ok(found)
}
