//! Fields that are read of snapshots: those of VMs, `snapshot.kubevirt.io/v1beta1`, and of claims,
//! `snapshot.storage.k8s.io/v1`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::super::objects::{or_default, resource};

/// API group of snapshots of VMs.
const OF_VMS: &str = "snapshot.kubevirt.io";
/// API group of snapshots of claims.
pub const OF_CLAIMS: &str = "snapshot.storage.k8s.io";

/// Snapshot of a VM.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct VirtualMachineSnapshot {
    pub metadata: ObjectMeta,
    pub spec: MachineSnapshotSpec,
    #[serde(deserialize_with = "or_default")]
    pub status: MachineSnapshotStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct MachineSnapshotSpec {
    pub source: Source,
}

/// Source of a snapshot.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Source {
    pub kind: String,
    pub name: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MachineSnapshotStatus {
    /// Phase: `InProgress`, `Succeeded`, `Failed`, `Deleting`, `Unknown`; empty at first.
    #[serde(deserialize_with = "or_default")]
    pub phase: String,
    /// UID of its VirtualMachine.
    #[serde(rename = "sourceUID", deserialize_with = "or_default")]
    pub source_uid: String,
    /// Time when the last of its volumes was snapshotted, or later.
    pub creation_time: Option<String>,
    /// Name of the object that owns its `VolumeSnapshot`s.
    #[serde(deserialize_with = "or_default")]
    pub virtual_machine_snapshot_content_name: String,
    /// Volumes of the snapshot, by their names in the VM.
    #[serde(deserialize_with = "or_default")]
    pub snapshot_volumes: SnapshotVolumes,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SnapshotVolumes {
    #[serde(deserialize_with = "or_default")]
    pub included_volumes: Vec<String>,
    #[serde(deserialize_with = "or_default")]
    pub excluded_volumes: Vec<String>,
}

/// Snapshot of a claim.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct VolumeSnapshot {
    pub metadata: ObjectMeta,
    pub spec: VolumeSnapshotSpec,
    #[serde(deserialize_with = "or_default")]
    pub status: VolumeSnapshotStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct VolumeSnapshotSpec {
    pub source: ClaimOfSnapshot,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimOfSnapshot {
    /// Name of the claim in the same namespace; `None` for a snapshot that was imported.
    pub persistent_volume_claim_name: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeSnapshotStatus {
    /// Time of the snapshot in whole seconds; absent before it is known.
    pub creation_time: Option<String>,
    pub bound_volume_snapshot_content_name: Option<String>,
    /// Set if the snapshot has failed.
    pub error: Option<IgnoredAny>,
}

/// Content that a `VolumeSnapshot` is bound to. Only the time of the snapshot is read of it, because the
/// `VolumeSnapshot` itself has that time in whole seconds only.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct VolumeSnapshotContent {
    pub spec: ContentSpec,
    #[serde(deserialize_with = "or_default")]
    pub status: ContentStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContentSpec {
    pub volume_snapshot_ref: Reference,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Reference {
    pub uid: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContentStatus {
    /// Time in nanoseconds since 1970.
    pub creation_time: Option<i64>,
}

resource!(VirtualMachineSnapshot, "VirtualMachineSnapshot", "virtualmachinesnapshots", OF_VMS, "v1beta1");
resource!(VolumeSnapshot, "VolumeSnapshot", "volumesnapshots", OF_CLAIMS, "v1");

impl VolumeSnapshot {
    /// Reports whether KubeVirt created it for this snapshot of a VM.
    pub fn is_of(&self, machine: &VirtualMachineSnapshot) -> bool {
        let content = &machine.status.virtual_machine_snapshot_content_name;
        let is_it = |owner: &OwnerReference| {
            let is_content = owner.kind == "VirtualMachineSnapshotContent"
                && owner.api_version.split('/').next() == Some(OF_VMS);
            is_content && owner.name == *content
        };
        !content.is_empty() && self.metadata.owner_references.iter().flatten().any(is_it)
    }

    /// Returns the name of the claim that it is a snapshot of.
    pub fn claim(&self) -> &str {
        self.spec.source.persistent_volume_claim_name.as_deref().unwrap_or_default()
    }
}
