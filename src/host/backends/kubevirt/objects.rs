//! What is read of the objects of KubeVirt's API, `kubevirt.io/v1`. Fields are named as there, and any of them may be
//! missing: what an older KubeVirt leaves out must not keep the rest from being read.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

/// The group of these kinds.
pub const GROUP: &str = "kubevirt.io";

/// The label by which KubeVirt says on which node a VirtualMachineInstance runs.
pub const NODE_LABEL: &str = "kubevirt.io/nodeName";
/// The label by which it says to which node one is migrated.
pub const TARGET_LABEL: &str = "kubevirt.io/migrationTargetNodeName";
/// The label by which Harvester says to which guest cluster a VM, or anything else, belongs.
pub const CLUSTER_LABEL: &str = "guestcluster.harvesterhci.io/name";

/// A VM as its owner wants it; it may run or not.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct VirtualMachine {
    /// Name, namespace, UID.
    pub metadata: ObjectMeta,
    /// What is wanted.
    #[serde(default)]
    pub spec: VirtualMachineSpec,
    /// How it is.
    #[serde(default)]
    pub status: VirtualMachineStatus,
}

/// What is wanted of a VM.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VirtualMachineSpec {
    /// What each run of it is made from.
    pub template: Template,
    /// `Migration`: KubeVirt hands no change of volumes to the running VM.
    pub update_volumes_strategy: Option<String>,
}

/// What each run of a VM is made from.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Template {
    /// As that of a VirtualMachineInstance.
    pub spec: InstanceSpec,
}

/// How a VM is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VirtualMachineStatus {
    /// Changes of its volumes that KubeVirt has accepted (202) and not carried out yet, where they are asked for by subresource.
    /// Each is carried out at some time, whoever still waits for it.
    #[serde(deserialize_with = "or_default")]
    pub volume_requests: Vec<VolumeRequest>,
}

/// One of these changes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeRequest {
    /// A volume comes.
    pub add_volume_options: Option<AddVolume>,
    /// A volume goes.
    pub remove_volume_options: Option<RemoveVolume>,
}

/// A volume that is to come.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AddVolume {
    /// What it will be called.
    pub name: String,
    /// What it is made of; a [`Volume`] without its name.
    #[serde(deserialize_with = "or_default")]
    pub volume_source: Volume,
}

/// A volume that is to go.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct RemoveVolume {
    /// What it is called.
    pub name: String,
}

impl VirtualMachine {
    /// The volumes that KubeVirt has been asked to plug, and has not put into the VM's spec yet.
    pub fn asked_for(&self) -> impl Iterator<Item = &AddVolume> {
        self.status.volume_requests.iter().filter_map(|request| request.add_volume_options.as_ref())
    }

    /// The names of the volumes that it has been asked to unplug, and has not taken out of the VM's spec yet.
    pub fn asked_away(&self) -> impl Iterator<Item = &str> {
        let going =
            self.status.volume_requests.iter().filter_map(|request| request.remove_volume_options.as_ref());
        going.map(|going| going.name.as_str())
    }
}

/// A VM that runs, or is about to, or did until just now.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Instance {
    /// Name, namespace, UID, labels, owner.
    pub metadata: ObjectMeta,
    /// What it was made from.
    #[serde(default)]
    pub spec: InstanceSpec,
    /// How it is.
    #[serde(default)]
    pub status: InstanceStatus,
}

/// What a run of a VM is made from.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct InstanceSpec {
    /// The machine.
    pub domain: Domain,
    /// What its disks are made of.
    #[serde(deserialize_with = "or_default")]
    pub volumes: Vec<Volume>,
}

/// The machine.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Domain {
    /// Its firmware.
    #[serde(deserialize_with = "or_default")]
    pub firmware: Firmware,
    /// Its devices.
    #[serde(deserialize_with = "or_default")]
    pub devices: Devices,
}

/// Firmware of a machine.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Firmware {
    /// What the guest reads from DMI. The VM's owner can choose it.
    pub uuid: Option<String>,
}

/// Devices of a machine.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Devices {
    /// It has vsock.
    #[serde(rename = "autoattachVSOCK")]
    pub autoattach_vsock: Option<bool>,
    /// Its disks, each of a volume of the same name.
    #[serde(deserialize_with = "or_default")]
    pub disks: Vec<Disk>,
}

/// A disk of a machine.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Disk {
    /// That of its volume.
    pub name: String,
    /// What its guest is to read as its serial number; empty if it has none.
    #[serde(deserialize_with = "or_default")]
    pub serial: String,
    /// It is a plain disk, and no LUN or drive.
    pub disk: Option<DiskTarget>,
    /// Other VMs may have it at the same time.
    #[serde(deserialize_with = "or_default")]
    pub shareable: bool,
}

/// Where a plain disk is plugged.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct DiskTarget {
    /// `scsi`, `virtio`, `sata`; empty if that is KubeVirt's choice.
    #[serde(deserialize_with = "or_default")]
    pub bus: String,
    /// The guest cannot write.
    #[serde(deserialize_with = "or_default")]
    pub readonly: bool,
}

/// What a disk is made of. Of the many kinds only those are read that are claims.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Volume {
    /// Unique in the VM.
    pub name: String,
    /// A claim.
    pub persistent_volume_claim: Option<ClaimSource>,
    /// A claim with the name of this DataVolume.
    pub data_volume: Option<DataVolumeSource>,
    /// What cloud-init reads, as an image that no file system of the guest's is on.
    #[serde(alias = "cloudInitConfigDrive")]
    pub cloud_init_no_cloud: Option<IgnoredAny>,
}

/// A claim, as the source of a volume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimSource {
    /// In the VM's namespace.
    pub claim_name: String,
    /// It may come and go while the VM runs.
    pub hotpluggable: bool,
}

