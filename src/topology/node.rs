//! A Node as far as this room reads it.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::guest::topology::{Labels, Node};

/// Most of each kind that is told to the host half.
const MOST: usize = 64;

/// The object of the API server.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Object {
    pub metadata: Metadata,
    pub spec: Spec,
    pub status: Status,
}

/// Its `metadata`.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Metadata {
    pub name: String,
    pub uid: String,
    pub resource_version: String,
    pub labels: Labels,
    pub annotations: BTreeMap<String, String>,
}

/// Its `spec`.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Spec {
    #[serde(rename = "providerID")]
    pub provider_id: String,
    pub taints: Vec<Taint>,
}

/// A taint.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Taint {
    pub key: String,
    pub value: String,
    pub effect: String,
}

/// Its `status`.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Status {
    pub conditions: Vec<Condition>,
    pub addresses: Vec<Address>,
    pub node_info: NodeInfo,
}

/// A condition.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    pub status: String,
    pub message: String,
}

/// An address.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Address {
    #[serde(rename = "type")]
    pub kind: String,
    pub address: String,
}

/// What kubelet says of the machine.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct NodeInfo {
    #[serde(rename = "systemUUID")]
    pub system_uuid: String,
    pub kubelet_version: String,
}

/// A list of Nodes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct List {
    pub metadata: Metadata,
    pub items: Vec<Object>,
}

impl Object {
    /// What the host half is told of it.
    pub fn told(&self, state: &'static str, reason: String) -> Node {
        let ready = self.status.conditions.iter().find(|condition| condition.kind == "Ready");
        let taint = |taint: &Taint| {
            let value = if taint.value.is_empty() { String::new() } else { format!("={}", taint.value) };
            format!("{}{value}:{}", taint.key, taint.effect)
        };
        let address = |address: &Address| format!("{} {}", address.kind, address.address);
        Node {
            name: self.metadata.name.clone(),
            state,
            reason,
            ready: ready.map(|ready| ready.status.clone()).unwrap_or_default(),
            ready_reason: ready
                .filter(|ready| ready.status != "True")
                .map(|ready| ready.message.clone())
                .unwrap_or_default(),
            labels: self.metadata.labels.clone().into_iter().take(2 * MOST).collect(),
            taints: self.spec.taints.iter().take(MOST).map(taint).collect(),
            addresses: self.status.addresses.iter().take(MOST).map(address).collect(),
            provider_id: self.spec.provider_id.clone(),
            kubelet_version: self.status.node_info.kubelet_version.clone(),
        }
    }
}
