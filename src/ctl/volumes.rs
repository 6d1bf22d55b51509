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

/// How long the daemon may take: it may wait for a guest, and fill a large image.
const ANSWER_DEADLINE: Duration = Duration::from_secs(600);

/// What to do.
#[derive(Debug, Clone)]
pub enum Action {
    /// List them.
    List {
        /// Of this cluster only.
        cluster: Option<String>,
        /// With more columns.
        wide: bool,
    },
    /// Make one.
    Create {
        /// Of which cluster.
        cluster: String,
        /// Its name there.
        name: String,
        /// Bytes.
        size: u64,
        /// Its storage class, if that is said.
        class: Option<String>,
    },
    /// Plug one into a VM.
    Attach {
        /// Its identifier.
        volume: String,
        /// The VM's name.
        vm: String,
        /// The guest cannot write.
        read_only: bool,
    },
    /// Take one away from its VM.
    Detach {
        /// Its identifier.
        volume: String,
        /// Whatever the guest says.
        force: bool,
    },
    /// Make one larger.
    Expand {
        /// Its identifier.
        volume: String,
        /// Bytes.
        size: u64,
    },
    /// Remove one with all that is in it.
    Remove {
        /// Its identifier.
        volume: String,
    },
}

/// What programs read of a volume. Keys are part of the interface: add, never change.
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
    /// Of a volume that many VMs have at a time.
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

/// What programs read of a volume that is gone.
#[derive(Debug, Serialize)]
struct Removed {
    removed: String,
}

/// Does it, and shows the volume as it is then.
///
/// # Errors
/// If it cannot be done, the daemon does not answer, or standard output cannot be written.
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

/// The answer. What is not found may be a volume or a VM, so the daemon's words say it.
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

/// The VM that has a volume, and how it has it.
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
