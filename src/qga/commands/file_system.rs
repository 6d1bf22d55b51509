//! Commands about file systems that are on disks.

use serde::Serialize;

use crate::guest::file_systems::{self, FileSystem, Trim};
use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::commands::disk::{AddressReply, address, away};
use crate::qga::error::Error;
use crate::qga::reply::Reply;
use crate::qga::table::{Class, Command, Pending, Run};

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-get-fsinfo",
        role: Some(Role::Status),
        since: "2.2",
        returns: "[{name, mountpoint, type, used-bytes?, total-bytes?, total-bytes-privileged?, disk[{pci-controller{domain, \
                  bus, slot, function}, bus-type, bus, target, unit, serial?, dev, ccw-address?}]}]",
        summary: "File systems that are on disks, the last mounted first, and the disks that they are on.",
        differences: "Where udev knows no serial number, the disk's own is reported. A virtio-scsi disk is \
                      reported with its bus and target, which qemu-ga leaves 0. NVMe disks that may have \
                      several controllers, USB and Xen disks, and PCI controllers from a device tree are \
                      recognised.",
        run: Run::Later(get_fsinfo),
        ..Command::USUAL
    },
    Command {
        name: "guest-fstrim",
        role: Some(Role::Disks),
        since: "1.2",
        arguments: "minimum? (bytes; default 0)",
        returns: "paths[{path, trimmed?, minimum?, error?}]",
        class: Class::Control,
        audited: true,
        summary: "Discards unused blocks of the file systems on disks.",
        differences: "A file system that is mounted several times is trimmed once; its other mounts are listed with 0 \
                      bytes. A negative minimum is an error.",
        run: Run::Later(fstrim),
        ..Command::USUAL
    },
];

/// Implements `guest-get-fsinfo`.
pub fn get_fsinfo<'a>(call: &'a Call<'a>) -> Pending<'a> {
    Box::pin(async move {
        call.arguments.none()?;
        let guest = call.context.guest.clone();
        let file_systems = away(move || file_systems::list(&guest)).await??;
        Reply::value(&file_systems.iter().map(file_system).collect::<Vec<_>>())
    })
}

/// Implements `guest-fstrim`.
pub fn fstrim<'a>(call: &'a Call<'a>) -> Pending<'a> {
    #[derive(Serialize)]
    struct Paths<'a> {
        paths: Vec<TrimReply<'a>>,
    }
    Box::pin(async move {
        let minimum: Option<i64> = call.arguments.read(|arguments| arguments.optional("minimum"))?;
        let minimum = u64::try_from(minimum.unwrap_or(0))
            .map_err(|_| Error::argument("\"minimum\"", "must not be negative"))?;
        let guest = call.context.guest.clone();
        let trims = away(move || file_systems::trim(&guest, minimum, &[])).await??;
        Reply::value(&Paths { paths: trims.iter().map(trim).collect() })
    })
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct FileSystemReply<'a> {
    name: &'a str,
    mountpoint: &'a str,
    r#type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    used_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_bytes_privileged: Option<u64>,
    disk: Vec<AddressReply<'a>>,
}

fn file_system(file_system: &FileSystem) -> FileSystemReply<'_> {
    let usage = file_system.usage;
    FileSystemReply {
        name: &file_system.device.name,
        mountpoint: &file_system.mount_point,
        r#type: &file_system.kind,
        used_bytes: usage.map(|usage| usage.used),
        total_bytes: usage.map(|usage| usage.total),
        total_bytes_privileged: usage.map(|usage| usage.total_privileged),
        disk: file_system.device.disks.iter().map(address).collect(),
    }
}

#[derive(Serialize)]
struct TrimReply<'a> {
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    trimmed: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    minimum: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

fn trim(trim: &Trim) -> TrimReply<'_> {
    let trimmed = trim.outcome.as_ref().ok();
    TrimReply {
        path: &trim.mount_point,
        trimmed: trimmed.map(|trimmed| trimmed.bytes),
        minimum: trimmed.map(|trimmed| trimmed.minimum),
        error: trim.outcome.as_ref().err().map(ToString::to_string),
    }
}
