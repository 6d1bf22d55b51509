//! QEMU's view of a VM's disks, read again for every operation because no state about them is stored.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::super::disks::{AttachedDisk, Bus, DiskError};
use super::super::link::{CallError, Link};
use super::naming;

/// QOM path of the devices with an identifier.
pub const PERIPHERAL: &str = "/machine/peripheral";
/// Number of bytes of a serial number that QEMU's SCSI disks show as such, in page 80h.
const PAGE_80: usize = 36;

/// Devices, nodes and disks of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// QOM types of the devices with an identifier.
    pub devices: BTreeMap<String, String>,
    /// Named block nodes, by name.
    pub nodes: BTreeMap<String, Node>,
    /// Disks that the guest sees.
    pub disks: Vec<Disk>,
}

/// Named block node.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Node {
    /// Node name.
    #[serde(rename = "node-name", default)]
    pub name: String,
    /// Backing file or device.
    pub file: String,
    /// Format driver.
    #[serde(rename = "drv")]
    pub format: String,
    /// True if it is read-only.
    #[serde(rename = "ro")]
    pub read_only: bool,
    /// Image information.
    pub image: Image,
}

/// Image information of a block node.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Image {
    /// Virtual size in bytes.
    #[serde(rename = "virtual-size")]
    pub size: u64,
}

/// Disk that the guest sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Identifier or QOM path of its device.
    pub device: String,
    /// Full serial number, even if QEMU's property of this name has less of it than a guest can read; may be empty.
    pub serial: String,
    /// Block node that backs it.
    pub node: Node,
}

/// Entry in the result of `query-block`.
#[derive(Deserialize)]
struct Block {
    qdev: Option<String>,
    inserted: Option<Node>,
    #[serde(rename = "io-status")]
    io_status: Option<String>,
}

/// Property in the result of `qom-list`.
#[derive(Debug, Deserialize)]
pub struct Property {
    /// Name of the property.
    pub name: String,
    /// Type of the property, such as `child<scsi-hd>`.
    #[serde(rename = "type")]
    pub kind: String,
}

impl Property {
    /// Returns the type of the child object, if the property is one.
    pub fn child(&self) -> Option<&str> {
        self.kind.strip_prefix("child<")?.strip_suffix('>')
    }
}

impl From<CallError> for DiskError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused { .. } => Self::Refused(error.to_string()),
            _ => Self::Unreachable(error.to_string()),
        }
    }
}

/// Runs a command and parses its answer.
pub async fn ask<T: DeserializeOwned>(
    link: &Link,
    command: &'static str,
    arguments: Value,
) -> Result<T, DiskError> {
    let answer = link.call(command, arguments).await?;
    serde_json::from_value(answer).map_err(|_| strange(command))
}

fn strange(command: &str) -> DiskError {
    DiskError::Strange(format!("QEMU's answer to {command} is not understood"))
}

/// Returns the properties of an object; empty if the object does not exist.
pub async fn properties(link: &Link, path: &str) -> Result<Vec<Property>, DiskError> {
    match link.call("qom-list", json!({ "path": path })).await {
        Ok(list) => serde_json::from_value(list).map_err(|_| strange("qom-list")),
        Err(CallError::Refused { class, .. }) if class == "DeviceNotFound" => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

/// Returns a text property of a device; empty if the device does not have it.
async fn property(link: &Link, path: &str, name: &str) -> Result<String, DiskError> {
    match link.call("qom-get", json!({ "path": path, "property": name })).await {
        Ok(Value::String(text)) => Ok(text),
        // Not every device has every property.
        Ok(_) | Err(CallError::Refused { .. }) => Ok(String::new()),
        Err(error) => Err(error.into()),
    }
}

/// Returns the part of a serial number that a SCSI disk shows as its serial number, in page 80h.
pub fn page80(serial: &str) -> &str {
    serial.get(..PAGE_80).unwrap_or(serial)
}

/// Returns the full serial number: that of page 83h, if the two begin alike.
fn whole(serial: String, device_id: String) -> String {
    if page80(&device_id) == serial { device_id } else { serial }
}

/// Returns the full serial number of the disk that is this device; empty if it has none.
pub async fn serial(link: &Link, device: &str) -> Result<String, DiskError> {
    let path = if device.starts_with('/') { device.to_owned() } else { format!("{PERIPHERAL}/{device}") };
    let serial = property(link, &path, "serial").await?;
    if serial.len() == PAGE_80 {
        return Ok(whole(serial, property(link, &path, "device_id").await?));
    }
    Ok(serial)
}

/// Returns the identifier in QEMU's name of a device; the whole name, which is never an identifier, if it has
/// none.
pub fn identifier(device: &str) -> &str {
    let path = device.strip_prefix(PERIPHERAL).and_then(|rest| rest.strip_prefix('/'));
    path.map_or(device, |rest| rest.split('/').next().unwrap_or(rest))
}

/// Returns the part of a device's serial number that a guest can read.
pub fn visible<'s>(device: &str, serial: &'s str) -> &'s str {
    serial.get(..bus_at(device).longest_serial()).unwrap_or(serial)
}

