//! Location of a disk, read from its path in sysfs.

/// Buses that a guest's disk may be on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Bus {
    /// Parallel ATA (IDE).
    Ide,
    /// SCSI, also on virtio-scsi.
    Scsi,
    /// Device of virtio-blk, not of virtio-scsi.
    Virtio,
    /// Xen's paravirtual block device.
    Xen,
    /// USB mass storage.
    Usb,
    /// Serial ATA, on an AHCI controller.
    Sata,
    /// NVMe namespace.
    Nvme,
    /// Other or unrecognised bus.
    #[default]
    Unknown,
}

impl Bus {
    /// Returns the name of the bus in one word, such as `virtio`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ide => "ide",
            Self::Scsi => "scsi",
            Self::Virtio => "virtio",
            Self::Xen => "xen",
            Self::Usb => "usb",
            Self::Sata => "sata",
            Self::Nvme => "nvme",
            Self::Unknown => "unknown",
        }
    }
}

/// Address of a PCI function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pci {
    /// PCI domain, also called segment.
    pub domain: u32,
    /// PCI bus number.
    pub bus: u32,
    /// Slot, also called device number.
    pub slot: u32,
    /// PCI function number.
    pub function: u32,
}

/// Address of a channel device of s390.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Channel {
    /// Channel subsystem ID.
    pub subsystem: u32,
    /// Subchannel set.
    pub set: u32,
    /// Subchannel number.
    pub subchannel: u32,
    /// Device number on the subchannel.
    pub device: u32,
}

/// Location of a disk. Numbers that do not exist on its bus are 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Location {
    /// PCI address of the controller, if it is a PCI function.
    pub pci: Option<Pci>,
    /// Address of the controller, if it is a channel device.
    pub channel: Option<Channel>,
    /// Bus that the disk is on.
    pub kind: Bus,
    /// Bus number of the controller.
    pub bus: u32,
    /// Target number on the bus.
    pub target: u32,
    /// Unit number on the target.
    pub unit: u32,
}

/// Returns the location of the disk with this path. `driver` returns the name of the driver of the device at a
/// path. `numbered` returns the sorted numbers of those entries of a directory that consist of a name and a
/// number.
pub fn locate(
    place: &str,
    driver: impl Fn(&str) -> Option<String>,
    numbered: impl Fn(&str, &str) -> Vec<u32>,
) -> Location {
    if let Some((pci, kind)) = pci(place, driver) {
        let found = match kind {
            Controller::AtaPiix => ide(place, numbered),
            Controller::Sym53c8xx => scsi(place).map(|[_, target, _]| Location {
                kind: Bus::Scsi,
                unit: target,
                ..Location::default()
            }),
            Controller::Virtio => Some(virtio(place)),
            Controller::Ahci => sata(place, numbered),
            Controller::Nvme => Some(Location { kind: Bus::Nvme, ..Location::default() }),
            Controller::Usb => Some(Location { kind: Bus::Usb, ..Location::default() }),
        };
        return Location { pci: Some(pci), ..found.unwrap_or_default() };
    }
    if let Some(channel) = channel(place) {
        let found = if place.contains("/virtio") { virtio(place) } else { Location::default() };
        return Location { channel: Some(channel), ..found };
    }
    if place.contains("/virtio") && place.contains("/block") {
        return virtio(place);
    }
    let kind = if place.contains("/devices/vbd-") { Bus::Xen } else { Bus::Unknown };
    Location { kind, ..Location::default() }
}

/// Disk controllers, which differ in how they number their disks.
#[derive(Debug, Clone, Copy)]
enum Controller {
    AtaPiix,
    Sym53c8xx,
    Virtio,
    Ahci,
    Nvme,
    Usb,
}

impl Controller {
    fn of_driver(name: &str) -> Option<Self> {
        Some(match name {
            "ata_piix" => Self::AtaPiix,
            "sym53c8xx" => Self::Sym53c8xx,
            "virtio-pci" => Self::Virtio,
            "ahci" => Self::Ahci,
            "nvme" => Self::Nvme,
            "xhci_hcd" | "xhci-pci" | "ehci-pci" | "uhci_hcd" | "ohci-pci" => Self::Usb,
            _ => return None,
        })
    }
}

/// Returns the first PCI function in the path that is a disk controller; those before it are bridges.
fn pci(place: &str, driver: impl Fn(&str) -> Option<String>) -> Option<(Pci, Controller)> {
    let mut path = place.len() - place.split_once("/pci")?.1.len();
    // The host bridge is not always directly below /sys/devices: with a device tree it is below its own platform
    // device.
    let (root, rest) = place[path..].split_once('/')?;
    numbers::<2>(root, &[':'])?;
    path += root.len();
    for part in rest.split('/') {
        path += 1 + part.len();
        let [domain, bus, slot, function] = numbers(part, &[':', ':', '.'])?;
        if let Some(kind) = driver(&place[..path]).and_then(|name| Controller::of_driver(&name)) {
            return Some((Pci { domain, bus, slot, function }, kind));
        }
    }
    None
}

