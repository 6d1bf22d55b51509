//! Load balancer of a guest cluster as an object in the host cluster's API: its Service, and the requested
//! configuration. Pure.
//!
//! | where | what |
//! |---|---|
//! | name, labels `cloudprovider.harvesterhci.io/…` | the Service, as Harvester's cloud provider writes it and finds it |
//! | annotations `loadbalancer.harvesterhci.io/…` | cluster and network, by which Harvester chooses a pool |
//! | `guestlet.io/service-uid` | the UID of the Service |
//! | `guestlet.io/wanted` | the requested configuration |
//! | `guestlet.io/sharers` | the Services that share its address, with the configurations that they request |
//!
//! An object without guestlet's annotations was created by Harvester's cloud provider. It is taken over under its
//! name when its Service requests a load balancer.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::super::record::{Held, Record};
use super::super::wanted::{Announcing, Ipam, Service, Wanted};
use crate::addresses;
use crate::host::backends::kubevirt::balancers::{API, Balancer, CLUSTER};
use crate::sys::crc32;

const NAMESPACE: &str = "cloudprovider.harvesterhci.io/serviceNamespace";
const NAME: &str = "cloudprovider.harvesterhci.io/serviceName";
/// Annotation with the requested network, as Harvester's cloud provider writes it.
const ASKED_NETWORK: &str = "cloudprovider.harvesterhci.io/lb-network";
const OF_CLUSTER: &str = "loadbalancer.harvesterhci.io/cluster";
const NETWORK: &str = "loadbalancer.harvesterhci.io/network";
const UID: &str = "guestlet.io/service-uid";
const WANTED: &str = "guestlet.io/wanted";
const SHARERS: &str = "guestlet.io/sharers";
/// Address that Harvester reports where the announcer gets the real one by DHCP.
const BY_DHCP: &str = "0.0.0.0";
/// Longest name, and the longest part of it that names the Service; a checksum follows.
const LONGEST: usize = 63;
const LONGEST_BASE: usize = 55;

/// Service that shares an address, with its configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sharer {
    /// Service that shares the address.
    pub service: Service,
    /// Configuration that the Service requests.
    pub wanted: Wanted,
}

/// Load balancer object, parsed.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    /// Object as it was read.
    pub read: Balancer,
    /// Namespace and name of the guest cluster.
    pub cluster: String,
    /// Service that the object belongs to. The UID is empty if guestlet has not taken the object over.
    pub service: Service,
    /// Requested configuration, if guestlet has written it and it can be parsed.
    pub wanted: Option<Wanted>,
    /// Services that share its address; `None` if the annotation cannot be parsed.
    pub sharers: Option<Vec<Sharer>>,
}

/// State of the address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// No address is assigned; the reason, if Harvester gives one.
    None(Option<String>),
    /// The announcer gets an address by DHCP.
    Dhcp,
    /// Harvester has assigned this address from this pool.
    Has(IpAddr, String),
}

impl Object {
    /// Parses an object. Returns `None` if it does not belong to a Service of a guest cluster.
    pub fn of(read: Balancer) -> Option<Self> {
        let metadata = &read.metadata;
        let label = |key: &str| metadata.labels.as_ref()?.get(key).filter(|value| !value.is_empty());
        let annotation = |key: &str| metadata.annotations.as_ref()?.get(key);
        if read.spec.workload_type != "cluster" || metadata.name.is_none() {
            return None;
        }
        let cluster = format!("{}/{}", metadata.namespace.as_ref()?, label(CLUSTER)?);
        let service = Service {
            namespace: label(NAMESPACE)?.clone(),
            name: label(NAME)?.clone(),
            uid: annotation(UID).cloned().unwrap_or_default(),
        };
        let wanted = annotation(WANTED).and_then(|text| serde_json::from_str(text).ok());
        let sharers = annotation(SHARERS).map_or(Some(Vec::new()), |text| serde_json::from_str(text).ok());
        Some(Self { read, cluster, service, wanted, sharers })
    }

    /// Returns namespace and name, separated by a slash.
    pub fn id(&self) -> String {
        let metadata = &self.read.metadata;
        format!(
            "{}/{}",
            metadata.namespace.as_deref().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default()
        )
    }