fn bus_at(device: &str) -> Bus {
    // Only virtio-blk has its block backend in a child of the device with the identifier.
    if device.ends_with("/virtio-backend") { Bus::VirtioBlk } else { Bus::Scsi }
}

/// Reads the devices with an identifier.
pub async fn devices(link: &Link) -> Result<BTreeMap<String, String>, DiskError> {
    let list = properties(link, PERIPHERAL).await?;
    let children = list.into_iter().filter_map(|one| Some((one.child()?.to_owned(), one.name)));
    Ok(children.map(|(kind, name)| (name, kind)).collect())
}

/// Reads the named block nodes.
pub async fn nodes(link: &Link) -> Result<BTreeMap<String, Node>, DiskError> {
    let list: Vec<Node> = ask(link, "query-named-block-nodes", json!({ "flat": true })).await?;
    Ok(list.into_iter().map(|node| (node.name.clone(), node)).collect())
}

/// Returns the block nodes that have stopped the VM, and for each whether it was for lack of space.
pub async fn failed(link: &Link) -> Result<Vec<(String, bool)>, DiskError> {
    let blocks: Vec<Block> = ask(link, "query-block", Value::Null).await?;
    let failed = |block: Block| {
        let status = block.io_status.filter(|status| status != "ok")?;
        Some((block.inserted?.name, status == "nospace"))
    };
    Ok(blocks.into_iter().filter_map(failed).collect())
}

impl Seen {
    /// Reads the present state from QEMU.
    ///
    /// # Errors
    /// If QEMU does not answer, or its answer cannot be parsed.
    pub async fn read(link: &Link) -> Result<Self, DiskError> {
        let (devices, nodes) = (devices(link).await?, nodes(link).await?);
        let blocks: Vec<Block> = ask(link, "query-block", Value::Null).await?;
        let mut disks = Vec::new();
        for block in blocks {
            let (Some(device), Some(node)) = (block.qdev, block.inserted) else { continue };
            let serial = serial(link, &device).await?;
            disks.push(Disk { device, serial, node });
        }
        Ok(Self { devices, nodes, disks })
    }

    /// Returns the disk whose device has this identifier.
    pub fn disk(&self, identifier: &str) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.identifier() == identifier)
    }

    /// Returns the disk with this serial number but a different identifier.
    fn other_with(&self, serial: &str, identifier: &str) -> Option<&Disk> {
        let alike = |disk: &&Disk| disk.identifier() != identifier && disk.visible_serial() == serial;
        self.disks.iter().find(alike)
    }

    /// Returns a disk with a different identifier that a guest may confuse with one on `bus` with this serial
    /// number, because somewhere only a common part of the two serial numbers can be read.
    pub fn confusable(&self, serial: &str, bus: Bus, identifier: &str) -> Option<&Disk> {
        let shown = if bus == Bus::Scsi { page80(serial) } else { serial };
        self.other_with(serial, identifier).or_else(|| {
            let alike = |disk: &&Disk| {
                let theirs = disk.visible_serial();
                let on_scsi = disk.bus() == Bus::Scsi;
                disk.identifier() != identifier && (theirs == shown || on_scsi && page80(theirs) == serial)
            };
            self.disks.iter().find(alike)
        })
    }

    /// Returns guestlet's disk with this serial number.
    ///
    /// # Errors
    /// If there is no such disk, or it is not guestlet's.
    pub fn ours(&self, serial: &str) -> Result<&Disk, DiskError> {
        let name = naming::name(serial);
        match (self.disk(&name), self.other_with(serial, &name)) {
            (Some(disk), _) if disk.serial == serial => Ok(disk),
            (_, Some(other)) => {
                Err(DiskError::NotOurs { serial: serial.to_owned(), device: other.device.clone() })
            }
            _ => Err(DiskError::NotAttached(serial.to_owned())),
        }
    }

    /// Converts a disk for the answer to a client.
    pub fn describe(&self, disk: &Disk) -> AttachedDisk {
        let kind = self.devices.get(disk.identifier()).map(String::as_str);
        let bus = kind.filter(|_| naming::is_ours(disk.identifier())).and_then(bus_of);
        AttachedDisk {
            serial: disk.visible_serial().to_owned(),
            bus,
            file: disk.node.file.clone(),
            format: disk.node.format.clone(),
            size: disk.node.image.size,
            read_only: disk.node.read_only,
            device: disk.device.clone(),
            ours: bus.is_some() && naming::name(&disk.serial) == disk.identifier(),
        }
    }
}