/// Parses the address out of a path such as `/sys/devices/css0/0.0.0001/0.0.2000/…`.
fn channel(place: &str) -> Option<Channel> {
    let mut parts = place.split_once("/devices/css")?.1.split('/').skip(1);
    let [subsystem, set, subchannel] = numbers(parts.next()?, &['.', '.'])?;
    let [_, _, device] = numbers(parts.next()?, &['.', '.'])?;
    Some(Channel { subsystem, set, subchannel, device })
}

/// Returns the location on a virtio device: virtio-blk has one disk for each device, virtio-scsi has buses,
/// targets and units.
fn virtio(place: &str) -> Location {
    match scsi(place) {
        Some([bus, target, unit]) => Location { kind: Bus::Scsi, bus, target, unit, ..Location::default() },
        None => Location { kind: Bus::Virtio, ..Location::default() },
    }
}

/// Returns the location on an IDE controller, which has one SCSI host for each bus, with two units.
fn ide(place: &str, numbered: impl Fn(&str, &str) -> Vec<u32>) -> Option<Location> {
    let [_, unit, _] = scsi(place)?;
    Some(Location { kind: Bus::Ide, bus: port(place, numbered)?, unit, ..Location::default() })
}

/// Returns the location on an AHCI controller, which has one SCSI host for each unit.
fn sata(place: &str, numbered: impl Fn(&str, &str) -> Vec<u32>) -> Option<Location> {
    scsi(place)?;
    Some(Location { kind: Bus::Sata, unit: port(place, numbered)?, ..Location::default() })
}

/// Returns channel, target and unit of `…/target2:0:1/2:0:1:3/…`.
fn scsi(place: &str) -> Option<[u32; 3]> {
    let address = place.split_once("/target")?.1.split('/').nth(1)?;
    let mut parts = address.split(':').map(str::parse);
    let [_host, channel, target, unit] =
        [parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.ok()?];
    Some([channel, target, unit])
}

/// Returns the index of the port, or SCSI host, on its controller. The kernel's own numbers count through the
/// whole machine.
fn port(place: &str, numbered: impl Fn(&str, &str) -> Vec<u32>) -> Option<u32> {
    let found = ["ata", "host"].iter().find_map(|name| {
        let (controller, rest) = place.split_once(&format!("/{name}"))?;
        let number: u32 = rest.split('/').next()?.parse().ok()?;
        Some((controller, name, number))
    });
    let (controller, name, number) = found?;
    numbered(controller, name).iter().position(|other| *other == number)?.try_into().ok()
}

