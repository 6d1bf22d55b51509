//! Nodes and Services, reduced to the fields that are used. Fields are named as in Kubernetes' API, any of
//! them may be missing, and unused ones are dropped as each object is read: a Node of the API server is
//! twenty times as large.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{NodeAddress, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::Deserialize;

use crate::ccm::services::wanted::PREFIX;

/// Prefix of guestlet's own annotations.
pub const OWN: &str = "guestlet.io/";
/// Prefix of the annotations that tell kube-vip what to announce.
pub const KUBE_VIP: &str = "kube-vip.io/";
/// Annotation with the addresses that kubelet was configured to use.
pub const PROVIDED_NODE_IP: &str = "alpha.kubernetes.io/provided-node-ip";

/// Node, with the fields that this program uses.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(from = "WholeNode")]
pub struct Node {
    /// Metadata with labels, and with those annotations that have a meaning here.
    pub metadata: ObjectMeta,
    /// Provider identifier; empty if the Node has none.
    pub provider_id: String,
    /// Taints, in their order.
    pub taints: Vec<Taint>,
    /// Addresses, in their order.
    pub addresses: Vec<NodeAddress>,
    /// System UUID that kubelet reads from the firmware, in lower case; empty if it reads none.
    pub system_uuid: String,
    /// True if its condition `Ready` is `True`.
    pub is_ready: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct WholeNode {
    metadata: ObjectMeta,
    spec: WholeNodeSpec,
    status: WholeNodeStatus,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct WholeNodeSpec {
    #[serde(rename = "providerID")]
    provider_id: String,
    taints: Vec<Taint>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WholeNodeStatus {
    addresses: Vec<NodeAddress>,
    conditions: Vec<NodeCondition>,
    node_info: NodeInfo,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NodeCondition {
    r#type: String,
    status: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NodeInfo {
    #[serde(rename = "systemUUID")]
    system_uuid: String,
}

impl From<WholeNode> for Node {
    fn from(whole: WholeNode) -> Self {
        let WholeNode { metadata, spec, status } = whole;
        let ready = status.conditions.iter().find(|condition| condition.r#type == "Ready");
        Self {
            metadata: stripped(metadata),
            provider_id: spec.provider_id,
            taints: spec.taints,
            is_ready: ready.is_some_and(|ready| ready.status == "True"),
            addresses: status.addresses,
            system_uuid: status.node_info.system_uuid.to_lowercase(),
        }
    }
}

/// Service, with the fields that this program uses.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(from = "WholeService")]
pub struct Service {
    /// Metadata with labels, and with those annotations that have a meaning here.
    pub metadata: ObjectMeta,
    /// Desired state.
    pub spec: ServiceSpec,
    /// Present state.
    pub status: ServiceStatus,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct WholeService {
    metadata: ObjectMeta,
    spec: ServiceSpec,
    status: ServiceStatus,
}

impl From<WholeService> for Service {
    fn from(whole: WholeService) -> Self {
        let WholeService { metadata, spec, status } = whole;
        Self { metadata: stripped(metadata), spec, status }
    }
}

/// Desired state of a Service.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct ServiceSpec {
    pub r#type: String,
    pub load_balancer_class: Option<String>,
    #[serde(rename = "loadBalancerIP")]
    pub load_balancer_ip: String,
    pub load_balancer_source_ranges: Vec<String>,
    pub external_traffic_policy: String,
    pub health_check_node_port: i32,
    pub session_affinity: String,
    pub session_affinity_config: SessionAffinityConfig,
    pub ip_families: Vec<String>,
    pub ip_family_policy: String,
    /// Cluster address of a Service from before dual stack, which has a single family.
    #[serde(rename = "clusterIP")]
    pub cluster_ip: String,
    pub ports: Vec<ServicePort>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct SessionAffinityConfig {
    #[serde(rename = "clientIP")]
    pub client_ip: ClientIpConfig,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct ClientIpConfig {
    pub timeout_seconds: i32,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct ServicePort {
    pub name: String,
    pub protocol: String,
    pub port: i32,
    pub node_port: i32,
}

/// Present state of a Service.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct ServiceStatus {
    pub load_balancer: LoadBalancerStatus,
    pub conditions: Vec<Condition>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct LoadBalancerStatus {
    pub ingress: Vec<Ingress>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
#[allow(missing_docs, reason = "named as in Kubernetes' API")]
pub struct Ingress {
    pub ip: String,
}

/// Returns the part of the metadata that is kept.
fn stripped(metadata: ObjectMeta) -> ObjectMeta {
    let is_known = |key: &str| {
        key == PROVIDED_NODE_IP || [OWN, KUBE_VIP, PREFIX].iter().any(|prefix| key.starts_with(prefix))
    };
    let annotations = metadata.annotations.map(|mut annotations| {
        annotations.retain(|key, _| is_known(key));
        annotations
    });
    ObjectMeta { annotations, managed_fields: None, owner_references: None, ..metadata }
}

macro_rules! resource {
    ($type:ty, $kind:literal, $plural:literal, $scope:ty) => {
        impl kube::Resource for $type {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                $kind.into()
            }

            fn group((): &()) -> Cow<'_, str> {
                "".into()
            }

            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(Node, "Node", "nodes", ClusterResourceScope);
resource!(Service, "Service", "services", NamespaceResourceScope);

/// Returns an annotation of an object, if it is not empty.
pub fn annotation<'m>(metadata: &'m ObjectMeta, key: &str) -> Option<&'m str> {
    let found = metadata.annotations.as_ref()?.get(key)?;
    Some(found.as_str()).filter(|found| !found.is_empty())
}

/// Returns the name of an object, which the API server guarantees to be present.
pub fn name(metadata: &ObjectMeta) -> &str {
    metadata.name.as_deref().unwrap_or_default()
}

/// Returns the UID of an object; empty if it has none.
pub fn uid(metadata: &ObjectMeta) -> &str {
    metadata.uid.as_deref().unwrap_or_default()
}