/// A DataVolume, as the source of a volume.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DataVolumeSource {
    /// In the VM's namespace; its claim has the same name.
    pub name: String,
    /// It may come and go while the VM runs.
    pub hotpluggable: bool,
}

impl Volume {
    /// The claim that it is made of, if it is one.
    pub fn claim(&self) -> Option<&str> {
        let claim = self.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.as_str());
        claim.or_else(|| self.data_volume.as_ref().map(|source| source.name.as_str()))
    }
}

/// How a VM is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct InstanceStatus {
    /// `Pending`, `Scheduling`, `Scheduled`, `Running`, `Succeeded`, `Failed`, `Unknown`; empty at first.
    pub phase: String,
    /// Where it runs; changes when a migration completes.
    pub node_name: Option<String>,
    /// The context identifier of its vsock, if it has that.
    #[serde(rename = "VSOCKCID")]
    pub vsock_cid: Option<u32>,
    /// The UIDs of its launchers, each with the node that it is on.
    #[serde(deserialize_with = "or_default")]
    pub active_pods: BTreeMap<String, String>,
    /// The migration that is under way, or the last one.
    #[serde(deserialize_with = "or_default")]
    pub migration_state: MigrationState,
    /// Its volumes, as they are.
    #[serde(deserialize_with = "or_default")]
    pub volume_status: Vec<VolumeStatus>,
    /// What is said of it.
    #[serde(deserialize_with = "or_default")]
    pub conditions: Vec<Condition>,
}

/// A migration of a VM to another node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MigrationState {
    /// Where it goes.
    pub target_node: Option<String>,
    /// It has ended, whether the VM has got there or not.
    #[serde(deserialize_with = "or_default")]
    pub completed: bool,
    /// It has ended, and the VM is where it was.
    #[serde(deserialize_with = "or_default")]
    pub failed: bool,
}

/// How a volume of a VM is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeStatus {
    /// As in the VM's spec.
    pub name: String,
    /// What the machine's disk is called, such as `sda`; empty before there is one.
    pub target: String,
    /// Of one that came while the VM ran: `Pending`, `Bound`, `AttachedToNode`, `MountedToPod`, `Ready`; when it goes,
    /// `UnMountedFromPod`, `Detaching`.
    pub phase: Option<String>,
    /// A word for why it is so.
    pub reason: Option<String>,
    /// The same for people.
    pub message: Option<String>,
    /// It came while the VM ran.
    pub hotplug_volume: Option<HotplugStatus>,
    /// The claim that it is made of.
    pub persistent_volume_claim_info: Option<ClaimInfo>,
}

/// What carries a volume to a VM that runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HotplugStatus {
    /// The pod that has all such volumes of the VM.
    pub attach_pod_name: Option<String>,
}

/// A claim, as the source of a volume that a VM has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimInfo {
    /// In the VM's namespace.
    pub claim_name: Option<String>,
}

/// What is said of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Of what.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// A word for why.
    pub reason: Option<String>,
    /// The same for people.
    pub message: Option<String>,
}

impl Instance {
    /// Whether this condition is true.
    pub fn is(&self, condition: &str) -> bool {
        self.status.conditions.iter().any(|one| one.kind == condition && one.status == "True")
    }

    /// The nodes on which its disks may be open: where it runs, and where it is just being migrated to.
    pub fn nodes(&self) -> impl Iterator<Item = &str> {
        let MigrationState { target_node, completed, failed } = &self.status.migration_state;
        let target = target_node.as_deref().filter(|_| !completed && !failed);
        let nodes = self.status.node_name.as_deref().into_iter().chain(target);
        nodes.filter(|node| !node.is_empty())
    }
}

/// The settings of KubeVirt itself.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct KubeVirt {
    /// Its name.
    pub metadata: ObjectMeta,
    /// What is wanted of it.
    #[serde(default)]
    pub spec: KubeVirtSpec,
    /// How it is.
    #[serde(default)]
    pub status: KubeVirtStatus,
}

/// What is wanted of KubeVirt.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct KubeVirtSpec {
    /// How it works.
    #[serde(deserialize_with = "or_default")]
    pub configuration: Configuration,
}

/// How KubeVirt works.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Configuration {
    /// Which of its features are on.
    #[serde(deserialize_with = "or_default")]
    pub developer_configuration: DeveloperConfiguration,
}

/// Which features of KubeVirt are on.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeveloperConfiguration {
    /// These, beside those that its version has on.
    #[serde(deserialize_with = "or_default")]
    pub feature_gates: Vec<String>,
    /// These are off, though its version has them on.
    #[serde(deserialize_with = "or_default")]
    pub disabled_feature_gates: Vec<String>,
}

/// How KubeVirt is.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeVirtStatus {
    /// The version that runs, such as `v1.7.0`.
    pub observed_kube_virt_version: Option<String>,
}

/// The UID of the VirtualMachine that a VirtualMachineInstance with this metadata is a run of, if it is one's.
pub fn owner(metadata: &ObjectMeta) -> Option<&str> {
    let mut owners = metadata.owner_references.iter().flatten();
    // KubeVirt gives a run the name of its VM. An owner of another name was named by somebody else.
    let is_vm = |name: &str| metadata.name.as_deref() == Some(name);
    let vm = owners
        .find(|owner| owner.kind == "VirtualMachine" && owner.controller == Some(true) && is_vm(&owner.name));
    vm.map(|vm| vm.uid.as_str()).filter(|uid| !uid.is_empty())
}

/// Null is as good as missing.
pub(super) fn or_default<'d, D: Deserializer<'d>, T: Default + Deserialize<'d>>(
    from: D,
) -> Result<T, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

/// Makes a type with `metadata` one of the kinds of an API: KubeVirt's, if nothing else is said.
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