impl Disk {
    /// Returns the identifier of its device; if the device has none, a text that is never an identifier.
    pub fn identifier(&self) -> &str {
        identifier(&self.device)
    }

    fn bus(&self) -> Bus {
        bus_at(&self.device)
    }

    /// Returns the part of the serial number that a guest can read.
    fn visible_serial(&self) -> &str {
        visible(&self.device, &self.serial)
    }
}

/// Returns the bus of a device of this QOM type.
pub fn bus_of(kind: &str) -> Option<Bus> {
    match kind {
        "scsi-hd" => Some(Bus::Scsi),
        _ if kind.starts_with("virtio-blk-") => Some(Bus::VirtioBlk),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(device: &str, serial: &str) -> Disk {
        let node = json!({"node-name": "n", "file": "/f", "drv": "raw", "ro": false, "image": {"virtual-size": 512}});
        Disk { device: device.into(), serial: serial.into(), node: serde_json::from_value(node).unwrap() }
    }

    #[test]
    fn devices_are_known_by_their_identifier_or_path() {
        for (device, expected) in [
            ("data", "data"),
            ("/machine/peripheral/data/virtio-backend", "data"),
            ("/machine/peripheral/data", "data"),
            (
                "/machine/peripheral-anon/device[2]/virtio-backend",
                "/machine/peripheral-anon/device[2]/virtio-backend",
            ),
        ] {
            assert_eq!(disk(device, "").identifier(), expected);
        }
    }

    #[test]
    fn long_serials_go_on_in_the_identifier() {
        let long = "pvc-11111111-2222-3333-4444-555555555555";
        let (first, own) = (|| page80(long).to_owned(), |text: &str| text.to_owned());
        assert_eq!(first().len(), 36);
        assert_eq!(whole(first(), own(long)), long);
        // The aliases of other programs' disks do not continue the serial number.
        assert_eq!(whole(first(), own("ua-volume")), first());
        assert_eq!(whole(first(), String::new()), first());
        assert_eq!(page80("short"), "short");
        let seen = |serial: &str| Seen { disks: vec![disk("a", serial)], ..Seen::default() };
        let other = "pvc-11111111-2222-3333-4444-555555556666";
        for (there, wanted, bus, confusable) in [
            (long, long, Bus::Scsi, true),
            (long, page80(long), Bus::Scsi, true),
            (page80(long), long, Bus::Scsi, true),
            (long, other, Bus::Scsi, false),
            (long, &long[..20], Bus::VirtioBlk, false),
        ] {
            let found = seen(there);
            assert_eq!(found.confusable(wanted, bus, "x").is_some(), confusable, "{there} {wanted}");
            assert_eq!(found.confusable(wanted, bus, "a"), None);
        }
        assert!(matches!(seen(long).ours(page80(long)), Err(DiskError::NotAttached(_))));
    }

    #[test]
    fn serials_that_a_guest_cannot_tell_apart() {
        let long = "pvc-0123456789abcdef-and-more";
        let (scsi, virtio) = (disk("a", long), disk("/machine/peripheral/b/virtio-backend", long));
        let seen = Seen { disks: vec![scsi, virtio], ..Seen::default() };
        assert_eq!(seen.other_with(long, "x").unwrap().device, "a");
        assert_eq!(seen.other_with(&long[..20], "x").unwrap().identifier(), "b");
        assert_eq!(seen.other_with(long, "a"), None);
        assert!(matches!(seen.ours(long), Err(DiskError::NotOurs { device, .. }) if device == "a"));
        assert!(matches!(seen.ours("other"), Err(DiskError::NotAttached(_))));
    }
}
