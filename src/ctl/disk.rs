//! `guestctl disk`: attaches disks to a running VM.

use crate::text;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

use super::Error;
use super::client::{Client, answer_within};
use super::print::Printer;
use crate::wire::proto::v1::{
    AttachDiskRequest, AttachedDisk, DetachDiskRequest, DiskVolume, HotplugBus, ImageFormat,
    ListAttachedDisksRequest, ListDiskVolumesRequest, RemoveDiskVolumeRequest, ResizeDiskRequest,
    attach_disk_request::Source, guest_view::View,
};

/// Timeout for the daemon beyond the time that it waits for the guest, because it sends several commands to
/// QEMU.
const ANSWER_DEADLINE: Duration = Duration::from_secs(120);

/// What the guest sees a disk on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Bus {
    /// A virtio-scsi controller that the VM has
    Scsi,
    /// virtio-blk, on a free PCI Express root port
    Virtio,
}

/// How an image is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Its bytes are the disk's
    Raw,
    /// QEMU's own
    Qcow2,
}

/// Disk to attach.
#[derive(Debug, Clone)]
pub struct New {
    /// Serial number by which the guest identifies the disk.
    pub serial: String,
    /// Backing file; `None` for a new volume of `size` bytes.
    pub file: Option<PathBuf>,
    /// Size of the volume in bytes.
    pub size: u64,
    /// Bus on which the guest sees the disk.
    pub bus: Bus,
    /// Format of the file, if it is given.
    pub format: Option<Format>,
    /// True if the guest cannot write to it.
    pub read_only: bool,
}

/// Operation on disks.
#[derive(Debug, Clone)]
pub enum Action {
    /// List all disks.
    List,
    /// Attach a disk.
    Attach(New),
    /// Detach a disk.
    Detach {
        /// Serial number of the disk.
        serial: String,
        /// Seconds that the guest may take to release it.
        wait: u32,
        /// True to detach it even if the guest does not release it.
        force: bool,
    },
    /// List the volumes that were created with disks.
    Volumes,
    /// Remove such a volume.
    Remove {
        /// Serial number of the volume's disk.
        serial: String,
    },
    /// Grow a disk.
    Resize {
        /// Serial number of the disk.
        serial: String,
        /// New size in bytes.
        size: u64,
    },
}

/// Disk for programs. Keys are part of the interface: add, never change.
#[derive(Debug, Serialize)]
struct Value {
    serial: String,
    bus: Option<&'static str>,
    size: u64,
    format: String,
    file: String,
    read_only: bool,
    device: String,
    managed: bool,
    /// Device of a disk that was just attached. Either this or the guest's problem with it is present.
    #[serde(skip_serializing_if = "Option::is_none")]
    guest_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    guest_problem: Option<String>,
}

/// Volume that was created with its disk, for programs.
#[derive(Debug, Serialize)]
struct Kept {
    name: String,
    serial: String,
    size: u64,
    allocated: u64,
    format: String,
    /// True if it is attached; `None` if unknown.
    attached: Option<bool>,
    file: String,
}

/// Result of a removal, for programs.
#[derive(Debug, Serialize)]
struct Removed {
    serial: String,
    was_there: bool,
}

/// Result of a detach, for programs.
#[derive(Debug, Serialize)]
struct Detached {
    serial: String,
    was_attached: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_released: Option<String>,
}

/// Carries out an operation, and shows the disk as it is afterwards.
///
/// # Errors
/// Fails if the operation fails, the daemon does not answer, or standard output cannot be written.
pub async fn run(
    mut client: Client,
    printer: &mut Printer,
    name: String,
    action: Action,
) -> Result<(), Error> {
    let vm = name.clone();
    match action {
        Action::List => {
            let call = client.list_attached_disks(ListAttachedDisksRequest { name });
            let disks = answer_within(call, &vm, ANSWER_DEADLINE).await?.disks;
            let values: Vec<_> = disks.iter().cloned().map(Value::from).collect();
            Ok(printer.value(&values, || rows(&disks))?)
        }
        Action::Attach(new) => {
            let call = client.attach_disk(request(name, new)?);
            let disk = answer_within(call, &vm, ANSWER_DEADLINE).await?;
            let seen = match disk.guest.clone().and_then(|guest| guest.view) {
                Some(View::Name(name)) => format!("The guest sees it as {name}.\n"),
                Some(View::Problem(problem)) => {
                    format!("It is not known whether the guest sees it: {problem}.\n")
                }
                None => String::new(),
            };
            Ok(printer.value(&Value::from(disk.clone()), || rows(&[disk]) + &seen)?)
        }
        Action::Detach { serial, wait, force } => {
            let deadline = ANSWER_DEADLINE + Duration::from_secs(wait.into());
            let request = DetachDiskRequest { name, serial: serial.clone(), wait_seconds: wait, force };
            let answer = answer_within(client.detach_disk(request), &vm, deadline).await?;
            let was_attached = answer.was_attached;
            let words = if was_attached { "detached" } else { "was not attached" };
            let not_released = Some(answer.not_released).filter(|why| !why.is_empty());
            let why = not_released.as_ref().map(|why| format!("The guest had not released it: {why}\n"));
            let words = format!("{serial}: {words}\n{}", why.unwrap_or_default());
            Ok(printer.value(&Detached { serial, was_attached, not_released }, || words)?)
        }
        Action::Volumes => {
            let call = client.list_disk_volumes(ListDiskVolumesRequest { name });
            let volumes = answer_within(call, &vm, ANSWER_DEADLINE).await?.volumes;
            let values: Vec<_> = volumes.iter().cloned().map(Kept::from).collect();
            Ok(printer.value(&values, || kept_rows(&volumes))?)
        }
        Action::Remove { serial } => {
            let call = client.remove_disk_volume(RemoveDiskVolumeRequest { name, serial: serial.clone() });
            let was_there = answer_within(call, &vm, ANSWER_DEADLINE).await?.was_there;
            let words =
                format!("{serial}: {}\n", if was_there { "removed" } else { "there is no such volume" });
            Ok(printer.value(&Removed { serial, was_there }, || words)?)
        }
        Action::Resize { serial, size } => {
            let call = client.resize_disk(ResizeDiskRequest { name, serial, size });
            let disk = answer_within(call, &vm, ANSWER_DEADLINE).await?;
            Ok(printer.value(&Value::from(disk.clone()), || rows(&[disk]))?)
        }
    }
}

