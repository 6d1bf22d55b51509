//! VirtualMachineInstance in the form that is kept: the necessary facts, extracted from an object that may
//! contain anything.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::interfaces::{Interface, interfaces};
use super::names::PREFIX;
use super::objects::{CLUSTER_LABEL, Instance, NODE_LABEL, VolumeStatus, owner, resource};
use crate::labels::{self, Labels};
use crate::wire::proto::v1::PowerState;

/// Smallest CID that a guest can have.
const FIRST_CID: u32 = 3;

/// VirtualMachineInstance as received from the API. An object that cannot be parsed is kept as well, so that it
/// does not make the whole list fail.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// Name, namespace, UID and version only.
    pub metadata: ObjectMeta,
    /// Facts extracted from the object; `None` if it lacks a name or UID, which no API server omits.
    pub facts: Option<Arc<Facts>>,
}

/// Facts about a VirtualMachineInstance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Namespace and name, joined by a slash.
    pub name: String,
    /// UID: an object with the same name but a different UID is a different machine.
    pub uid: String,
    /// UID of its VirtualMachine, which outlasts runs; its own UID if it has none.
    pub lasting: String,
    /// System UUID that its guest reads from DMI, in lower case; `None` if the object does not contain it.
    pub dmi: Option<String>,
    /// Namespace and name of its guest cluster; may be empty.
    pub cluster: String,
    /// Labels of the VM, as far as they are kept.
    pub labels: Arc<Labels>,
    /// Node that it runs on; empty if it does not run.
    pub node: String,
    /// UIDs of its launcher pods, each with its node.
    pub pods: Vec<(String, String)>,
    /// State of its vsock device.
    pub vsock: Vsock,
    /// True if its spec lists volumes of guestlet's.
    pub has_volumes: bool,
    /// Number of guestlet's volumes that are plugged into it; `None` if it cannot be read.
    pub volumes: Option<u32>,
    /// Power state.
    pub power: PowerState,
    /// Reason why the power state is unknown, for people.
    pub problem: String,
    /// Network interfaces, if it belongs to a cluster.
    pub interfaces: Vec<Interface>,
    /// True if its guest runs an agent, which reports the guest's addresses.
    pub has_agent: bool,
    /// Name of its instance type; may be empty.
    pub instance_type: String,
}

/// State of a VM's vsock device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Vsock {
    /// The VM does not request a vsock device.
    #[default]
    Unwanted,
    /// The VM requests one, but KubeVirt has not assigned a CID.
    Missing,
    /// The VM has this context identifier, which is valid where network namespaces share vsock addresses.
    Cid(u32),
    /// The object cannot be parsed; the text is the reason.
    Unreadable(String),
}

impl Seen {
    /// Returns the version, which is greater for the newer of two states of the same VirtualMachineInstance.
    pub fn version(&self) -> u128 {
        self.metadata.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or_default()
    }
}

impl Facts {
    /// Adds the interfaces from the spec and status of a VirtualMachineInstance, if it belongs to a cluster.
    #[must_use]
    pub fn with_interfaces(self, spec: &Value, status: &Value) -> Self {
        if self.cluster.is_empty() {
            return self;
        }
        let namespace = self.name.split('/').next().unwrap_or_default();
        Self { interfaces: interfaces(namespace, spec, status), ..self }
    }
}

impl<'d> Deserialize<'d> for Seen {
    fn deserialize<D: Deserializer<'d>>(from: D) -> Result<Self, D::Error> {
        let (whole, metadata) = whole(from)?;
        let facts = match Instance::deserialize(&whole) {
            Ok(instance) => facts(&instance),
            Err(error) => unreadable(&metadata, &error.to_string()),
        };
        let facts = facts.map(|facts| facts.with_interfaces(&whole["spec"], &whole["status"]));
        Ok(Self { metadata: slim(metadata), facts: facts.map(Arc::new) })
    }
}

/// Deserializes an object and its metadata. Objects are deserialized one by one, so only one of a list is held
/// as a whole.
///
/// # Errors
/// If its metadata cannot be parsed.
pub fn whole<'d, D: Deserializer<'d>>(from: D) -> Result<(Value, ObjectMeta), D::Error> {
    #[derive(Deserialize)]
    struct Bare {
        metadata: ObjectMeta,
    }
    let whole = Value::deserialize(from)?;
    let Bare { metadata } = Bare::deserialize(&whole).map_err(serde::de::Error::custom)?;
    Ok((whole, metadata))
}

