//! Disk calls of the admin API: translates requests for a backend, and its results for the client. The guest is
//! asked in between ([`release`]).

pub mod release;

use std::time::Duration;

use tonic::{Code, Status};

use super::backends::disks::{self, Bus, Detached, DiskError, Disks, Format, Known, NewDisk, Source};
use super::caller::Behalf;
use super::fleet::Handle;
use crate::wire::proto::v1::{
    AttachDiskRequest, AttachedDisk, DetachDiskRequest, DetachDiskResponse, DiskVolume, GuestView,
    HotplugBus, ImageFormat, ListAttachedDisksRequest, ListAttachedDisksResponse, ListDiskVolumesRequest,
    ListDiskVolumesResponse, RemoveDiskVolumeRequest, RemoveDiskVolumeResponse, ResizeDiskRequest,
    attach_disk_request, guest_view::View,
};
use release::Agent;

/// Default time for a guest to release a disk, in seconds; the caller can set another.
const USUAL_WAIT: u32 = 30;
/// Longest time that a caller may set, in seconds.
const LONGEST_WAIT: u32 = 600;

/// Attaches a disk, and reports whether its guest sees it.
pub(super) async fn attach(
    disks: &dyn Disks,
    fleet: &Handle,
    behalf: &Behalf,
    request: AttachDiskRequest,
) -> Result<AttachedDisk, Status> {
    let bus = match request.bus() {
        HotplugBus::Unspecified | HotplugBus::Scsi => Bus::Scsi,
        HotplugBus::VirtioBlk => Bus::VirtioBlk,
    };
    let format = match request.format() {
        ImageFormat::Unspecified => None,
        ImageFormat::Raw => Some(Format::Raw),
        ImageFormat::Qcow2 => Some(Format::Qcow2),
    };
    let source = match request.source {
        Some(attach_disk_request::Source::File(file)) => Source::File(file.into()),
        Some(attach_disk_request::Source::Size(size)) => Source::Volume(size),
        None => return Err(Status::invalid_argument("specify what backs the disk: a file, or a size")),
    };
    // A file that guestlet did not create may be one layer of several.
    let is_whole = matches!(source, Source::Volume(_));
    let disk =
        NewDisk { serial: request.serial, bus, source, format, is_whole, read_only: request.read_only };
    let guest = Agent::new(fleet, &request.name, Some(behalf));
    let known = Known::serial(&disk.serial);
    let attached = AttachedDisk::from(disks.attach(&request.name, disk).await?);
    let view = match guest.find(&known).await {
        Ok(name) => View::Name(name),
        Err(problem) => View::Problem(problem),
    };
    Ok(AttachedDisk { guest: Some(GuestView { view: Some(view) }), ..attached })
}

/// Detaches a disk, after its guest was asked to release it.
pub(super) async fn detach(
    disks: &dyn Disks,
    fleet: &Handle,
    behalf: &Behalf,
    request: DetachDiskRequest,
) -> Result<DetachDiskResponse, Status> {
    let seconds = match request.wait_seconds {
        0 => USUAL_WAIT,
        seconds @ 1..=LONGEST_WAIT => seconds,
        _ => return Err(Status::invalid_argument(format!("wait_seconds is more than {LONGEST_WAIT}"))),
    };
    let patience = Duration::from_secs(seconds.into());
    let guest = Agent::new(fleet, &request.name, Some(behalf));
    let (side, mut forced) = release::side(guest, request.force);
    let detached = disks.detach(&request.name, request.serial, patience, side).await?;
    Ok(DetachDiskResponse {
        was_attached: detached == Detached::Now,
        not_released: forced.try_recv().unwrap_or_default(),
    })
}

/// Expands a disk.
pub(super) async fn resize(disks: &dyn Disks, request: ResizeDiskRequest) -> Result<AttachedDisk, Status> {
    Ok(disks.resize(&request.name, request.serial, request.size).await?.into())
}

