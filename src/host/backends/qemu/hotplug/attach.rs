//! Attaches a disk: creates what is missing, from whatever point an earlier attempt reached.

use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::super::super::disks::{AttachedDisk, Bus, DiskError, Format, NewDisk, Source, check_serial};
use super::super::link::CallError;
use super::files::Files;
use super::seen::{Seen, bus_of, page80};
use super::volume::{Volume, check_size};
use super::{Vm, detach, naming, place};

/// Disk in the form in which QEMU is to get it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    name: String,
    serial: String,
    bus: Bus,
    file: PathBuf,
    /// True for a block device of the host, false for a regular file.
    is_device: bool,
    format: Format,
    /// Data in one file only; see [`NewDisk::is_whole`].
    is_whole: bool,
    read_only: bool,
}

impl Wanted {
    /// Converts QEMU's refusal. A file that another program has locked has no error class of its own.
    fn refused(&self, error: CallError) -> DiskError {
        match error {
            CallError::Refused { description, .. }
                if description.contains("Failed to get") && description.contains("lock") =>
            {
                DiskError::FileInUse { file: self.file.clone(), device: "another VM or program".into() }
            }
            error => error.into(),
        }
    }
}

/// Part of a disk that is missing in QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    Nothing,
    Device,
    NodeAndDevice,
    /// Node and device, and the existing node has to be closed first, because it is of a different file.
    OtherNodeAndDevice,
}

pub(super) async fn attach(vm: &Vm, disk: &NewDisk, files: &Files) -> Result<AttachedDisk, DiskError> {
    check_serial(&disk.serial, disk.bus)?;
    if let Source::Volume(size) = disk.source {
        check_size(size)?;
        // Find out what would fail before a volume is created.
        look(vm, disk).await?;
    }
    // Only one operation at a time creates or closes nodes, and it must not wait for a file system that hangs.
    let provided = provide(vm, disk, files).await?;
    match attach_provided(vm, disk, &provided).await {
        Ok(attached) => Ok(attached),
        Err(Failure { error, is_closed }) => {
            if let Some(volume) = provided.made.filter(|_| is_closed)
                && let Err(late) = files.in_volumes(move || volume.unmake()).await
            {
                tracing::warn!(vm = vm.name, serial = disk.serial, %late, "an empty volume may remain");
            }
            Err(error)
        }
    }
}

/// Reads the present state, and finds a bus to plug the disk into if it is not plugged.
async fn look(vm: &Vm, disk: &NewDisk) -> Result<(Seen, Option<String>), DiskError> {
    let seen = Seen::read(&vm.link).await?;
    if let Some(other) = seen.confusable(&disk.serial, disk.bus, &naming::name(&disk.serial)) {
        return Err(DiskError::SerialInUse { serial: disk.serial.clone(), device: other.device.clone() });
    }
    let place = match seen.devices.get(&naming::name(&disk.serial)) {
        Some(_) => None,
        None => Some(place::find(&vm.link, disk.bus).await?),
    };
    Ok((seen, place))
}

/// Plugs a disk whose storage is ready.
async fn attach_provided(vm: &Vm, disk: &NewDisk, provided: &Provided) -> Result<AttachedDisk, Failure> {
    let before = |error| Failure { error, is_closed: true };
    let after = |error| Failure { error, is_closed: false };
    let _changing = vm.changing.lock().await;
    let (seen, place) = look(vm, disk).await.map_err(before)?;
    let wanted = Wanted {
        name: naming::name(&disk.serial),
        serial: disk.serial.clone(),
        bus: disk.bus,
        file: provided.file.clone(),
        is_device: provided.is_device,
        format: provided.format,
        is_whole: disk.is_whole,
        read_only: disk.read_only,
    };
    let missing = missing(&seen, &wanted).map_err(before)?;
    if !plug(vm, &wanted, missing, place).await? {
        return Ok(seen.describe(seen.ours(&wanted.serial).map_err(after)?));
    }
    let file = wanted.file.display();
    tracing::info!(vm = vm.name, serial = wanted.serial, %file, bus = %wanted.bus, "attached a disk");
    let seen = Seen::read(&vm.link).await.map_err(after)?;
    Ok(seen.describe(seen.ours(&wanted.serial).map_err(after)?))
}

/// Reason why a disk was not plugged.
struct Failure {
    error: DiskError,
    /// True if QEMU has confirmed that it does not have the file open.
    is_closed: bool,
}

