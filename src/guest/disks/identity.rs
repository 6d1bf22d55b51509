//! Identity of a disk: what the kernel knows of it, and what the disk itself reports.
//!
//! All of it can be read from sysfs without delay, with one exception: the kernel queries a virtio-blk disk for
//! its serial number each time that the attribute is read, and the disk may never respond. So a caller that can
//! wait [asks](Serial) once, and all else can be [read] without it. A SCSI disk is queried as well if the kernel
//! shows no data of it: the kernel was kept from asking, or asked while the disk was replacing another one.

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

use crate::guest::disks::location::{Bus, Pci, locate};
use crate::sys::block::{self, Number, Partition};
use crate::sys::root::Root;
use crate::sys::scsi_inquiry;
use crate::sys::sysfs;
use crate::sys::udev;
use crate::sys::vital_product_data::{self, trim};

/// Bytes of a serial number that virtio-blk and QEMU's SCSI disks have room for.
const VIRTIO_ROOM: usize = 20;
const QEMU_SCSI_ROOM: usize = 36;
/// Limit in bytes on a serial number or name; no disk reports a longer one.
const LONGEST: usize = 256;
/// Limit on the partitions and on the holders that are recorded of one disk.
const MOST: usize = 256;
/// SCSI device type of optical drives, which come and go without an event.
const DISC_DRIVE: &str = "5";

/// Source of a serial number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// Serial number of a virtio-blk disk, which has room for 20 bytes.
    Virtio,
    /// Page 80h of a SCSI disk's vital product data.
    Page80,
    /// Page 83h: the text by which the vendor, or whoever configured the disk, distinguishes it from all others.
    Page83,
    /// Controller of an NVMe disk, or another kind of disk with a serial number of its own.
    Device,
    /// udev, which has queried the disk in its own way.
    Udev,
}

impl Source {
    /// Returns the name of the source in one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::Page80 => "vpd80",
            Self::Page83 => "vpd83",
            Self::Device => "device",
            Self::Udev => "udev",
        }
    }
}

/// Serial number: one or more bytes, without padding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serial {
    /// Source that reports it.
    pub source: Source,
    /// Bytes of the serial number.
    pub value: Box<[u8]>,
    /// True if it fills the field that it was read from, so that it may be only the beginning of a longer one.
    pub cut: bool,
}

impl Serial {
    /// Extracts the serial number from what `source` has reported. Returns none if it is empty.
    pub fn new(source: Source, raw: &[u8]) -> Option<Self> {
        let value = trim(raw);
        let cut = match source {
            Source::Virtio => raw.len() == VIRTIO_ROOM,
            Source::Page80 => value.len() == QEMU_SCSI_ROOM,
            Source::Page83 | Source::Device | Source::Udev => false,
        };
        let value = value.get(..value.len().min(LONGEST))?;
        (!value.is_empty()).then(|| Self { source, value: value.into(), cut })
    }

    /// Returns the number of bytes that its source has room for.
    pub fn room(&self) -> usize {
        match self.source {
            Source::Virtio => VIRTIO_ROOM,
            Source::Page80 => QEMU_SCSI_ROOM,
            Source::Page83 | Source::Device | Source::Udev => LONGEST,
        }
    }

    /// Returns the serial number for people; bytes that are no text are replaced.
    pub fn text(&self) -> String {
        text(&self.value)
    }
}

/// Converts bytes to text for people.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace(char::is_control, "\u{fffd}")
}

/// Address of a SCSI disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScsiAddress {
    /// Number of the host adapter, given by the kernel.
    pub host: u32,
    /// Bus, also called channel, of the adapter.
    pub channel: u32,
    /// Target, also called ID.
    pub target: u32,
    /// Logical unit number (LUN).
    pub unit: u32,
}

impl fmt::Display for ScsiAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, channel, target, unit } = self;
        write!(formatter, "{host}:{channel}:{target}:{unit}")
    }
}

