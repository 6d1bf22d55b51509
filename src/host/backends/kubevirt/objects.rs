//! Fields that are read of the objects of KubeVirt's API, `kubevirt.io/v1`. They are named as in the API, and
//! all of them are optional: a field that an older KubeVirt lacks must not make the rest unreadable.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

/// API group of these kinds.
pub const GROUP: &str = "kubevirt.io";

/// Label with which KubeVirt marks the node that a VirtualMachineInstance runs on.
pub const NODE_LABEL: &str = "kubevirt.io/nodeName";
/// Label with which KubeVirt marks the target node of a migration.
pub const TARGET_LABEL: &str = "kubevirt.io/migrationTargetNodeName";
/// Label with which Harvester marks the guest cluster that a VM or another object belongs to.
pub const CLUSTER_LABEL: &str = "guestcluster.harvesterhci.io/name";

/// VM in its desired configuration, whether it runs or not.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct VirtualMachine {
    /// Metadata: name, namespace and UID are used.
    pub metadata: ObjectMeta,
    /// Desired state.
    #[serde(default)]
    pub spec: VirtualMachineSpec,
    /// Observed state.
    #[serde(default)]
    pub status: VirtualMachineStatus,
}

/// Desired state of a VM.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VirtualMachineSpec {
    /// Template of each run.
    pub template: Template,
    /// If `Migration`, KubeVirt does not apply changes of volumes to the running VM.
    pub update_volumes_strategy: Option<String>,
}

/// Template of each run of a VM.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Template {
    /// Spec, in the form of a VirtualMachineInstance's.
    pub spec: InstanceSpec,
}

/// Observed state of a VM.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VirtualMachineStatus {
    /// Changes of its volumes that KubeVirt has accepted (202) but not made yet, if they are requested through the
    /// subresource. Each is made at some time, even if the client no longer waits for it.
    #[serde(deserialize_with = "or_default")]
    pub volume_requests: Vec<VolumeRequest>,
}

/// Accepted change of a VM's volumes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeRequest {
    /// Set if the request adds a volume.
    pub add_volume_options: Option<AddVolume>,
    /// Set if the request removes a volume.
    pub remove_volume_options: Option<RemoveVolume>,
}

/// Volume that is to be added.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AddVolume {
    /// Name that the volume will have.
    pub name: String,
    /// Source of the volume: a [`Volume`] without its name.
    #[serde(deserialize_with = "or_default")]
    pub volume_source: Volume,
}

/// Volume that is to be removed.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct RemoveVolume {
    /// Name of the volume.
    pub name: String,
}

impl VirtualMachine {
    /// Returns the volumes that KubeVirt has been asked to plug and has not added to the VM's spec yet.
    pub fn asked_for(&self) -> impl Iterator<Item = &AddVolume> {
        self.status.volume_requests.iter().filter_map(|request| request.add_volume_options.as_ref())
    }

    /// Returns the names of the volumes that KubeVirt has been asked to unplug and has not removed from the VM's
    /// spec yet.
    pub fn asked_away(&self) -> impl Iterator<Item = &str> {
        let going =
            self.status.volume_requests.iter().filter_map(|request| request.remove_volume_options.as_ref());
        going.map(|going| going.name.as_str())
    }
}

/// Run of a VM, present from shortly before its start until shortly after its end.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Instance {
    /// Metadata: name, namespace, UID, labels and owner are used.
    pub metadata: ObjectMeta,
    /// Spec that it was created from.
    #[serde(default)]
    pub spec: InstanceSpec,
    /// Observed state.
    #[serde(default)]
    pub status: InstanceStatus,
}

/// Spec of a run of a VM.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct InstanceSpec {
    /// Virtual hardware.
    pub domain: Domain,
    /// Volumes, which are the sources of its disks.
    #[serde(deserialize_with = "or_default")]
    pub volumes: Vec<Volume>,
}

/// Virtual hardware of a VM.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Domain {
    /// Firmware settings.
    #[serde(deserialize_with = "or_default")]
    pub firmware: Firmware,
    /// Virtual devices.
    #[serde(deserialize_with = "or_default")]
    pub devices: Devices,
}

/// Firmware of a VM.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Firmware {
    /// System UUID that the guest reads from DMI. The VM's owner can choose it.
    pub uuid: Option<String>,
}

/// Devices of a VM.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Devices {
    /// True if the VM is to have a vsock device.
    #[serde(rename = "autoattachVSOCK")]
    pub autoattach_vsock: Option<bool>,
    /// Disks, each backed by the volume of the same name.
    #[serde(deserialize_with = "or_default")]
    pub disks: Vec<Disk>,
}

/// Disk of a VM.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// Name of the disk, and of its volume.
    pub name: String,
    /// Serial number that the guest sees; empty if the disk has none.
    #[serde(deserialize_with = "or_default")]
    pub serial: String,
    /// Set for a plain disk; unset for a LUN or CD-ROM.
    pub disk: Option<DiskTarget>,
    /// True if other VMs may have it at the same time.
    #[serde(deserialize_with = "or_default")]
    pub shareable: bool,
}