    /// Returns the identifier of the record of a Service that shares its address.
    pub fn sharer_id(&self, uid: &str) -> String {
        format!("{}#{uid}", self.id())
    }

    /// Returns the name without the namespace.
    pub fn name(&self) -> &str {
        self.read.metadata.name.as_deref().unwrap_or_default()
    }

    /// Returns its key within its cluster: the UID of its Service or, if that is unknown, `?` and the object's name.
    pub fn key(&self) -> String {
        if self.service.uid.is_empty() { format!("?{}", self.name()) } else { self.service.uid.clone() }
    }

    /// Reports whether the object is being deleted.
    pub fn is_going(&self) -> bool {
        self.read.metadata.deletion_timestamp.is_some()
    }

    /// Reports whether Harvester has added its finalizer, and so will release the address when the object is deleted.
    /// Before that, it may be reserving an address that would be lost.
    pub fn is_taken_up(&self) -> bool {
        self.read.metadata.finalizers.as_ref().is_some_and(|all| !all.is_empty())
    }

    /// Returns the resource version as a number; newer versions are greater.
    pub fn version(&self) -> u128 {
        let version = self.read.metadata.resource_version.as_deref();
        version.and_then(|version| version.parse().ok()).unwrap_or_default()
    }

    /// Returns the source of its address.
    pub fn ipam(&self) -> Ipam {
        if self.read.spec.ipam == "dhcp" { Ipam::Dhcp } else { Ipam::Pool }
    }

    /// Returns the party that announces its address: kube-vip, unless the object says otherwise.
    pub fn announcing(&self) -> Announcing {
        self.wanted.as_ref().map_or(Announcing::KubeVip, |wanted| wanted.announcing)
    }

    /// Returns the network that its address belongs to; may be empty.
    pub fn network(&self) -> &str {
        self.annotation(NETWORK)
    }

    /// Returns the network that was requested, for comparison with the one that is requested now.
    pub fn asked_network(&self, now: &str) -> &str {
        match &self.wanted {
            Some(wanted) => &wanted.network,
            None if !self.annotation(ASKED_NETWORK).is_empty() => self.annotation(ASKED_NETWORK),
            // Harvester has chosen a network by itself, and the request now names the same one.
            None if now == self.network() => self.network(),
            None => "",
        }
    }

    fn annotation(&self, key: &str) -> &str {
        let annotations = self.read.metadata.annotations.as_ref();
        annotations.and_then(|all| all.get(key)).map(String::as_str).unwrap_or_default()
    }

    /// Returns the state of its address.
    pub fn address(&self) -> Address {
        let given = &self.read.status.allocated_address;
        match addresses::parse(&given.ip) {
            Ok(_) if given.ip == BY_DHCP => Address::Dhcp,
            Ok(address) => Address::Has(address, given.ip_pool.clone()),
            Err(_) => {
                let ready = self.read.status.conditions.iter().find(|one| one.kind == "Ready");
                let why = ready.filter(|ready| ready.status == "False");
                Address::None(why.map(|ready| ready.message.clone().unwrap_or_default()))
            }
        }
    }

    /// Returns the records of the object and of its sharers, for the rules. An object that is being deleted has none.
    pub fn records(&self) -> Vec<Record> {
        if self.is_going() {
            return Vec::new();
        }
        let service = Service { uid: self.key(), ..self.service.clone() };
        let mut own = Record::new(self.id(), self.cluster.clone(), service);
        own.met.clone_from(&self.wanted);
        if let Address::Has(address, pool) = self.address() {
            own.addresses = vec![Held { address, pool }];
        }
        let sharer = |one: &Sharer| {
            let mut record =
                Record::new(self.sharer_id(&one.service.uid), self.cluster.clone(), one.service.clone());
            record.met = Some(one.wanted.clone());
            record
        };
        let sharers = self.sharers.iter().flatten().map(sharer);
        std::iter::once(own).chain(sharers).collect()
    }