/// Device that is built on a disk or on one of its partitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Device name, such as `dm-0` or `md127`.
    pub name: String,
    /// Device number (major and minor).
    pub number: Option<Number>,
    /// Name given by device-mapper, such as `group-volume`.
    pub alias: Option<String>,
    /// Device that it is built on: the disk, or a partition such as `vda2`.
    pub of: String,
}

/// Disk as it was when last read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownDisk {
    /// Device name, such as `vda`. Another disk may get it later.
    pub name: String,
    /// Device node, such as `/dev/vda`.
    pub file: String,
    /// Path in sysfs.
    pub place: String,
    /// Device number (major and minor). Another disk may get it later.
    pub number: Number,
    /// Number that distinguishes it from all other disks that have had its name or number since the boot.
    pub generation: u64,
    /// Sequence number given by the kernel, which also changes with the medium; none before Linux 5.15.
    pub sequence: Option<u64>,
    /// Bus that the disk is on.
    pub bus: Bus,
    /// PCI address of its controller, if that is a PCI function.
    pub pci: Option<Pci>,
    /// SCSI address, if it is a SCSI disk or is presented as one.
    pub scsi: Option<ScsiAddress>,
    /// All serial numbers of the disk, the best first.
    pub serials: Vec<Serial>,
    /// Text of page 83h as QEMU sets it: `device_id`, libvirt's alias of the disk (`ua-…`), or the serial number.
    pub alias: Option<String>,
    /// World-wide name, such as `naa.5000000000000102`, `eui.0025385b71b00d1c` or `uuid.…`.
    pub wwn: Option<String>,
    /// Size in bytes.
    pub bytes: u64,
    /// Size of a logical sector in bytes.
    pub sector: u32,
    /// True if the disk cannot be written to.
    pub read_only: bool,
    /// True if the disk rotates, or reports that it does.
    pub rotational: bool,
    /// Partitions in the order of their table.
    pub partitions: Vec<Partition>,
    /// Devices built on the disk and on its partitions.
    pub holders: Vec<Holder>,
    /// True if the disk has not reported its identity in time, and was recorded without it.
    pub silent: bool,
}

impl KnownDisk {
    /// Returns the most informative serial number.
    pub fn serial(&self) -> Option<&Serial> {
        self.serials.first()
    }

    /// Returns whether the two cannot be the same disk, because they have different values for the same serial
    /// number or WWN.
    pub fn is_another(&self, other: &Self) -> bool {
        let differs = |serial: &Serial| {
            let same = |other: &&Serial| other.source == serial.source;
            other.serials.iter().find(same).is_some_and(|other| other.value != serial.value)
        };
        let names = self.wwn.as_ref().zip(other.wwn.as_ref());
        self.serials.iter().any(differs) || names.is_some_and(|(one, other)| one != other)
    }
}

/// State of the query for a serial number that only the disk itself can report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// Query now, and wait as long as it takes.
    Ask,
    /// Query now, as far as that is possible without opening the disk.
    AskUnopened,
    /// The disk has been queried, and this is its answer.
    Said(Option<Serial>),
    /// The disk has been queried, and does not respond.
    Silent,
}

/// Queries the disk at `place` for its serial number, if it is of a kind that has to be queried. May block
/// forever.
pub fn ask(root: &Root, place: &str) -> Option<Serial> {
    Serial::new(Source::Virtio, &root.read(&format!("{place}/serial")).ok()?)
}

/// Makes the kernel query a SCSI disk again for what it shows in sysfs, such as the size; other disks report
/// changes by themselves. May block forever.
pub fn have_asked_anew(root: &Root, place: &str) {
    match sysfs::write(root, &format!("{place}/device/rescan"), "1") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("cannot query the disk {} again: {error}", block::name(place));
        }
        _ => {}
    }
}