/// Target of a plain disk.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct DiskTarget {
    /// Bus: `scsi`, `virtio` or `sata`; empty for KubeVirt's default.
    #[serde(deserialize_with = "or_default")]
    pub bus: String,
    /// True if the guest may not write.
    #[serde(deserialize_with = "or_default")]
    pub readonly: bool,
}

/// Source of a disk. Of the many kinds of sources, only those that are claims are parsed.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Volume {
    /// Name, unique in the VM.
    pub name: String,
    /// Set if the source is a claim.
    pub persistent_volume_claim: Option<ClaimSource>,
    /// Set if the source is the claim of a DataVolume, which has the same name.
    pub data_volume: Option<DataVolumeSource>,
    /// Set for a cloud-init image, which never holds a file system of the guest's own.
    #[serde(alias = "cloudInitConfigDrive")]
    pub cloud_init_no_cloud: Option<IgnoredAny>,
}

/// Claim as the source of a volume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimSource {
    /// Name of the claim, in the VM's namespace.
    pub claim_name: String,
    /// True if it may be hot-plugged and unplugged.
    pub hotpluggable: bool,
}

/// DataVolume as the source of a volume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DataVolumeSource {
    /// Name in the VM's namespace; the claim has the same name.
    pub name: String,
    /// True if it may be hot-plugged and unplugged.
    pub hotpluggable: bool,
}

impl Volume {
    /// Returns the name of the claim that is its source, if it is a claim.
    pub fn claim(&self) -> Option<&str> {
        let claim = self.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
        claim.or_else(|| self.data_volume.as_ref().map(|source| source.name.as_str()))
    }
}

/// Observed state of a run.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InstanceStatus {
    /// Phase: `Pending`, `Scheduling`, `Scheduled`, `Running`, `Succeeded`, `Failed`, `Unknown`; empty at first.
    pub phase: String,
    /// Node where it runs; changes when a migration completes.
    pub node_name: Option<String>,
    /// Context identifier of its vsock device, if it has one.
    #[serde(rename = "VSOCKCID")]
    pub vsock_cid: Option<u32>,
    /// Nodes of its launcher pods, by the UID of the pod.
    #[serde(deserialize_with = "or_default")]
    pub active_pods: BTreeMap<String, String>,
    /// Migration in progress, or the last one.
    #[serde(deserialize_with = "or_default")]
    pub migration_state: MigrationState,
    /// State of its volumes.
    #[serde(deserialize_with = "or_default")]
    pub volume_status: Vec<VolumeStatus>,
    /// Conditions that KubeVirt reports.
    #[serde(deserialize_with = "or_default")]
    pub conditions: Vec<Condition>,
}

/// Migration of a VM to another node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigrationState {
    /// Target node of the migration.
    pub target_node: Option<String>,
    /// True once the migration has ended, whether it succeeded or failed.
    #[serde(deserialize_with = "or_default")]
    pub completed: bool,
    /// True if the migration has failed and the VM still runs on its previous node.
    #[serde(deserialize_with = "or_default")]
    pub failed: bool,
}

/// Observed state of a VM's volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeStatus {
    /// Name in the VM's spec.
    pub name: String,
    /// Name of the disk in the domain, such as `sda`; empty before there is one.
    pub target: String,
    /// Phase of a hot-plugged volume: `Pending`, `Bound`, `AttachedToNode`, `MountedToPod`, `Ready`; while it is
    /// being removed, `UnMountedFromPod`, `Detaching`.
    pub phase: Option<String>,
    /// Reason for the phase, as one word.
    pub reason: Option<String>,
    /// Reason for the phase, for people.
    pub message: Option<String>,
    /// Set if the volume was hot-plugged.
    pub hotplug_volume: Option<HotplugStatus>,
    /// Claim that it is made of.
    pub persistent_volume_claim_info: Option<ClaimInfo>,
}

/// Pod that carries a hot-plugged volume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HotplugStatus {
    /// Pod that carries all hot-plugged volumes of the VM.
    pub attach_pod_name: Option<String>,
}

/// Claim that backs a volume of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimInfo {
    /// Name of the claim, in the VM's namespace.
    pub claim_name: Option<String>,
}

/// Condition of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Type of the condition.
    #[serde(rename = "type")]
    pub kind: String,
    /// Status of the condition: `True`, `False` or `Unknown`.
    pub status: String,
    /// Reason for the status, as one word.
    pub reason: Option<String>,
    /// Reason for the status, for people.
    pub message: Option<String>,
}

impl Instance {
    /// Reports whether this condition is present and `True`.
    pub fn is(&self, condition: &str) -> bool {
        self.status.conditions.iter().any(|one| one.kind == condition && one.status == "True")
    }

