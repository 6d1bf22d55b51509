//! The kinds of objects that the model deals with, and how it reads them.

use std::collections::BTreeMap;

use serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    KubeVirt,
    Vm,
    Vmi,
    Migration,
    Pod,
    Claim,
    Volume,
    Attachment,
    Class,
    Node,
    Share,
}

impl Kind {
    pub const ALL: [Self; 11] = [
        Self::KubeVirt,
        Self::Vm,
        Self::Vmi,
        Self::Migration,
        Self::Pod,
        Self::Claim,
        Self::Volume,
        Self::Attachment,
        Self::Class,
        Self::Node,
        Self::Share,
    ];

    fn group(self) -> &'static str {
        match self {
            Self::KubeVirt | Self::Vm | Self::Vmi | Self::Migration => "/apis/kubevirt.io/v1",
            Self::Pod | Self::Claim | Self::Volume | Self::Node => "/api/v1",
            Self::Attachment | Self::Class => "/apis/storage.k8s.io/v1",
            Self::Share => "/apis/harvesterhci.io/v1beta1",
        }
    }

    fn plural(self) -> &'static str {
        match self {
            Self::KubeVirt => "kubevirts",
            Self::Vm => "virtualmachines",
            Self::Vmi => "virtualmachineinstances",
            Self::Migration => "virtualmachineinstancemigrations",
            Self::Pod => "pods",
            Self::Claim => "persistentvolumeclaims",
            Self::Volume => "persistentvolumes",
            Self::Attachment => "volumeattachments",
            Self::Class => "storageclasses",
            Self::Node => "nodes",
            Self::Share => "networkfilesystems",
        }
    }

    /// Its name in references, and its `apiVersion`.
    pub fn named(self) -> (&'static str, &'static str) {
        let name = match self {
            Self::KubeVirt => "KubeVirt",
            Self::Vm => "VirtualMachine",
            Self::Vmi => "VirtualMachineInstance",
            Self::Migration => "VirtualMachineInstanceMigration",
            Self::Pod => "Pod",
            Self::Claim => "PersistentVolumeClaim",
            Self::Volume => "PersistentVolume",
            Self::Attachment => "VolumeAttachment",
            Self::Class => "StorageClass",
            Self::Node => "Node",
            Self::Share => "NetworkFilesystem",
        };
        let version = self.group().trim_start_matches("/apis/").trim_start_matches("/api/");
        (name, version)
    }

    /// The path of all objects of this kind.
    pub fn all(self) -> String {
        format!("{}/{}", self.group(), self.plural())
    }

    /// The path of those of a namespace; of all, if the kind knows none.
    pub fn within(self, namespace: &str) -> String {
        if namespace.is_empty() {
            return self.all();
        }
        format!("{}/namespaces/{namespace}/{}", self.group(), self.plural())
    }

    /// The path of the object of this key.
    pub fn path(self, key: &str) -> String {
        let (namespace, name) = key.split_once('/').unwrap_or(("", key));
        format!("{}/{name}", self.within(namespace))
    }
}

/// The objects of all kinds, by key, as they were last seen.
#[derive(Default)]
pub struct Objects {
    kinds: BTreeMap<Kind, BTreeMap<String, Value>>,
}

impl Objects {
    pub fn get(&self, kind: Kind, key: &str) -> Option<&Value> {
        self.kinds.get(&kind)?.get(key)
    }

    pub fn of(&self, kind: Kind) -> impl Iterator<Item = &Value> {
        self.kinds.get(&kind).into_iter().flat_map(BTreeMap::values)
    }

    /// The keys of a kind, to work on one after another.
    pub fn keys(&self, kind: Kind) -> Vec<String> {
        self.kinds.get(&kind).into_iter().flat_map(BTreeMap::keys).cloned().collect()
    }

    /// Takes in an object, unless a later version is known; whether it is news.
    pub fn put(&mut self, kind: Kind, object: Value) -> bool {
        let key = key(&object);
        let objects = self.kinds.entry(kind).or_default();
        let is_news = objects.get(&key).is_none_or(|known| version(known) < version(&object));
        if is_news {
            objects.insert(key, object);
        }
        is_news
    }

    /// Forgets an object, unless another of its name has come since.
    pub fn remove(&mut self, kind: Kind, object: &Value) {
        let objects = self.kinds.entry(kind).or_default();
        let key = key(object);
        if objects.get(&key).is_some_and(|known| uid(known) == uid(object)) {
            objects.remove(&key);
        }
    }

    /// Puts what a list has said in the place of what is known of a kind.
    pub fn replace(&mut self, kind: Kind, list: Vec<Value>) {
        self.kinds.insert(kind, list.into_iter().map(|object| (key(&object), object)).collect());
    }
}

fn version(object: &Value) -> u64 {
    text(&object["metadata"]["resourceVersion"]).parse().unwrap_or_default()
}

/// `namespace/name`, or the name of what has no namespace.
pub fn key(object: &Value) -> String {
    let name = name(object);
    match object["metadata"]["namespace"].as_str() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name.to_owned(),
    }
}

pub fn name(object: &Value) -> &str {
    text(&object["metadata"]["name"])
}

pub fn namespace(object: &Value) -> &str {
    text(&object["metadata"]["namespace"])
}

pub fn uid(object: &Value) -> &str {
    text(&object["metadata"]["uid"])
}

pub fn is_deleted(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// What is in a list, or in none.
pub fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The one of this name in a list.
pub fn named<'v>(list: &'v Value, name: &str) -> Option<&'v Value> {
    items(list).find(|item| item["name"] == name)
}

/// The claim of a volume of a VM or of a pod, and whether it is one that is plugged while the VM runs. The data volume that
/// makes a claim has its name.
pub fn claim_of(volume: &Value) -> Option<&str> {
    let claim = volume["persistentVolumeClaim"]["claimName"].as_str();
    claim.or_else(|| volume["dataVolume"]["name"].as_str())
}

pub fn is_hotpluggable(volume: &Value) -> bool {
    volume["persistentVolumeClaim"]["hotpluggable"] == true || volume["dataVolume"]["hotpluggable"] == true
}

/// Sets one condition of an object's list; the whole list, for a patch.
pub fn with_condition(object: &Value, kind: &str, status: &str, reason: &str) -> Value {
    let mut list: Vec<Value> = items(&object["status"]["conditions"]).cloned().collect();
    let condition = serde_json::json!({ "type": kind, "status": status, "reason": reason });
    match list.iter_mut().find(|it| it["type"] == kind) {
        Some(known) if known["status"] == status && known["reason"] == reason => {}
        Some(known) => *known = condition,
        None => list.push(condition),
    }
    Value::Array(list)
}

/// A quantity in bytes.
pub fn bytes(quantity: &Value) -> u64 {
    const UNITS: [(&str, u64); 8] = [
        ("Ki", 1 << 10),
        ("Mi", 1 << 20),
        ("Gi", 1 << 30),
        ("Ti", 1 << 40),
        ("k", 1000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
        ("T", 1_000_000_000_000),
    ];
    let text = text(quantity);
    for (unit, size) in UNITS {
        if let Some(number) = text.strip_suffix(unit).and_then(|number| number.parse::<u64>().ok()) {
            return number * size;
        }
    }
    text.parse().unwrap_or_default()
}