/// Creates the missing parts; returns whether any were missing.
async fn plug(vm: &Vm, wanted: &Wanted, missing: Missing, place: Option<String>) -> Result<bool, Failure> {
    let Some(bus) = place.filter(|_| missing != Missing::Nothing) else { return Ok(false) };
    // After a lost connection it is unknown what QEMU has open; after a refusal it is known.
    let refused = |error: &CallError| matches!(error, CallError::Refused { .. });
    if missing == Missing::OtherNodeAndDevice {
        let closed = detach::close_node(&vm.link, &wanted.name).await;
        closed.map_err(|error| Failure { error, is_closed: false })?;
    }
    if missing != Missing::Device {
        let added = vm.link.call("blockdev-add", node(wanted)).await;
        added.map_err(|error| Failure { is_closed: refused(&error), error: wanted.refused(error) })?;
    }
    if let Err(error) = vm.link.call("device_add", device(wanted, &bus)).await {
        let mut is_closed = false;
        if refused(&error) {
            match detach::close_node(&vm.link, &wanted.name).await {
                Ok(()) => is_closed = true,
                Err(left) => {
                    tracing::debug!(vm = vm.name, error = %left, "the block node of a disk that could not be \
                                                                  attached remains");
                }
            }
        }
        return Err(Failure { error: wanted.refused(error), is_closed });
    }
    Ok(true)
}

/// Storage for a disk, ready to be opened by QEMU.
struct Provided {
    file: PathBuf,
    is_device: bool,
    format: Format,
    /// Volume, if it was created just now and is still empty.
    made: Option<Volume>,
}

/// Creates or finds the storage for a disk.
async fn provide(vm: &Vm, disk: &NewDisk, files: &Files) -> Result<Provided, DiskError> {
    match &disk.source {
        Source::Volume(size) => {
            let volume = Volume {
                root: files.volumes().to_owned(),
                vm: vm.name.clone(),
                serial: disk.serial.clone(),
                format: disk.format.unwrap_or(Format::Raw),
                size: *size,
                owner: vm.link.owner(),
            };
            let format = volume.format;
            let provide = move || {
                let is_new = volume.provide()?;
                let found = real(&volume.path()).inspect_err(|_| {
                    if is_new {
                        volume.unmake();
                    }
                });
                let (file, is_device) = found?;
                Ok(Provided { file, is_device, format, made: is_new.then_some(volume) })
            };
            files.in_volumes(provide).await?
        }
        Source::Image(path) => {
            let (file, format) = (path.clone(), disk.format.unwrap_or(Format::Raw));
            Ok(Provided { file: sayable(file)?, is_device: false, format, made: None })
        }
        Source::File(path) => {
            if !path.is_absolute() {
                return Err(DiskError::File(
                    path.clone(),
                    "is a relative path; give one that starts with /".into(),
                ));
            }
            let given = path.clone();
            let (file, is_device) = files.at(path, move || real(&given)).await??;
            let format =
                disk.format.or_else(|| ending(path)).ok_or_else(|| DiskError::NoFormat(path.clone()))?;
            Ok(Provided { file, is_device, format, made: None })
        }
    }
}

/// Returns the format that the file's extension shows.
fn ending(path: &Path) -> Option<Format> {
    match path.extension()?.to_str()? {
        "raw" | "img" => Some(Format::Raw),
        "qcow2" => Some(Format::Qcow2),
        _ => None,
    }
}

/// Resolves the links of a path, so that it can be compared with the paths that QEMU reports, and determines
/// whether it is a device.
fn real(path: &Path) -> Result<(PathBuf, bool), DiskError> {
    let system = |error| DiskError::System("use the file", path.to_owned(), error);
    let real = path.canonicalize().map_err(system)?;
    let kind = real.metadata().map_err(system)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(DiskError::File(real, "is neither a regular file nor a block device".into()));
    }
    Ok((sayable(real)?, kind.is_block_device()))
}

/// Checks that a path can be passed to QEMU.
fn sayable(path: PathBuf) -> Result<PathBuf, DiskError> {
    if path.to_str().is_none() {
        return Err(DiskError::File(path, "has a name that is not UTF-8, which QMP cannot express".into()));
    }
    Ok(path)
}

/// Determines which parts are missing for the disk to be present as requested.
fn missing(seen: &Seen, wanted: &Wanted) -> Result<Missing, DiskError> {
    let file = wanted.file.to_string_lossy();
    let different = |what, found: &str| {
        Err(DiskError::Different { serial: wanted.serial.clone(), what, found: found.to_owned() })
    };
    let other_file =
        seen.disks.iter().find(|disk| disk.identifier() != wanted.name && disk.node.file == file);
    if let Some(other) = other_file {
        return Err(DiskError::FileInUse { file: wanted.file.clone(), device: other.device.clone() });
    }
    if let Some(kind) = seen.devices.get(&wanted.name) {
        let Some(disk) = seen.disk(&wanted.name) else { return different("device", kind) };
        if disk.serial != wanted.serial {
            return different("serial", &disk.serial);
        }
        if bus_of(kind) != Some(wanted.bus) {
            return different("bus", kind);
        }
        if disk.node.file != file {
            return different("file", &disk.node.file);
        }
        if disk.node.format != wanted.format.name() {
            return different("format", &disk.node.format);
        }
        if disk.node.read_only != wanted.read_only {
            return different("access", if disk.node.read_only { "read-only" } else { "writable" });
        }
        return Ok(Missing::Nothing);
    }
    Ok(match seen.nodes.get(&wanted.name) {
        None => Missing::NodeAndDevice,
        Some(node)
            if node.file == file
                && node.format == wanted.format.name()
                && node.read_only == wanted.read_only =>
        {
            Missing::Device
        }
        Some(_) => Missing::OtherNodeAndDevice,
    })
}