/// Reduces metadata to the fields that are kept: name, namespace, UID and version.
pub fn slim(metadata: ObjectMeta) -> ObjectMeta {
    let ObjectMeta { name, namespace, uid, resource_version, .. } = metadata;
    ObjectMeta { name, namespace, uid, resource_version, ..ObjectMeta::default() }
}

/// Extracts the facts from the object of a VM alone.
pub fn facts(instance: &Instance) -> Option<Facts> {
    let metadata = &instance.metadata;
    let Instance { spec, status, .. } = instance;
    let wants_vsock = spec.domain.devices.autoattach_vsock == Some(true);
    let vsock = match status.vsock_cid.filter(|cid| *cid >= FIRST_CID) {
        Some(cid) => Vsock::Cid(cid),
        None if wants_vsock => Vsock::Missing,
        None => Vsock::Unwanted,
    };
    let volumes = spec.volumes.iter().map(|volume| &volume.name);
    let entries = status.volume_status.iter().map(|entry| &entry.name);
    let (power, problem) = power(instance);
    let dmi = spec.domain.firmware.uuid.as_ref().map(|uuid| uuid.to_ascii_lowercase());
    let pods = status.active_pods.iter();
    Some(Facts {
        dmi: dmi.filter(|uuid| !uuid.is_empty()),
        node: status.node_name.clone().filter(|node| !node.is_empty()).unwrap_or_else(|| labelled(metadata)),
        has_volumes: volumes.chain(entries).any(|name| name.starts_with(PREFIX)),
        pods: pods.map(|(pod, node)| (pod.to_ascii_lowercase(), node.clone())).collect(),
        vsock,
        volumes: Some(plugged(instance)),
        has_agent: instance.is("AgentConnected"),
        power,
        problem,
        ..known(metadata)?
    })
}

/// Counts guestlet's volumes that are plugged into it according to `KubeVirt`.
fn plugged(instance: &Instance) -> u32 {
    let is_plugged = |volume: &&VolumeStatus| {
        volume.name.starts_with(PREFIX)
            && volume.hotplug_volume.is_some()
            && volume.phase.as_deref() == Some("Ready")
    };
    u32::try_from(instance.status.volume_status.iter().filter(is_plugged).count()).unwrap_or(u32::MAX)
}

/// Extracts the facts that the metadata alone contains.
fn known(metadata: &ObjectMeta) -> Option<Facts> {
    let all = metadata.labels.iter().flatten().map(|(key, value)| (key.as_str(), value.as_str()));
    let labels = Arc::new(labels::of_vm(all));
    Some(Facts { labels, ..identified(metadata, &label(metadata, CLUSTER_LABEL))? })
}

/// Extracts the facts from the names in the metadata of a VM in the guest cluster with this name; an empty name
/// stands for none.
pub fn identified(metadata: &ObjectMeta, cluster: &str) -> Option<Facts> {
    let namespace = metadata.namespace.clone()?;
    let uid = metadata.uid.clone().filter(|uid| !uid.is_empty())?.to_ascii_lowercase();
    Some(Facts {
        name: format!("{namespace}/{}", metadata.name.as_ref()?),
        lasting: owner(metadata).map_or_else(|| uid.clone(), str::to_ascii_lowercase),
        uid,
        cluster: if cluster.is_empty() { String::new() } else { format!("{namespace}/{cluster}") },
        ..Facts::default()
    })
}

fn unreadable(metadata: &ObjectMeta, problem: &str) -> Option<Facts> {
    let problem = format!("its VirtualMachineInstance cannot be read: {problem}");
    let vsock = Vsock::Unreadable(problem.clone());
    Some(Facts { node: labelled(metadata), vsock, problem, ..known(metadata)? })
}

/// Returns the node in its label, which KubeVirt keeps in step with the status.
fn labelled(metadata: &ObjectMeta) -> String {
    label(metadata, NODE_LABEL)
}

fn label(metadata: &ObjectMeta, key: &str) -> String {
    metadata.labels.as_ref().and_then(|labels: &BTreeMap<_, _>| labels.get(key)).cloned().unwrap_or_default()
}