fn request(name: String, new: New) -> Result<AttachDiskRequest, Error> {
    let bus = match new.bus {
        Bus::Scsi => HotplugBus::Scsi,
        Bus::Virtio => HotplugBus::VirtioBlk,
    };
    let format = match new.format {
        None => ImageFormat::Unspecified,
        Some(Format::Raw) => ImageFormat::Raw,
        Some(Format::Qcow2) => ImageFormat::Qcow2,
    };
    let source = match new.file {
        None => Source::Size(new.size),
        Some(file) => Source::File(absolute(&file)?),
    };
    Ok(AttachDiskRequest {
        name,
        serial: new.serial,
        bus: bus.into(),
        source: Some(source),
        format: format.into(),
        read_only: new.read_only,
    })
}

/// Makes a path absolute, because the daemon runs in another directory.
fn absolute(file: &Path) -> Result<String, Error> {
    let wrong = |problem| Error::File(file.to_owned(), problem);
    let path = std::path::absolute(file).map_err(|_| wrong("names nothing"))?;
    path.into_os_string().into_string().map_err(|_| wrong("is not UTF-8"))
}

impl From<AttachedDisk> for Value {
    fn from(disk: AttachedDisk) -> Self {
        let (guest_name, guest_problem) = match disk.guest.clone().and_then(|guest| guest.view) {
            Some(View::Name(name)) => (Some(name), None),
            Some(View::Problem(problem)) => (None, Some(problem)),
            None => (None, None),
        };
        Self {
            guest_name,
            guest_problem,
            bus: bus(&disk),
            serial: disk.serial,
            size: disk.size,
            format: disk.format,
            file: disk.file,
            read_only: disk.read_only,
            device: disk.device,
            managed: disk.managed,
        }
    }
}

impl From<DiskVolume> for Kept {
    fn from(volume: DiskVolume) -> Self {
        let DiskVolume { name, serial, file, format, size, allocated, attached } = volume;
        Self { name, serial, size, allocated, format, attached, file }
    }
}

fn kept_rows(volumes: &[DiskVolume]) -> String {
    let head = ["VM", "SERIAL", "SIZE", "USED", "FORMAT", "ATTACHED", "FILE"];
    let mut rows = vec![head.map(str::to_owned)];
    for volume in volumes {
        rows.push([
            volume.name.clone(),
            volume.serial.clone(),
            text::exact_size(volume.size),
            text::size(volume.allocated),
            volume.format.clone(),
            match volume.attached {
                Some(true) => "yes",
                Some(false) => "no",
                None => "unknown",
            }
            .to_owned(),
            volume.file.clone(),
        ]);
    }
    text::table(&rows)
}

fn bus(disk: &AttachedDisk) -> Option<&'static str> {
    match disk.bus() {
        HotplugBus::Unspecified => None,
        HotplugBus::Scsi => Some("scsi"),
        HotplugBus::VirtioBlk => Some("virtio"),
    }
}

fn rows(disks: &[AttachedDisk]) -> String {
    let head = ["SERIAL", "BUS", "SIZE", "FORMAT", "ACCESS", "BY", "FILE"];
    let mut rows = vec![head.map(str::to_owned)];
    for disk in disks {
        rows.push([
            text::or_dash(&disk.serial),
            text::or_dash(bus(disk).unwrap_or_default()),
            text::exact_size(disk.size),
            disk.format.clone(),
            if disk.read_only { "read-only" } else { "writable" }.to_owned(),
            if disk.managed { "guestlet" } else { "others" }.to_owned(),
            disk.file.clone(),
        ]);
    }
    text::table(&rows)
}
