//! A load balancer of a guest cluster as the host cluster's API has it: whose it is, and what its cluster has wanted of it. Pure.
//!
//! | where | what |
//! |---|---|
//! | name, labels `cloudprovider.harvesterhci.io/…` | whose it is: as Harvester's cloud provider writes them, so that it finds its own again |
//! | annotations `loadbalancer.harvesterhci.io/…` | cluster and network, by which Harvester chooses a pool |
//! | `guestlet.io/service-uid` | the UID of the Service |
//! | `guestlet.io/wanted` | what is wanted of it |
//! | `guestlet.io/sharers` | the Services that share its address, and what is wanted of those |
//!
//! One without ours was made by Harvester's cloud provider, and is taken over under its name when its Service is asked for.

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
/// The network that was asked for, as Harvester's cloud provider remembers it.
const ASKED_NETWORK: &str = "cloudprovider.harvesterhci.io/lb-network";
const OF_CLUSTER: &str = "loadbalancer.harvesterhci.io/cluster";
const NETWORK: &str = "loadbalancer.harvesterhci.io/network";
const UID: &str = "guestlet.io/service-uid";
const WANTED: &str = "guestlet.io/wanted";
const SHARERS: &str = "guestlet.io/sharers";
/// What Harvester says instead of an address where somebody else gets one by DHCP.
const BY_DHCP: &str = "0.0.0.0";
/// The longest name, and how much of it says whose it is.
const LONGEST: usize = 63;
const LONGEST_BASE: usize = 55;

/// A Service that shares an address, and what is wanted of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sharer {
    /// Whose it is.
    pub service: Service,
    /// What is wanted.
    pub wanted: Wanted,
}

/// A load balancer, as far as it is understood.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    /// As it was read.
    pub read: Balancer,
    /// Namespace and name of its cluster.
    pub cluster: String,
    /// Whose it is; the UID may be empty.
    pub service: Service,
    /// What is wanted of it, if that is known.
    pub wanted: Option<Wanted>,
    /// Those that share its address; none if that cannot be read.
    pub sharers: Option<Vec<Sharer>>,
}

/// Progress of the address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// It has none, and maybe why.
    None(Option<String>),
    /// Whoever announces it gets one.
    Dhcp,
    /// This one, from this pool.
    Has(IpAddr, String),
}

impl Object {
    /// One of a guest cluster; none if it is another's.
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

    /// Namespace and name.
    pub fn id(&self) -> String {
        let metadata = &self.read.metadata;
        format!(
            "{}/{}",
            metadata.namespace.as_deref().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default()
        )
    }

    /// The identifier of the record of a Service that shares its address.
    pub fn sharer_id(&self, uid: &str) -> String {
        format!("{}#{uid}", self.id())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.read.metadata.name.as_deref().unwrap_or_default()
    }

    /// Its key in its cluster: the UID of its Service, or something that is none.
    pub fn key(&self) -> String {
        if self.service.uid.is_empty() { format!("?{}", self.name()) } else { self.service.uid.clone() }
    }

    /// It is being deleted.
    pub fn is_going(&self) -> bool {
        self.read.metadata.deletion_timestamp.is_some()
    }

    /// Harvester will hear of its end. Before that it may be reserving an address for it, which nobody would give back.
    pub fn is_taken_up(&self) -> bool {
        self.read.metadata.finalizers.as_ref().is_some_and(|all| !all.is_empty())
    }

    /// The greater one is the newer one.
    pub fn version(&self) -> u128 {
        let version = self.read.metadata.resource_version.as_deref();
        version.and_then(|version| version.parse().ok()).unwrap_or_default()
    }

    /// Where its address comes from.
    pub fn ipam(&self) -> Ipam {
        if self.read.spec.ipam == "dhcp" { Ipam::Dhcp } else { Ipam::Pool }
    }

