//! Who a disk is: what the kernel knows of it, and what it says of itself.
//!
//! All of it is at hand in sysfs, but for one thing: a virtio-blk disk is asked for its serial number each time that
//! is read, and may never answer. So it is [asked](Serial) once, by who can wait, and everything else can be
//! [read] without it. A SCSI disk is asked as well if the kernel has nothing to tell of it: it was kept from asking, or
//! asked while the disk came to the place of another one.

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

/// Bytes of a serial number that virtio-blk has room for, and those that QEMU's SCSI disks do.
const VIRTIO_ROOM: usize = 20;
const QEMU_SCSI_ROOM: usize = 36;
/// Bytes of a serial number or name that are kept; no disk has more to say.
const LONGEST: usize = 256;
/// Partitions and holders that are kept of one disk.
const MOST: usize = 256;
/// SCSI's number for drives of discs, which come and go without an event.
const DISC_DRIVE: &str = "5";

/// Where a serial number is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// A virtio-blk disk, which has room for 20 bytes.
    Virtio,
    /// Page 80h of a SCSI disk's vital product data.
    Page80,
    /// Page 83h: the text by which its vendor, or who configured it, tells it from all others.
    Page83,
    /// The controller of an NVMe disk, or a disk of another kind that has one.
    Device,
    /// udev asked the disk, in a way that is its own secret.
    Udev,
}

impl Source {
    /// In one word.
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

/// A serial number: any bytes but none at all, without what pads them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Serial {
    /// Who says so.
    pub source: Source,
    /// The number.
    pub value: Box<[u8]>,
    /// It is as long as there is room for: it may be the beginning of a longer one.
    pub cut: bool,
}

impl Serial {
    /// The serial number in what `source` says; none if it is empty.
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

    /// Bytes that its source has room for.
    pub fn room(&self) -> usize {
        match self.source {
            Source::Virtio => VIRTIO_ROOM,
            Source::Page80 => QEMU_SCSI_ROOM,
            Source::Page83 | Source::Device | Source::Udev => LONGEST,
        }
    }

    /// As people read it; what is no text in it is replaced.
    pub fn text(&self) -> String {
        text(&self.value)
    }
}

/// Bytes as people read them.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace(char::is_control, "\u{fffd}")
}

/// The address of a SCSI disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScsiAddress {
    /// The kernel's number of the host adapter.
    pub host: u32,
    /// The bus, or channel, of the adapter.
    pub channel: u32,
    /// The target, or id.
    pub target: u32,
    /// The logical unit.
    pub unit: u32,
}

impl fmt::Display for ScsiAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, channel, target, unit } = self;
        write!(formatter, "{host}:{channel}:{target}:{unit}")
    }
}

/// A device that is made of a disk, or of a partition of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Such as `dm-0` or `md127`.
    pub name: String,
    /// Its number.
    pub number: Option<Number>,
    /// What device-mapper calls it, such as `group-volume`.
    pub alias: Option<String>,
    /// What it holds: the disk, or a partition, such as `vda2`.
    pub of: String,
}

/// A disk as it was when it was last looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownDisk {
    /// Such as `vda`. Another disk may have it later.
    pub name: String,
    /// Such as `/dev/vda`.
    pub file: String,
    /// Where it is in sysfs.
    pub place: String,
    /// Its number. Another disk may have it later.
    pub number: Number,
    /// Tells it from all disks that have or had its name or number since the boot.
    pub generation: u64,
    /// The kernel's number of the disk, which changes with the medium, too; none before Linux 5.15.
    pub sequence: Option<u64>,
    /// The kind of bus.
    pub bus: Bus,
    /// Its controller, if that is a PCI function.
    pub pci: Option<Pci>,
    /// If it is a SCSI disk, or looks like one.
    pub scsi: Option<ScsiAddress>,
    /// Every serial number that it has, the best first.
    pub serials: Vec<Serial>,
    /// The text of page 83h as QEMU has it: `device_id`, libvirt's alias of the disk (`ua-…`), or the serial number.
    pub alias: Option<String>,
    /// Such as `naa.5000000000000102`, `eui.0025385b71b00d1c` or `uuid.…`.
    pub wwn: Option<String>,
    /// Its size.
    pub bytes: u64,
    /// Bytes of its logical sector.
    pub sector: u32,
    /// Nothing can be written to it.
    pub read_only: bool,
    /// It turns, or says so.
    pub rotational: bool,
    /// In the order of their table.
    pub partitions: Vec<Partition>,
    /// What is made of it, and of its partitions.
    pub holders: Vec<Holder>,
    /// It has not said yet who it is, and was not waited for any longer.
    pub silent: bool,
}

