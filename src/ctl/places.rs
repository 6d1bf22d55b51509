//! Where guests run, the Nodes that they are, and how they are: as values for programs, and in words.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::json::rfc3339;
use crate::text;
use crate::wire::proto::v1;

/// Where something runs.
#[derive(Debug, Serialize)]
pub struct Place {
    region: String,
    zone: String,
    host: String,
    labels: BTreeMap<String, String>,
}

/// What a guest is to know of where it runs, and does.
#[derive(Debug, Serialize)]
pub struct Standing {
    wanted: Option<Place>,
    acknowledged: Option<Place>,
    since: Option<String>,
    problem: String,
}

/// The Node that a guest is.
#[derive(Debug, Serialize)]
pub struct Node {
    name: String,
    state: String,
    reason: String,
    ready: String,
    ready_reason: String,
    labels: BTreeMap<String, String>,
    taints: Vec<String>,
    addresses: Vec<String>,
    provider_id: String,
    kubelet_version: String,
}

/// How a guest's start went, and its services are.
#[derive(Debug, Serialize)]
pub struct Health {
    cloud_init: String,
    cloud_init_errors: Vec<String>,
    failed_units: Vec<String>,
}

/// In an order that does not change.
fn sorted(labels: HashMap<String, String>) -> BTreeMap<String, String> {
    labels.into_iter().collect()
}

impl From<v1::Topology> for Place {
    fn from(topology: v1::Topology) -> Self {
        let v1::Topology { region, zone, host, labels } = topology;
        Self { region, zone, host, labels: sorted(labels) }
    }
}

impl From<v1::TopologyStanding> for Standing {
    fn from(standing: v1::TopologyStanding) -> Self {
        Self {
            wanted: standing.wanted.map(Place::from),
            acknowledged: standing.acknowledged.map(Place::from),
            since: standing.since.map(rfc3339),
            problem: standing.problem,
        }
    }
}

impl From<v1::Node> for Node {
    fn from(node: v1::Node) -> Self {
        Self {
            name: node.name,
            state: node.state,
            reason: node.reason,
            ready: node.ready,
            ready_reason: node.ready_reason,
            labels: sorted(node.labels),
            taints: node.taints,
            addresses: node.addresses,
            provider_id: node.provider_id,
            kubelet_version: node.kubelet_version,
        }
    }
}

impl From<v1::Health> for Health {
    fn from(health: v1::Health) -> Self {
        let v1::Health { cloud_init, cloud_init_errors, failed_units } = health;
        Self { cloud_init, cloud_init_errors, failed_units }
    }
}

/// Such as `region eu, zone a, on host-1`.
pub fn words(topology: Option<&v1::Topology>) -> String {
    let Some(topology) = topology else { return "an unknown place".to_owned() };
    let mut words = Vec::new();
    for (name, value) in [("region ", &topology.region), ("zone ", &topology.zone), ("on ", &topology.host)] {
        if !value.is_empty() {
            words.push(format!("{name}{value}"));
        }
    }
    words.extend(labels(topology));
    text::or_dash(&words.join(", "))
}

/// Its labels as `key=value`, in their order.
pub fn labels(topology: &v1::Topology) -> Vec<String> {
    let mut labels: Vec<_> = topology.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    labels.sort();
    labels
}

/// What became of the Node.
pub fn node_words(node: Option<&v1::Node>) -> String {
    let Some(node) = node else { return "no node of a cluster any more".to_owned() };
    let reason = if node.reason.is_empty() { String::new() } else { format!(" ({})", node.reason) };
    format!(
        "node {}: ready {}, labels {}{reason}",
        text::or_dash(&node.name),
        text::or_dash(&node.ready),
        node.state
    )
}

/// How the guest is.
pub fn health_words(health: Option<&v1::Health>) -> String {
    let health = health.cloned().unwrap_or_default();
    let mut words = vec![match health.failed_units.as_slice() {
        [] => "no unit has failed".to_owned(),
        units => format!("failed units: {}", units.join(" ")),
    }];
    if !health.cloud_init.is_empty() {
        words.push(format!("cloud-init {}", health.cloud_init));
    }
    words.join(", ")
}