    /// Who announces it; kube-vip, if nobody has said it.
    pub fn announcing(&self) -> Announcing {
        self.wanted.as_ref().map_or(Announcing::KubeVip, |wanted| wanted.announcing)
    }

    /// The network that its address belongs to; may be empty.
    pub fn network(&self) -> &str {
        self.annotation(NETWORK)
    }

    /// The network that was asked for, for comparison with that which is asked for now.
    pub fn asked_network(&self, now: &str) -> &str {
        match &self.wanted {
            Some(wanted) => &wanted.network,
            None if !self.annotation(ASKED_NETWORK).is_empty() => self.annotation(ASKED_NETWORK),
            // Harvester has chosen one, and it may be said now that it is that.
            None if now == self.network() => self.network(),
            None => "",
        }
    }

    fn annotation(&self, key: &str) -> &str {
        let annotations = self.read.metadata.annotations.as_ref();
        annotations.and_then(|all| all.get(key)).map(String::as_str).unwrap_or_default()
    }

    /// Progress of its address.
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

    /// Its record and those of its sharers, as they are for the rules. One that is being deleted has none.
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

    /// A patch after which these are said to be wanted of it by its Service; none if they are already.
    pub fn want(&self, service: &Service, wanted: &Wanted) -> Option<Value> {
        let mut patch = Map::new();
        if self.service.uid != service.uid || self.wanted.as_ref() != Some(wanted) {
            patch.insert(
                "metadata".to_owned(),
                json!({ "annotations": { UID: service.uid, WANTED: text(wanted) } }),
            );
        }
        // As Harvester's cloud provider says it, which takes one without for none; people see it as well. Not before Harvester has taken
        // it up, which is the last that it writes: of two who write at the same time one has to write again.
        if let Address::Has(address, _) = self.address()
            && self.is_taken_up()
            && self.read.status.address != address.to_string()
        {
            patch.insert("status".to_owned(), json!({ "address": address.to_string() }));
        }
        (!patch.is_empty()).then_some(Value::Object(patch))
    }
}

/// A patch after which these share the address of a load balancer.
pub fn share(sharers: &[Sharer]) -> Value {
    let text = (!sharers.is_empty()).then(|| serde_json::to_string(sharers).unwrap_or_default());
    json!({ "metadata": { "annotations": { SHARERS: text } } })
}

/// Strips off what only whoever forwards uses, of which there may be much.
pub fn kept(wanted: Wanted) -> Wanted {
    Wanted { backends: Vec::new(), sources: Vec::new(), ..wanted }
}

fn text(wanted: &Wanted) -> String {
    serde_json::to_string(wanted).unwrap_or_default()
}

/// A new load balancer of a cluster, `namespace/name`, for a Service that wants this; from this pool, if one is named. If it asks for no
/// network it is to be of this one: Harvester would choose one by names, and take another cluster's.
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

/// The label of the load balancers of a cluster.
pub fn selector(cluster: &str) -> String {
    let label = cluster.split_once('/').map(|(_, label)| label).unwrap_or_default();
    format!("{CLUSTER}={label}")
}

/// The name of the load balancer of a Service, as Harvester's cloud provider makes it.
pub fn name(cluster: &str, service: &Service) -> String {
    let prefix = if is_label(cluster) { "" } else { "a" };
    let mut name = format!("{prefix}{cluster}-{}-{}-", service.namespace, service.name);
    let sum = crc32::update(crc32::ISO, u32::MAX, name.as_bytes());
    let sum = !crc32::update(crc32::ISO, sum, service.uid.as_bytes());
    // All of it is ASCII, as labels are.
    name.truncate(LONGEST_BASE);
    format!("{name}{sum:08x}")
}

/// Whether a text is a label of RFC 1035.
fn is_label(text: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    text.len() <= LONGEST
        && text.bytes().all(inside)
        && text.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase())
        && !text.ends_with('-')
}

#[cfg(test)]
pub(super) mod tests;