/// Returns the device number of the disk at `place`, if it is a disk of the machine that can be plugged and
/// unplugged. Devices that exist only in the kernel, optical drives and floppy disks do not count.
pub fn counts(root: &Root, place: &str) -> Option<Number> {
    let is_other = block::is_virtual(place)
        || place.contains("/platform/floppy")
        || root.line(&format!("{place}/device/type")) == DISC_DRIVE;
    // The single paths of a multipath disk, which the kernel shows as one disk elsewhere, have no number.
    if is_other { None } else { block::number(root, place) }
}

/// Reads the identity of the disk at `place`. `asked` is what the disk itself has reported; callers that cannot
/// wait must not pass a variant that queries the disk.
///
/// # Errors
/// `NotFound` if the disk does not exist or has disappeared meanwhile.
pub fn read(root: &Root, place: &str, asked: &Asked) -> io::Result<KnownDisk> {
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let generation = block::generation(root, place).ok_or_else(gone)?;
    let sequence = block::sequence(root, place);
    let (own, silent) = match asked {
        Asked::Ask | Asked::AskUnopened => (ask(root, place), false),
        Asked::Said(said) => (said.clone(), false),
        Asked::Silent => (None, true),
    };
    let name = block::name(place);
    let number = block::number(root, place).ok_or_else(gone)?;
    let line = |file: &str| root.line(&format!("{place}/{file}"));
    let controller = block::controller(root, place);
    let location = locate(
        controller.as_deref().unwrap_or(place),
        |device| block::driver(root, device),
        |folder, name| block::numbered(root, folder, name),
    );
    let scsi = scsi_address(place);
    // USB disks that the kernel does not query are known to malfunction when they are queried.
    let may_be_asked = *asked == Asked::Ask && scsi.is_some() && location.kind != Bus::Usb;
    let (page80, page83) = product_data(root, place, may_be_asked);
    let designation = vital_product_data::designation(&page83);
    let mut serials: Vec<_> = [
        own,
        vital_product_data::serial(&page80).and_then(|serial| Serial::new(Source::Page80, serial)),
        designation.text.and_then(|text| Serial::new(Source::Page83, text)),
        Serial::new(Source::Device, &root.read(&format!("{place}/device/serial")).unwrap_or_default()),
    ]
    .into_iter()
    .flatten()
    .collect();
    if serials.is_empty() {
        let entry = udev::block_device(root, number).unwrap_or_default();
        let told = udev::property(&entry, "ID_SERIAL_SHORT");
        serials.extend(told.and_then(|told| Serial::new(Source::Udev, told.as_bytes())));
    }
    let mut partitions = block::partitions(root, place);
    partitions.truncate(MOST);
    let mut holders = holders(root, place, name);
    for partition in &partitions {
        holders.extend(self::holders(root, &format!("{place}/{}", partition.name), &partition.name));
    }
    holders.truncate(MOST);
    let wwn = designation.name.or_else(|| Some(line("wwid")).filter(|name| is_world_wide(name)));
    let disk = KnownDisk {
        name: name.to_owned(),
        file: block::file(name),
        place: place.to_owned(),
        number,
        generation,
        sequence,
        bus: location.kind,
        pci: location.pci,
        scsi,
        serials,
        alias: designation.text.map(|alias| text(alias.get(..LONGEST).unwrap_or(alias))),
        wwn,
        bytes: block::bytes(root, place),
        sector: line("queue/logical_block_size").parse().unwrap_or(512),
        read_only: line("ro") == "1",
        rotational: line("queue/rotational") == "1",
        partitions,
        holders,
        silent,
    };
    // Another disk may have taken its place meanwhile.
    if is_still_there(root, &disk) { Ok(disk) } else { Err(gone()) }
}

/// Returns whether `disk` is still the one at its path. If so, all that was read by its name since then was read
/// from this disk.
pub fn is_still_there(root: &Root, disk: &KnownDisk) -> bool {
    block::generation(root, &disk.place) == Some(disk.generation)
        && block::sequence(root, &disk.place) == disk.sequence
}