/// Parses hexadecimal numbers that are separated by the given characters.
fn numbers<const COUNT: usize>(text: &str, between: &[char]) -> Option<[u32; COUNT]> {
    let mut found = [0; COUNT];
    let mut rest = text;
    for (place, number) in found.iter_mut().enumerate() {
        let digits = if let Some(separator) = between.get(place) {
            let (digits, after) = rest.split_once(*separator)?;
            rest = after;
            digits
        } else {
            rest
        };
        *number = u32::from_str_radix(digits, 16).ok()?;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Calls `locate` with the driver of each device that has one, and with the numbers of a controller's ports.
    fn located(place: &str, drivers: &[(&str, &str)], ports: &[u32]) -> Location {
        let driver = |device: &str| {
            drivers.iter().find(|(end, _)| device.ends_with(end)).map(|(_, name)| (*name).to_owned())
        };
        locate(place, driver, |_, _| ports.to_vec())
    }

    fn at(kind: Bus, [bus, target, unit]: [u32; 3]) -> Location {
        Location { kind, bus, target, unit, ..Location::default() }
    }

    fn on_pci(bus: u32, slot: u32, function: u32, location: Location) -> Location {
        Location { pci: Some(Pci { domain: 0, bus, slot, function }), ..location }
    }

    #[test]
    #[allow(clippy::too_many_lines, reason = "a table")]
    fn places_of_disks() {
        let virtio = [("02.0", "pcieport"), ("00.0", "virtio-pci"), ("04.0", "virtio-pci")];
        let ata = [("1f.2", "ahci"), ("01.1", "ata_piix"), ("07.0", "sym53c8xx")];
        let other = [("05.0", "nvme"), ("1d.7", "xhci_hcd"), ("08.0", "megaraid_sas")];
        let cases = [
            (
                "virtio-blk behind a port",
                located(
                    "/sys/devices/pci0000:00/0000:00:02.0/0000:01:00.0/virtio2/block/vda/vda1",
                    &virtio,
                    &[],
                ),
                on_pci(1, 0, 0, at(Bus::Virtio, [0, 0, 0])),
            ),
            (
                "virtio-scsi",
                located(
                    "/sys/devices/pci0000:00/0000:00:04.0/virtio1/host2/target2:0:1/2:0:1:3/block/sda",
                    &virtio,
                    &[],
                ),
                on_pci(0, 4, 0, at(Bus::Scsi, [0, 1, 3])),
            ),
            (
                "SATA",
                located(
                    "/sys/devices/pci0000:00/0000:00:1f.2/ata5/host4/target4:0:0/4:0:0:0/block/sdb",
                    &ata,
                    &[3, 4, 5, 6],
                ),
                on_pci(0, 0x1f, 2, at(Bus::Sata, [0, 0, 2])),
            ),
            (
                "IDE, second bus, second unit",
                located(
                    "/sys/devices/pci0000:00/0000:00:01.1/ata2/host1/target1:0:1/1:0:1:0/block/sdb/sdb1",
                    &ata,
                    &[1, 2],
                ),
                on_pci(0, 1, 1, at(Bus::Ide, [1, 0, 1])),
            ),
            (
                "LSI Logic",
                located(
                    "/sys/devices/pci0000:00/0000:00:07.0/host0/target0:0:4/0:0:4:0/block/sda",
                    &ata,
                    &[],
                ),
                on_pci(0, 7, 0, at(Bus::Scsi, [0, 0, 4])),
            ),
            (
                "a SATA disk that has vanished from its controller",
                located(
                    "/sys/devices/pci0000:00/0000:00:1f.2/ata5/host4/target4:0:0/4:0:0:0/block/sdb",
                    &ata,
                    &[],
                ),
                on_pci(0, 0x1f, 2, Location::default()),
            ),
            (
                "NVMe",
                located("/sys/devices/pci0000:00/0000:00:05.0/nvme/nvme0/nvme0n1", &other, &[]),
                on_pci(0, 5, 0, at(Bus::Nvme, [0, 0, 0])),
            ),
            (
                "USB",
                located(
                    "/sys/devices/pci0000:00/0000:00:1d.7/usb1/1-1/1-1:1.0/host6/target6:0:0/6:0:0:0/block/sdc",
                    &other,
                    &[],
                ),
                on_pci(0, 0x1d, 7, at(Bus::Usb, [0, 0, 0])),
            ),
            (
                "a controller that nobody knows",
                located(
                    "/sys/devices/pci0000:00/0000:00:08.0/host0/target0:2:0/0:2:0:0/block/sda",
                    &other,
                    &[],
                ),
                Location::default(),
            ),
            (
                "virtio-blk, PCI from a device tree",
                located(
                    "/sys/devices/platform/4010000000.pcie/pci0000:00/0000:00:04.0/virtio1/block/vda",
                    &virtio,
                    &[],
                ),
                on_pci(0, 4, 0, at(Bus::Virtio, [0, 0, 0])),
            ),
            (
                "virtio-mmio",
                located("/sys/devices/platform/a000000.virtio_mmio/virtio0/block/vda", &[], &[]),
                at(Bus::Virtio, [0, 0, 0]),
            ),
            ("Xen", located("/sys/devices/vbd-51712/block/xvda", &[], &[]), at(Bus::Xen, [0, 0, 0])),
            (
                "a channel device",
                located("/sys/devices/css0/fe.0.0001/fe.0.2a00/virtio1/block/vda", &[], &[]),
                Location {
                    channel: Some(Channel { subsystem: 0xfe, set: 0, subchannel: 1, device: 0x2a00 }),
                    ..at(Bus::Virtio, [0, 0, 0])
                },
            ),
        ];
        for (name, found, expected) in cases {
            assert_eq!(found, expected, "{name}");
        }
    }

    proptest! {
        #[test]
        fn any_path_will_do(place in "(/(devices|pci[0-9a-f:]{0,8}|[0-9a-f:.]{0,12}|css[0-9]|target[0-9:]*|ata[0-9]*|virtio|\\PC{0,5})){0,9}") {
            for driver in ["ahci", "ata_piix", "virtio-pci", "sym53c8xx"] {
                let found = locate(&place, |_| Some(driver.to_owned()), |_, _| vec![0, 1]);
                prop_assert!(found.pci.is_none() || found.channel.is_none());
            }
        }
    }
}
