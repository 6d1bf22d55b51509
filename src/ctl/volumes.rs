//! `guestctl volumes`: the volumes of clusters.

use std::time::Duration;

use serde::Serialize;

use super::Error;
use super::client::{Client, answer_within};
use super::print::Printer;
use crate::text;
use crate::wire::proto::v1::{
    AttachVolumeRequest, CreateVolumeRequest, DetachVolumeRequest, ExpandVolumeRequest, ListVolumesRequest,
    RemoveVolumeRequest, Volume, VolumeHolder,
};

/// Timeout for the daemon: it may wait for a guest, and write a large image.
const ANSWER_DEADLINE: Duration = Duration::from_secs(600);

/// Operation on volumes.
#[derive(Debug, Clone)]
pub enum Action {
    /// List volumes.
    List {
        /// Cluster that the list is limited to.
        cluster: Option<String>,
        /// True to show more columns.
        wide: bool,
    },
    /// Create a volume.
    Create {
        /// Cluster of the volume.
        cluster: String,
        /// Name of the volume in the cluster.
        name: String,
        /// Size in bytes.
        size: u64,
        /// Storage class, if one is given.
        class: Option<String>,
    },
    /// Attach a volume to a VM.
    Attach {
        /// Identifier of the volume.
        volume: String,
        /// Name of the VM.
        vm: String,
        /// True if the guest cannot write to it.
        read_only: bool,
    },
    /// Detach a volume from its VM.
    Detach {
        /// Identifier of the volume.
        volume: String,
        /// True to detach it even if the guest does not release it.
        force: bool,
    },
    /// Grow a volume.
    Expand {
        /// Identifier of the volume.
        volume: String,
        /// New size in bytes.
        size: u64,
    },
    /// Remove a volume with all of its data.
    Remove {
        /// Identifier of the volume.
        volume: String,
    },
}

/// Volume for programs. Keys are part of the interface: add, never change.
#[derive(Debug, Serialize)]
struct Value {
    id: String,
    name: String,
    cluster: String,
    class: String,
    size: u64,
    claim: String,
    serial: String,
    problem: String,
    holder: Option<Holder>,
    /// Holders of a volume that many VMs use at the same time.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sharers: Vec<Holder>,
}

#[derive(Debug, Serialize)]
struct Holder {
    vm: String,
    uuid: String,
    read_only: bool,
    leaving: bool,
    device: String,
    mount_points: Vec<String>,
    pods: Vec<String>,
}

/// Removed volume, for programs.
#[derive(Debug, Serialize)]
struct Removed {
    removed: String,
}

/// Carries out an operation, and shows the volume as it is afterwards.
///
/// # Errors
/// Fails if the operation fails, the daemon does not answer, or standard output cannot be written.
pub async fn run(mut client: Client, printer: &mut Printer, action: Action) -> Result<(), Error> {
    let volume = match action {
        Action::List { cluster, wide } => {
            let request = ListVolumesRequest { cluster: cluster.unwrap_or_default() };
            let volumes = wait(client.list_volumes(request)).await?.volumes;
            let values: Vec<_> = volumes.iter().cloned().map(Value::from).collect();
            return Ok(printer.value(&values, || rows(&volumes, wide))?);
        }
        Action::Create { cluster, name, size, class } => {
            let class = class.unwrap_or_default();
            wait(client.create_volume(CreateVolumeRequest { cluster, name, size, class })).await?
        }
        Action::Attach { volume, vm, read_only } => {
            wait(client.attach_volume(AttachVolumeRequest { volume_id: volume, vm, read_only })).await?
        }
        Action::Detach { volume, force } => {
            wait(client.detach_volume(DetachVolumeRequest { volume_id: volume, force })).await?
        }
        Action::Expand { volume, size } => {
            wait(client.expand_volume(ExpandVolumeRequest { volume_id: volume, size })).await?
        }
        Action::Remove { volume } => {
            wait(client.remove_volume(RemoveVolumeRequest { volume_id: volume.clone() })).await?;
            let words = format!("{volume}: removed\n");
            return Ok(printer.value(&Removed { removed: volume }, || words)?);
        }
    };
    Ok(printer.value(&Value::from(volume.clone()), || rows(&[volume], false))?)
}

/// Waits for the answer. `NOT_FOUND` may concern a volume or a VM, so the daemon's message is kept.
async fn wait<T>(call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>) -> Result<T, Error> {
    let call = async { call.await.map_err(said) };
    answer_within(call, "", ANSWER_DEADLINE).await
}

fn said(status: tonic::Status) -> tonic::Status {
    if status.code() == tonic::Code::NotFound {
        return tonic::Status::failed_precondition(status.message());
    }
    status
}

impl From<Volume> for Value {
    fn from(volume: Volume) -> Self {
        let shown = |holder: VolumeHolder| Holder {
            vm: holder.vm,
            uuid: holder.uuid,
            read_only: holder.read_only,
            leaving: holder.leaving,
            device: holder.device,
            mount_points: holder.mount_points,
            pods: holder.pods,
        };
        Self {
            id: volume.id,
            name: volume.name,
            cluster: volume.cluster,
            class: volume.class,
            size: volume.size,
            claim: volume.claim,
            serial: volume.serial,
            problem: volume.problem,
            holder: volume.holder.map(shown),
            sharers: volume.sharers.into_iter().map(shown).collect(),
        }
    }
}

/// Describes the VM that has a volume, and how it is attached.
fn named(holder: &VolumeHolder) -> String {
    match (holder.leaving, holder.read_only) {
        (true, _) => format!("{} (leaving)", holder.vm),
        (false, true) => format!("{} (read-only)", holder.vm),
        (false, false) => holder.vm.clone(),
    }
}

fn rows(volumes: &[Volume], wide: bool) -> String {
    let mut head = vec!["ID", "CLUSTER", "SIZE", "VM", "DEVICE", "POD", "NAME", "CLAIM"];
    if wide {
        head.extend(["MOUNTED AT", "PROBLEM"]);
    }
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for volume in volumes {
        let holder = volume.holder.clone().unwrap_or_default();
        let vms: Vec<_> = volume.holder.iter().chain(&volume.sharers).map(named).collect();
        let mut row = vec![
            volume.id.clone(),
            volume.cluster.clone(),
            text::exact_size(volume.size),
            text::or_dash(&vms.join(",")),
            text::or_dash(&holder.device),
            text::or_dash(&holder.pods.join(",")),
            volume.name.clone(),
            text::or_dash(&volume.claim),
        ];
        if wide {
            row.extend([text::or_dash(&holder.mount_points.join(",")), text::or_dash(&volume.problem)]);
        }
        rows.push(row);
    }
    text::table(&rows)
}