/// Returns pages 80h and 83h of a disk's vital product data; a page that the disk does not have is empty. If
/// `may_be_asked`, the disk is queried where the kernel shows neither page.
fn product_data(root: &Root, place: &str, may_be_asked: bool) -> (Vec<u8>, Vec<u8>) {
    let shown = |page: &str| root.read(&format!("{place}/device/{page}")).unwrap_or_default();
    let pages = (shown("vpd_pg80"), shown("vpd_pg83"));
    if !may_be_asked || !pages.0.is_empty() || !pages.1.is_empty() {
        return pages;
    }
    let file = root.path(&block::file(block::name(place)));
    let asked = |page| scsi_inquiry::page(&file, page).unwrap_or_default();
    (asked(0x80), asked(0x83))
}

fn holders(root: &Root, place: &str, of: &str) -> Vec<Holder> {
    let holder = |name: String| {
        let place = format!("{place}/holders/{name}");
        let alias = Some(root.line(&format!("{place}/dm/name"))).filter(|alias| !alias.is_empty());
        Holder { number: block::number(root, &place), alias, name, of: of.to_owned() }
    };
    block::holders(root, place).into_iter().map(holder).collect()
}

/// Returns whether a name is world-wide: the kernel makes up other names for disks that have none.
fn is_world_wide(name: &str) -> bool {
    ["naa.", "eui.", "uuid."].iter().any(|kind| name.starts_with(kind)) && name.len() <= LONGEST
}

/// Parses the address out of a path such as `…/2:0:1:3/block/sda`.
fn scsi_address(place: &str) -> Option<ScsiAddress> {
    let (before, _) = place.rsplit_once("/block/")?;
    let mut parts = before.rsplit('/').next()?.split(':').map(str::parse);
    let mut next = || parts.next()?.ok();
    let address = ScsiAddress { host: next()?, channel: next()?, target: next()?, unit: next()? };
    parts.next().is_none().then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_scsi_disks() {
        let address = |place: &str| scsi_address(place).map(|at| [at.host, at.channel, at.target, at.unit]);
        let below = "/sys/devices/pci0000:00/0000:00:04.0/virtio2";
        assert_eq!(address(&format!("{below}/host0/target0:0:1/0:0:1:12/block/sda")), Some([0, 0, 1, 12]));
        assert_eq!(address(&format!("{below}/block/vda")), None);
        assert_eq!(address("/sys/1:2:3/block/sda"), None);
        assert_eq!(address("/sys/1:2:3:4:5/block/sda"), None);
    }

    #[test]
    fn serial_numbers_that_may_go_on() {
        let serial = |source, raw: &[u8]| Serial::new(source, raw).map(|it| (it.text(), it.cut));
        let twenty = b"pvc-0123456789abcdef";
        assert_eq!(serial(Source::Virtio, twenty), Some(("pvc-0123456789abcdef".to_owned(), true)));
        assert_eq!(serial(Source::Virtio, &twenty[..19]), Some(("pvc-0123456789abcde".to_owned(), false)));
        // The twentieth byte is a space, or the first of the two bytes of a letter.
        assert_eq!(
            serial(Source::Virtio, b"0123456789abcdefghi "),
            Some(("0123456789abcdefghi".to_owned(), true))
        );
        let half =
            serial(Source::Virtio, "0123456789abcdefghiü".get(..).unwrap().as_bytes().get(..20).unwrap());
        assert_eq!(half, Some(("0123456789abcdefghi\u{fffd}".to_owned(), true)));
        assert!(serial(Source::Page80, &[b'x'; 36]).unwrap().1);
        assert!(!serial(Source::Page80, &[b'x'; 20]).unwrap().1);
        assert_eq!(serial(Source::Virtio, b" \0\n"), None);
        assert_eq!(serial(Source::Device, b"a\tb\n"), Some(("a\u{fffd}b".to_owned(), false)));
    }
}