    /// Returns the patch that stores this Service and configuration in the object, or `None` if it has them already.
    pub fn want(&self, service: &Service, wanted: &Wanted) -> Option<Value> {
        let mut patch = Map::new();
        if self.service.uid != service.uid || self.wanted.as_ref() != Some(wanted) {
            patch.insert(
                "metadata".to_owned(),
                json!({ "annotations": { UID: service.uid, WANTED: text(wanted) } }),
            );
        }
        // Harvester's cloud provider takes an object without this field for none, and people see it too. It is written
        // only once Harvester has added its finalizer, which is its last write: otherwise one of two concurrent writers
        // would have to write again.
        if let Address::Has(address, _) = self.address()
            && self.is_taken_up()
            && self.read.status.address != address.to_string()
        {
            patch.insert("status".to_owned(), json!({ "address": address.to_string() }));
        }
        (!patch.is_empty()).then_some(Value::Object(patch))
    }
}

/// Returns the patch that replaces the Services sharing the address of a load balancer.
pub fn share(sharers: &[Sharer]) -> Value {
    let text = (!sharers.is_empty()).then(|| serde_json::to_string(sharers).unwrap_or_default());
    json!({ "metadata": { "annotations": { SHARERS: text } } })
}

/// Strips the fields that only a forwarding host uses, since they may be large.
pub fn kept(wanted: Wanted) -> Wanted {
    Wanted { backends: Vec::new(), sources: Vec::new(), ..wanted }
}

fn text(wanted: &Wanted) -> String {
    serde_json::to_string(wanted).unwrap_or_default()
}

/// Builds a new load balancer of a cluster, `namespace/name`, for a Service with this configuration; from `pool`,
/// if one is named. If the Service requests no network, the object names this one: Harvester would choose one by
/// names, and might take another cluster's.
pub fn new(
    cluster: &str,
    service: &Service,
    wanted: &Wanted,
    pool: Option<&str>,
    network: Option<&str>,
) -> Value {
    let (namespace, label) = cluster.split_once('/').unwrap_or_default();
    let ipam = match wanted.ipam {
        Ipam::Pool => "pool",
        Ipam::Dhcp => "dhcp",
    };
    let mut object = json!({
        "apiVersion": API,
        "kind": "LoadBalancer",
        "metadata": {
            "name": name(label, service),
            "namespace": namespace,
            "labels": { CLUSTER: label, NAMESPACE: service.namespace, NAME: service.name },
            "annotations": { OF_CLUSTER: label, UID: service.uid, WANTED: text(wanted) },
        },
        "spec": { "workloadType": "cluster", "ipam": ipam },
    });
    let asked = Some(wanted.network.as_str()).filter(|asked| !asked.is_empty());
    for (key, network) in [(NETWORK, asked.or(network)), (ASKED_NETWORK, asked)] {
        if let Some(network) = network {
            object["metadata"]["annotations"][key] = network.into();
        }
    }
    if let Some(pool) = pool {
        object["spec"]["ipPool"] = pool.into();
    }
    object
}

/// Returns the label selector for the load balancers of a cluster.
pub fn selector(cluster: &str) -> String {
    let label = cluster.split_once('/').map(|(_, label)| label).unwrap_or_default();
    format!("{CLUSTER}={label}")
}

/// Returns the name of the load balancer of a Service, formed as by Harvester's cloud provider.
pub fn name(cluster: &str, service: &Service) -> String {
    let prefix = if is_label(cluster) { "" } else { "a" };
    let mut name = format!("{prefix}{cluster}-{}-{}-", service.namespace, service.name);
    let sum = crc32::update(crc32::ISO, u32::MAX, name.as_bytes());
    let sum = !crc32::update(crc32::ISO, sum, service.uid.as_bytes());
    // Truncation at any byte is safe, since labels are ASCII.
    name.truncate(LONGEST_BASE);
    format!("{name}{sum:08x}")
}

/// Reports whether a text is a label as defined in RFC 1035.
fn is_label(text: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    text.len() <= LONGEST
        && text.bytes().all(inside)
        && text.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase())
        && !text.ends_with('-')
}

#[cfg(test)]
pub(super) mod tests;
