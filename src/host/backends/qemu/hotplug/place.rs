//! Where in a VM a disk can be plugged: what QEMU's object tree says of its controllers and ports.
//!
//! The object tree is right at any time; `query-pci` tells what is behind a port only once the guest has numbered
//! the buses.

use serde_json::{Value, json};

use super::super::super::disks::{Bus, DiskError};
use super::super::link::{CallError, Link};
use super::seen::{PERIPHERAL, properties};

/// Devices without an identifier are below this.
const ANONYMOUS: &str = "/machine/peripheral-anon";
/// Targets of a virtio-scsi controller.
const TARGETS: usize = 256;

/// The QEMU name of the bus on which a disk of this kind has room.
///
/// # Errors
/// If there is none.
pub async fn find(link: &Link, bus: Bus) -> Result<String, DiskError> {
    match bus {
        Bus::Scsi => controller(link).await,
        Bus::VirtioBlk => port(link).await,
    }
}

/// How many more disks of this kind there is room for.
///
/// # Errors
/// If QEMU does not say, or has nothing for such disks.
pub async fn free(link: &Link, bus: Bus) -> Result<usize, DiskError> {
    match bus {
        Bus::Scsi => {
            let free = controllers(link).await?.into_iter().map(|(_, count)| TARGETS.saturating_sub(count));
            free.reduce(usize::saturating_add).ok_or_else(no_controller)
        }
        Bus::VirtioBlk => Ok(ports(link, usize::MAX).await?.len()),
    }
}

/// The virtio-scsi controller with the fewest disks.
async fn controller(link: &Link) -> Result<String, DiskError> {
    match controllers(link).await?.into_iter().min_by_key(|(_, count)| *count) {
        None => Err(no_controller()),
        Some((_, TARGETS..)) => Err(DiskError::ControllersFull),
        Some((bus, _)) => Ok(bus),
    }
}

/// The buses of the virtio-scsi controllers, and how many disks are on each.
async fn controllers(link: &Link) -> Result<Vec<(String, usize)>, DiskError> {
    let mut found = Vec::new();
    for controller in of_kinds(link, |kind| kind.starts_with("virtio-scsi-")).await? {
        found.extend(buses(link, &format!("{controller}/virtio-backend"), "SCSI").await?);
    }
    Ok(found)
}

/// The VM has none for the scsi bus.
pub fn no_controller() -> DiskError {
    let words =
        "the VM has no virtio-scsi controller; give QEMU -device virtio-scsi-pci, or use the virtio bus";
    DiskError::NoController(words.to_owned())
}

/// A port with nothing in it.
async fn port(link: &Link) -> Result<String, DiskError> {
    let words = "the VM has no free PCI Express root port; give QEMU more -device pcie-root-port, or use the scsi bus";
    ports(link, 1).await?.pop().ok_or_else(|| DiskError::NoPort(words.to_owned()))
}

/// The buses of the first ports with nothing in them, `most` at most: each takes several questions.
async fn ports(link: &Link, most: usize) -> Result<Vec<String>, DiskError> {
    let mut free = Vec::new();
    for port in of_kinds(link, |kind| matches!(kind, "pcie-root-port" | "ioh3420")).await? {
        let pluggable = link.call("qom-get", json!({ "path": port, "property": "hotplug" })).await;
        match pluggable {
            Ok(Value::Bool(false)) => continue,
            // Those that do not know the property can all be plugged.
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

/// The paths of all devices whose type is wanted.
async fn of_kinds(link: &Link, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>, DiskError> {
    let mut paths = Vec::new();
    for folder in [PERIPHERAL, ANONYMOUS] {
        let list = properties(link, folder).await?;
        let devices = list.iter().filter(|one| one.child().is_some_and(&wanted));
        paths.extend(devices.map(|one| format!("{folder}/{}", one.name)));
    }
    // Ports in the order of their names, whatever order QEMU keeps them in.
    paths.sort();
    Ok(paths)
}

/// The names of the buses of that type that a device has, and how many devices are on each.
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