impl KnownDisk {
    /// The serial number that says most of it.
    pub fn serial(&self) -> Option<&Serial> {
        self.serials.first()
    }

    /// Whether the two cannot be the same disk: one of its names is another one.
    pub fn is_another(&self, other: &Self) -> bool {
        let differs = |serial: &Serial| {
            let same = |other: &&Serial| other.source == serial.source;
            other.serials.iter().find(same).is_some_and(|other| other.value != serial.value)
        };
        let names = self.wwn.as_ref().zip(other.wwn.as_ref());
        self.serials.iter().any(differs) || names.is_some_and(|(one, other)| one != other)
    }
}

/// What is known of the serial number that a disk has to be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// Ask now, and wait for as long as it takes.
    Ask,
    /// The same, as far as that is possible without opening the disk.
    AskUnopened,
    /// It was asked, and this is what it said.
    Said(Option<Serial>),
    /// It was asked, and does not answer.
    Silent,
}

/// Asks the disk at `place` for its serial number, if it is of a kind that has to be asked. May take for ever.
pub fn ask(root: &Root, place: &str) -> Option<Serial> {
    Serial::new(Source::Virtio, &root.read(&format!("{place}/serial")).ok()?)
}

/// Has the kernel ask a SCSI disk anew for what it tells in sysfs, such as its size; other disks tell it by themselves.
/// May take for ever.
pub fn have_asked_anew(root: &Root, place: &str) {
    match sysfs::write(root, &format!("{place}/device/rescan"), "1") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("cannot query the disk {} again: {error}", block::name(place));
        }
        _ => {}
    }
}

/// The number of what is at `place`, if it is a disk that counts: one of the machine's, which can be there or not. What
/// exists in the kernel only does not, nor do drives of discs and floppy disks.
pub fn counts(root: &Root, place: &str) -> Option<Number> {
    let is_other = block::is_virtual(place)
        || place.contains("/platform/floppy")
        || root.line(&format!("{place}/device/type")) == DISC_DRIVE;
    // Paths to a disk that the kernel shows as a whole elsewhere have no number.
    if is_other { None } else { block::number(root, place) }
}

/// Reads who the disk at `place` is; `asked` says what it has said itself, and must not ask for who cannot wait.
///
/// # Errors
/// `NotFound` if there is no such disk, or none any more.
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
    // Disks behind USB that the kernel does not ask are known to stumble over it.
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
    // Another one may have come to its place meanwhile.
    if is_still_there(root, &disk) { Ok(disk) } else { Err(gone()) }
}

/// Whether `disk` is still what is at its place: what was read by its name since it was known was read of it.
pub fn is_still_there(root: &Root, disk: &KnownDisk) -> bool {
    block::generation(root, &disk.place) == Some(disk.generation)
        && block::sequence(root, &disk.place) == disk.sequence
}

/// Pages 80h and 83h of a disk's vital product data; a page that it does not have is empty. A disk that
/// `may_be_asked` is asked for them where the kernel shows neither.
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

/// The kernel makes up other names where a disk has none of its own.
fn is_world_wide(name: &str) -> bool {
    ["naa.", "eui.", "uuid."].iter().any(|kind| name.starts_with(kind)) && name.len() <= LONGEST
}

/// `…/2:0:1:3/block/sda`
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
        // The twentieth byte is a space, or the first of a letter's two.
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
