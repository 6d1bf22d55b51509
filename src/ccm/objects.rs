//! Nodes and Services as far as they are read. Fields are named as in Kubernetes' API, any of them may be missing, and what is not
//! needed is dropped as each object is read: a Node of the API server has twenty times as much.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{NodeAddress, Taint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use kube::core::{ClusterResourceScope, NamespaceResourceScope};
use serde::Deserialize;

use crate::ccm::services::wanted::PREFIX;

/// Annotations of ours begin so.
pub const OWN: &str = "guestlet.io/";
/// Annotations by which kube-vip is told what to announce begin so.
pub const KUBE_VIP: &str = "kube-vip.io/";
/// The addresses that kubelet was told to use.
pub const PROVIDED_NODE_IP: &str = "alpha.kubernetes.io/provided-node-ip";

/// A Node.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(from = "WholeNode")]
pub struct Node {
    /// With labels, and of the annotations those that mean something here.
    pub metadata: ObjectMeta,
    /// Empty if it has none.
    pub provider_id: String,
    /// In their order.
    pub taints: Vec<Taint>,
    /// In their order.
    pub addresses: Vec<NodeAddress>,
    /// As kubelet reads it from the firmware, in lower case; empty if it reads none.
    pub system_uuid: String,
    /// Its condition `Ready` is `True`.
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

/// A Service.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(from = "WholeService")]
pub struct Service {
    /// With labels, and of the annotations those that mean something here.
    pub metadata: ObjectMeta,
    /// What is wanted.
    pub spec: ServiceSpec,
    /// What it has.
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

/// What is wanted of a Service.
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
    /// Before dual stack, a Service had one family.
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

/// What a Service has.
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

/// What of it is kept.
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

/// An annotation of an object, if it is not empty.
pub fn annotation<'m>(metadata: &'m ObjectMeta, key: &str) -> Option<&'m str> {
    let found = metadata.annotations.as_ref()?.get(key)?;
    Some(found.as_str()).filter(|found| !found.is_empty())
}

/// The name of an object; the API server gives out none without.
pub fn name(metadata: &ObjectMeta) -> &str {
    metadata.name.as_deref().unwrap_or_default()
}

/// Its UID.
pub fn uid(metadata: &ObjectMeta) -> &str {
    metadata.uid.as_deref().unwrap_or_default()
}