/// Lists all disks of a VM.
pub(super) async fn list(
    disks: &dyn Disks,
    request: ListAttachedDisksRequest,
) -> Result<ListAttachedDisksResponse, Status> {
    let disks = disks.list(&request.name).await?;
    Ok(ListAttachedDisksResponse { disks: disks.into_iter().map(Into::into).collect() })
}

/// Lists the volumes that were created together with their disks.
pub(super) async fn volumes(
    disks: &dyn Disks,
    request: ListDiskVolumesRequest,
) -> Result<ListDiskVolumesResponse, Status> {
    let name = Some(request.name.as_str()).filter(|name| !name.is_empty());
    let (mut volumes, mut asked) = (Vec::new(), None);
    for volume in disks.volumes(name).await? {
        let attached = match &asked {
            Some((vm, attached)) if *vm == volume.vm => attached,
            // A VM that cannot be asked must not prevent the list of the others' volumes.
            _ => &asked.insert((volume.vm.clone(), disks.list(&volume.vm).await.ok())).1,
        };
        let file = volume.file.display().to_string();
        volumes.push(DiskVolume {
            attached: attached.as_ref().map(|disks| disks.iter().any(|disk| disk.file == file)),
            name: volume.vm,
            serial: volume.serial,
            file,
            format: volume.format.name().to_owned(),
            size: volume.size.unwrap_or_default(),
            allocated: volume.allocated,
        });
    }
    Ok(ListDiskVolumesResponse { volumes })
}

/// Removes a volume that was created together with its disk.
pub(super) async fn remove_volume(
    disks: &dyn Disks,
    request: RemoveDiskVolumeRequest,
) -> Result<RemoveDiskVolumeResponse, Status> {
    let RemoveDiskVolumeRequest { name, serial } = request;
    let was_there = disks.remove_volume(&name, &serial).await?;
    Ok(RemoveDiskVolumeResponse { was_there })
}

impl From<disks::AttachedDisk> for AttachedDisk {
    fn from(disk: disks::AttachedDisk) -> Self {
        let bus = match disk.bus {
            None => HotplugBus::Unspecified,
            Some(Bus::Scsi) => HotplugBus::Scsi,
            Some(Bus::VirtioBlk) => HotplugBus::VirtioBlk,
        };
        Self {
            serial: disk.serial,
            bus: bus.into(),
            file: disk.file,
            format: disk.format,
            size: disk.size,
            read_only: disk.read_only,
            device: disk.device,
            managed: disk.ours,
            guest: None,
        }
    }
}

impl From<DiskError> for Status {
    fn from(error: DiskError) -> Self {
        let code = match &error {
            DiskError::UnknownVm => Code::NotFound,
            DiskError::Serial(_)
            | DiskError::Size(_)
            | DiskError::File(..)
            | DiskError::NoFormat(_)
            | DiskError::Shrinks { .. } => Code::InvalidArgument,
            DiskError::SerialInUse { .. } | DiskError::FileInUse { .. } | DiskError::Different { .. } => {
                Code::AlreadyExists
            }
            DiskError::ControllersFull | DiskError::NoPort(_) => Code::ResourceExhausted,
            DiskError::NoHypervisor(_)
            | DiskError::NoController(_)
            | DiskError::NotAttached(_)
            | DiskError::NotOurs { .. }
            | DiskError::NotReleased(_)
            | DiskError::GuestRefuses(_)
            | DiskError::Held(_)
            | DiskError::System(..) => Code::FailedPrecondition,
            DiskError::Kept { .. } => Code::DeadlineExceeded,
            DiskError::Unreachable(_) | DiskError::Untold(_) => Code::Unavailable,
            DiskError::Busy(_) => Code::Aborted,
            DiskError::Refused(_) | DiskError::Strange(_) => Code::Internal,
        };
        Self::new(code, error.to_string())
    }
}
