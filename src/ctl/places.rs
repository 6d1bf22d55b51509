//! Location of guests, the Nodes that they are, and their health, as values for programs.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::json::rfc3339;
pub use crate::events::places::{health_words, labels, node_words, words};
use crate::wire::proto::v1;

/// Location in the topology.
#[derive(Debug, Serialize)]
pub struct Place {
    region: String,
    zone: String,
    host: String,
    labels: BTreeMap<String, String>,
}

/// Topology of a guest: what it is to be informed of, and what it knows.
#[derive(Debug, Serialize)]
pub struct Standing {
    wanted: Option<Place>,
    acknowledged: Option<Place>,
    since: Option<String>,
    problem: String,
}

/// Kubernetes Node of a guest.
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

/// Health of a guest: the result of its boot, and its services.
#[derive(Debug, Serialize)]
pub struct Health {
    cloud_init: String,
    cloud_init_errors: Vec<String>,
    failed_units: Vec<String>,
}

/// Sorts labels, so that their order is stable.
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
