//! Node object, with the fields that this room reads.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::guest::topology::{Labels, Node};

/// Maximum number of taints, and of addresses, that are reported to the host half.
const MOST: usize = 64;

/// Node as the API server represents it.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Object {
    pub metadata: Metadata,
    pub spec: Spec,
    pub status: Status,
}

/// The `metadata` of an object.
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

/// The `spec` of a Node.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Spec {
    #[serde(rename = "providerID")]
    pub provider_id: String,
    pub taints: Vec<Taint>,
}

/// Entry of `spec.taints`.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Taint {
    pub key: String,
    pub value: String,
    pub effect: String,
}

/// The `status` of a Node.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Status {
    pub conditions: Vec<Condition>,
    pub addresses: Vec<Address>,
    pub node_info: NodeInfo,
}

/// Entry of `status.conditions`.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    pub status: String,
    pub message: String,
}

/// Entry of `status.addresses`.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Address {
    #[serde(rename = "type")]
    pub kind: String,
    pub address: String,
}

/// The `status.nodeInfo` that kubelet sets.
#[derive(Debug, Clone, Default, Deserialize, PartialEq, Eq)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct NodeInfo {
    #[serde(rename = "systemUUID")]
    pub system_uuid: String,
    pub kubelet_version: String,
}

/// List of Nodes.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct List {
    pub metadata: Metadata,
    pub items: Vec<Object>,
}

impl Object {
    /// Summarises the Node for the host half.
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