    /// Returns the nodes where its disks may be open: the one where it runs, and the target of a migration in
    /// progress.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        let MigrationState { target_node, completed, failed } = &self.status.migration_state;
        let target = target_node.as_deref().filter(|_| !completed && !failed);
        let nodes = self.status.node_name.as_deref().into_iter().chain(target);
        nodes.filter(|node| !node.is_empty())
    }
}

/// Configuration of KubeVirt itself.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct KubeVirt {
    /// Metadata: name and namespace are used.
    pub metadata: ObjectMeta,
    /// Desired state.
    #[serde(default)]
    pub spec: KubeVirtSpec,
    /// Observed state.
    #[serde(default)]
    pub status: KubeVirtStatus,
}

/// Desired state of KubeVirt.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct KubeVirtSpec {
    /// Configuration of KubeVirt.
    #[serde(deserialize_with = "or_default")]
    pub configuration: Configuration,
}

/// Configuration of KubeVirt.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Configuration {
    /// Feature gates.
    #[serde(deserialize_with = "or_default")]
    pub developer_configuration: DeveloperConfiguration,
}

/// Feature gates of KubeVirt.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeveloperConfiguration {
    /// Gates that are enabled in addition to those of the version.
    #[serde(deserialize_with = "or_default")]
    pub feature_gates: Vec<String>,
    /// Gates that are disabled although the version enables them.
    #[serde(deserialize_with = "or_default")]
    pub disabled_feature_gates: Vec<String>,
}

/// Observed state of KubeVirt.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeVirtStatus {
    /// Version in use, such as `v1.7.0`.
    pub observed_kube_virt_version: Option<String>,
}

/// Returns the UID of the VirtualMachine that owns a VirtualMachineInstance with this metadata, if one does.
pub fn owner(metadata: &ObjectMeta) -> Option<&str> {
    let mut owners = metadata.owner_references.iter().flatten();
    // KubeVirt gives a run the name of its VM. An owner with a different name was set by someone else.
    let is_vm = |name: &str| metadata.name.as_deref() == Some(name);
    let vm = owners
        .find(|owner| owner.kind == "VirtualMachine" && owner.controller == Some(true) && is_vm(&owner.name));
    vm.map(|vm| vm.uid.as_str()).filter(|uid| !uid.is_empty())
}

/// Deserializes null like a missing field.
pub(super) fn or_default<'d, D: Deserializer<'d>, T: Default + Deserialize<'d>>(
    from: D,
) -> Result<T, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

/// Makes a type with `metadata` a kind of an API group: KubeVirt's by default.
macro_rules! resource {
    ($type:ty, $kind:literal, $plural:literal) => {
        $crate::host::backends::kubevirt::objects::resource!(
            $type,
            $kind,
            $plural,
            $crate::host::backends::kubevirt::objects::GROUP,
            "v1"
        );
    };
    ($type:ty, $kind:literal, $plural:literal, $group:expr, $version:literal) => {
        impl kube::Resource for $type {
            type DynamicType = ();
            type Scope = kube::core::NamespaceResourceScope;

            fn kind((): &()) -> std::borrow::Cow<'_, str> {
                $kind.into()
            }

            fn group((): &()) -> std::borrow::Cow<'_, str> {
                $group.into()
            }

            fn version((): &()) -> std::borrow::Cow<'_, str> {
                $version.into()
            }

            fn plural((): &()) -> std::borrow::Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &kube::core::ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut kube::core::ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

pub(super) use resource;

resource!(VirtualMachine, "VirtualMachine", "virtualmachines");
resource!(Instance, "VirtualMachineInstance", "virtualmachineinstances");
resource!(KubeVirt, "KubeVirt", "kubevirts");

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_may_be_missing_or_null_and_others_there() {
        let bare: Instance = serde_json::from_value(json!({"metadata": {}})).unwrap();
        assert_eq!(bare.status.phase, "");
        let nulls = json!({
            "metadata": {"name": "a"},
            "spec": {"domain": {"firmware": null, "devices": {"disks": null, "interfaces": []}}, "volumes": null},
            "status": {"activePods": null, "volumeStatus": null, "conditions": null, "VSOCKCID": null, "nodeName": null,
                       "migrationState": null},
        });
        let read: Instance = serde_json::from_value(nulls).unwrap();
        assert_eq!(read.spec, InstanceSpec::default());
        let all = json!({
            "metadata": {"name": "a"},
            "spec": {"volumes": [
                {"name": "root", "containerDisk": {"image": "x"}},
                {"name": "a", "persistentVolumeClaim": {"claimName": "b", "hotpluggable": true}},
                {"name": "c", "dataVolume": {"name": "d"}},
            ]},
            "status": {"VSOCKCID": 7, "conditions": [{"type": "Paused", "status": "True"}]},
        });
        let read: Instance = serde_json::from_value(all).unwrap();
        let claims: Vec<_> = read.spec.volumes.iter().map(Volume::claim).collect();
        assert_eq!((read.status.vsock_cid, claims), (Some(7), vec![None, Some("b"), Some("d")]));
        assert!(read.is("Paused") && !read.is("AgentConnected"));
    }
}