/// Builds the arguments of `blockdev-add`.
fn node(wanted: &Wanted) -> Value {
    let driver = if wanted.is_device { "host_device" } else { "file" };
    let mut node = json!({
        "driver": wanted.format.name(),
        "node-name": wanted.name,
        "read-only": wanted.read_only,
        "discard": "unmap",
        "file": {
            "driver": driver,
            "filename": wanted.file,
            "read-only": wanted.read_only,
            "discard": "unmap",
            // QEMU's default is to lock only where it finds that locks are supported.
            "locking": "on",
        },
    });
    if wanted.is_whole && wanted.format == Format::Qcow2 {
        node["backing"] = Value::Null;
    }
    node
}

/// Builds the arguments of `device_add`.
fn device(wanted: &Wanted, bus: &str) -> Value {
    let mut device = json!({
        "id": wanted.name,
        "bus": bus,
        "drive": wanted.name,
        "serial": wanted.serial,
    });
    match wanted.bus {
        Bus::Scsi => {
            device["driver"] = json!("scsi-hd");
            device["serial"] = json!(page80(&wanted.serial));
            // QEMU derives it from the serial number only if that has at most 20 bytes.
            device["device_id"] = json!(wanted.serial);
        }
        Bus::VirtioBlk => device["driver"] = json!("virtio-blk-pci"),
    }
    device
}

#[cfg(test)]
mod tests {
    use super::super::seen::{Disk, Node};
    use super::*;

    fn wanted() -> Wanted {
        Wanted {
            name: naming::name("data"),
            serial: "data".into(),
            bus: Bus::Scsi,
            file: "/images/data.raw".into(),
            is_device: false,
            format: Format::Raw,
            is_whole: false,
            read_only: false,
        }
    }

    fn node_of(wanted: &Wanted) -> Node {
        let node = json!({
            "node-name": wanted.name, "file": wanted.file, "drv": wanted.format.name(), "ro": wanted.read_only,
            "image": { "virtual-size": 1024 },
        });
        serde_json::from_value(node).unwrap()
    }

    /// Builds the state after the first of the two steps, and after both.
    fn halves(wanted: &Wanted) -> (Seen, Seen) {
        let nodes = [(wanted.name.clone(), node_of(wanted))].into();
        let half = Seen { nodes, ..Seen::default() };
        let mut whole = half.clone();
        whole.devices.insert(wanted.name.clone(), "scsi-hd".into());
        let disk = Disk { device: wanted.name.clone(), serial: wanted.serial.clone(), node: node_of(wanted) };
        whole.disks.push(disk);
        (half, whole)
    }

    #[test]
    fn what_is_missing_follows_from_what_is_there() {
        let wanted = wanted();
        let (half, whole) = halves(&wanted);
        assert_eq!(missing(&Seen::default(), &wanted).unwrap(), Missing::NodeAndDevice);
        assert_eq!(missing(&half, &wanted).unwrap(), Missing::Device);
        assert_eq!(missing(&whole, &wanted).unwrap(), Missing::Nothing);
        let other = Wanted { file: "/images/other.raw".into(), ..wanted };
        assert_eq!(missing(&half, &other).unwrap(), Missing::OtherNodeAndDevice);
    }

    #[test]
    fn what_is_there_otherwise_is_no_success() {
        let wanted = wanted();
        let (_, whole) = halves(&wanted);
        let cases = [
            (Wanted { bus: Bus::VirtioBlk, ..wanted.clone() }, "another bus: scsi-hd"),
            (Wanted { file: "/images/b.raw".into(), ..wanted.clone() }, "another file: /images/data.raw"),
            (Wanted { format: Format::Qcow2, ..wanted.clone() }, "another format: raw"),
            (Wanted { read_only: true, ..wanted.clone() }, "another access: writable"),
            (Wanted { serial: "same digest".into(), ..wanted.clone() }, "another serial: data"),
            (Wanted { name: "other".into(), ..wanted }, "is in use: it backs guestlet-"),
        ];
        for (wanted, expected) in cases {
            let error = missing(&whole, &wanted).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn formats_by_name() {
        for (name, format) in [
            ("/a.raw", Some(Format::Raw)),
            ("/a.img", Some(Format::Raw)),
            ("/a.qcow2", Some(Format::Qcow2)),
            ("/a.vmdk", None),
            ("/dev/vg/lv", None),
        ] {
            assert_eq!(ending(Path::new(name)), format, "{name}");
        }
    }
}