/// Determines the power state and, if it is unknown, the reason.
fn power(instance: &Instance) -> (PowerState, String) {
    let state = match instance.status.phase.as_str() {
        "Running" if instance.is("Paused") => PowerState::Paused,
        "Running" => PowerState::Running,
        // The guest does not exist yet, or no longer.
        "" | "Pending" | "Scheduling" | "Scheduled" | "WaitingForSync" | "Succeeded" | "Failed" => {
            PowerState::Off
        }
        phase => {
            return (PowerState::Unspecified, format!("its VirtualMachineInstance is in the phase {phase}"));
        }
    };
    (state, String::new())
}

resource!(Seen, "VirtualMachineInstance", "virtualmachineinstances");

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const VM: &str = "AAAAAAAA-0000-4000-8000-000000000001";
    const UID: &str = "bbbbbbbb-0000-4000-8000-000000000002";

    fn read(object: &Value) -> Option<Facts> {
        let seen: Seen = serde_json::from_value(object.clone()).unwrap();
        seen.facts.map(Arc::unwrap_or_clone)
    }

    /// Builds an instance that has all fields.
    fn whole() -> Value {
        json!({
            "metadata": {
                "name": "web-1", "namespace": "shop", "uid": UID, "resourceVersion": "17",
                "labels": {"kubevirt.io/nodeName": "n1", "guestcluster.harvesterhci.io/name": "dev"},
                "annotations": {"a": "b"}, "managedFields": [{"manager": "x"}],
                "ownerReferences": [{
                    "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": "web-1", "uid": VM, "controller": true,
                }],
            },
            "spec": {"domain": {
                "firmware": {"uuid": "6F1C0A52-5C0F-4A8E-9D1B-0D7A2F3B4C5D"}, "devices": {"autoattachVSOCK": true},
            }},
            "status": {
                "phase": "Running", "nodeName": "n1", "VSOCKCID": 4711,
                "activePods": {"CCCCCCCC-0000-4000-8000-000000000003": "n1"},
            },
        })
    }

    fn expected() -> Facts {
        Facts {
            name: "shop/web-1".into(),
            uid: UID.into(),
            lasting: VM.to_lowercase(),
            dmi: Some("6f1c0a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d".into()),
            cluster: "shop/dev".into(),
            labels: Arc::new([("guestcluster.harvesterhci.io/name".to_owned(), "dev".to_owned())].into()),
            node: "n1".into(),
            pods: vec![("cccccccc-0000-4000-8000-000000000003".into(), "n1".into())],
            vsock: Vsock::Cid(4711),
            has_volumes: false,
            volumes: Some(0),
            power: PowerState::Running,
            ..Facts::default()
        }
    }

    /// Replaces the value at a path of that instance; null removes it.
    fn with(place: &str, value: &Value) -> Value {
        let mut object = whole();
        *object.pointer_mut(place).unwrap_or_else(|| panic!("{place}")) = value.clone();
        object
    }

    #[test]
    fn every_field_may_be_missing_or_another() {
        let whole = expected();
        let is = |change: &dyn Fn(&mut Facts)| {
            let mut facts = whole.clone();
            change(&mut facts);
            Some(facts)
        };
        let cases: Vec<(&str, Value, Option<Facts>)> = vec![
            (
                "/metadata/labels",
                Value::Null,
                is(&|facts| {
                    facts.cluster.clear();
                    facts.labels = Arc::default();
                }),
            ),
            (
                "/metadata/labels/guestcluster.harvesterhci.io~1name",
                json!(""),
                is(&|facts| {
                    facts.cluster.clear();
                    let labels = Arc::make_mut(&mut facts.labels);
                    labels.values_mut().for_each(String::clear);
                }),
            ),
            ("/metadata/ownerReferences", Value::Null, is(&|facts| facts.lasting = UID.into())),
            ("/metadata/ownerReferences/0/controller", json!(false), is(&|facts| facts.lasting = UID.into())),
            (
                "/metadata/ownerReferences/0/kind",
                json!("VirtualMachinePool"),
                is(&|facts| facts.lasting = UID.into()),
            ),
            // A run has the name of its VM: the creator of an object must not be able to pass it off as a run of another
            // VM.
            ("/metadata/ownerReferences/0/name", json!("web-2"), is(&|facts| facts.lasting = UID.into())),
            ("/metadata/uid", Value::Null, None),
            ("/metadata/name", Value::Null, None),
            ("/spec/domain/firmware", Value::Null, is(&|facts| facts.dmi = None)),
            ("/spec/domain/firmware/uuid", json!(""), is(&|facts| facts.dmi = None)),
            ("/status/VSOCKCID", Value::Null, is(&|facts| facts.vsock = Vsock::Missing)),
            ("/status/VSOCKCID", json!(2), is(&|facts| facts.vsock = Vsock::Missing)),
            ("/spec/domain/devices/autoattachVSOCK", Value::Null, is(&|_| ())),
            ("/status/nodeName", Value::Null, is(&|_| ())),
            ("/status/nodeName", json!("n2"), is(&|facts| facts.node = "n2".into())),
            ("/status/activePods", Value::Null, is(&|facts| facts.pods.clear())),
            ("/status/phase", json!("Scheduled"), is(&|facts| facts.power = PowerState::Off)),
            ("/status/phase", json!("Failed"), is(&|facts| facts.power = PowerState::Off)),
            (
                "/status/phase",
                json!("Unknown"),
                is(&|facts| {
                    facts.power = PowerState::Unspecified;
                    facts.problem = "its VirtualMachineInstance is in the phase Unknown".into();
                }),
            ),
        ];
        assert_eq!(read(&self::whole()), Some(whole.clone()));
        for (place, value, expected) in cases {
            assert_eq!(read(&with(place, &value)), expected, "{place} = {value}");
        }
    }

    #[test]
    fn one_without_vsock_or_paused_is_seen_to_be() {
        let mut object = with("/status/VSOCKCID", &Value::Null);
        object["spec"]["domain"]["devices"] = json!({});
        object["status"]["conditions"] = json!([{"type": "Paused", "status": "True"}]);
        let facts = read(&object).unwrap();
        assert_eq!((facts.vsock, facts.power), (Vsock::Unwanted, PowerState::Paused));
        object["status"]["conditions"][0]["status"] = json!("False");
        assert_eq!(read(&object).unwrap().power, PowerState::Running);
    }

    #[test]
    fn plugged_volumes_of_ours_are_counted() {
        let mut object = whole();
        let volume = |name: &str, phase: &str| json!({"name": name, "target": "sda", "phase": phase, "hotplugVolume": {}});
        object["status"]["volumeStatus"] = json!([
            {"name": "root", "target": "vda"},
            {"name": "guestlet-disk-root", "target": "vdb", "phase": "Ready"},
            volume("guestlet-disk-a", "Ready"),
            volume("guestlet-disk-b", "Ready"),
            volume("guestlet-disk-c", "MountedToPod"),
            volume("another", "Ready"),
        ]);
        assert_eq!(read(&object).unwrap().volumes, Some(2));
        object["status"]["volumeStatus"] = json!("many");
        assert_eq!(read(&object).unwrap().volumes, None);
    }

    #[test]
    fn one_that_cannot_be_read_is_there_all_the_same() {
        for (place, value) in [
            ("/status/VSOCKCID", json!("many")),
            ("/status/VSOCKCID", json!(1_u64 << 40)),
            ("/status/activePods", json!(["a"])),
            ("/spec/domain", json!("yes")),
            ("/status/phase", json!({})),
        ] {
            let facts = read(&with(place, &value)).unwrap();
            assert_eq!(
                (facts.name.as_str(), facts.node.as_str(), facts.power),
                ("shop/web-1", "n1", PowerState::Unspecified)
            );
            assert!(
                facts.problem.starts_with("its VirtualMachineInstance cannot be read: "),
                "{}",
                facts.problem
            );
            assert_eq!(facts.vsock, Vsock::Unreadable(facts.problem.clone()), "{place}");
            assert_eq!(facts.lasting, VM.to_lowercase());
        }
    }

    #[test]
    fn what_is_kept_is_small_and_tells_versions_apart() {
        let seen: Seen = serde_json::from_value(whole()).unwrap();
        assert_eq!(
            (seen.metadata.managed_fields, seen.metadata.annotations, seen.metadata.labels),
            (None, None, None)
        );
        let version = |text: &str| {
            serde_json::from_value::<Seen>(with("/metadata/resourceVersion", &json!(text))).unwrap().version()
        };
        assert!(version("9") < version("10"));
        assert_eq!(version("none"), 0);
    }

    #[test]
    fn the_longest_names_are_kept() {
        let name = "n".repeat(253);
        let facts = read(&with("/metadata/name", &json!(name))).unwrap();
        assert_eq!(facts.name, format!("shop/{name}"));
    }
}
