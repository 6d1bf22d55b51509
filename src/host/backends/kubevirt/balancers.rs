//! Harvester's load balancers, `loadbalancer.harvesterhci.io/v1beta1`: the fields that are read of them and of
//! their IP pools, and the requests that change load balancers. Neither kind has a status subresource:
//! permission to change one covers the whole object.
//!
//! Outside Harvester these kinds do not exist; their existence is checked again from time to time.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use http::Method;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use kube::{Api, Error};
use serde::Deserialize;
use serde_json::Value;

use super::api::{Cluster, code, failed, json_request, refusal, unanswered};
use super::objects::{or_default, resource};
use crate::host::backends::volumes::VolumeError;
use crate::kubernetes::follow::{Heard, follow};
use crate::kubernetes::lists::{self, Failed, Selector};

/// Group and version of both kinds.
pub const API: &str = "loadbalancer.harvesterhci.io/v1beta1";
const GROUP: &str = "loadbalancer.harvesterhci.io";
/// Label of the load balancers of guest clusters.
pub const CLUSTER: &str = "cloudprovider.harvesterhci.io/cluster";
/// Interval between checks whether the kinds exist.
const AGAIN: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(2);
/// Maximum number of objects in one page of a list.
const PAGE: u32 = 100;

/// LoadBalancer object.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Balancer {
    /// Metadata: name, namespace, labels and annotations are used.
    pub metadata: ObjectMeta,
    /// Desired state.
    #[serde(default)]
    pub spec: BalancerSpec,
    /// Observed state.
    #[serde(default, deserialize_with = "or_default")]
    pub status: BalancerStatus,
}

/// Spec of a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BalancerSpec {
    /// Either `vm` or `cluster`; empty means `vm`.
    pub workload_type: String,
    /// Either `pool` or `dhcp`; empty means `pool`.
    pub ipam: String,
}

/// Status of a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BalancerStatus {
    /// Address of the load balancer, as reported by the component that announces it.
    #[serde(deserialize_with = "or_default")]
    pub address: String,
    /// Address that was allocated to it.
    #[serde(deserialize_with = "or_default")]
    pub allocated_address: Allocated,
    /// Conditions that Harvester reports.
    #[serde(deserialize_with = "or_default")]
    pub conditions: Vec<super::objects::Condition>,
}

/// Address that was allocated to a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Allocated {
    /// Pool of the address.
    #[serde(deserialize_with = "or_default")]
    pub ip_pool: String,
    /// The address; `0.0.0.0` if the announcing component gets one by DHCP.
    #[serde(deserialize_with = "or_default")]
    pub ip: String,
}

/// Pool of addresses for load balancers.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Pool {
    /// Metadata, of which the name is used.
    pub metadata: ObjectMeta,
    /// Configuration of the pool.
    #[serde(default)]
    pub spec: PoolSpec,
    /// Addresses in use.
    #[serde(default, deserialize_with = "or_default")]
    pub status: PoolStatus,
}

/// Spec of a pool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PoolSpec {
    /// Address ranges of the pool.
    #[serde(deserialize_with = "or_default")]
    pub ranges: Vec<PoolRange>,
    /// Selector of the clients that may use the pool.
    #[serde(deserialize_with = "or_default")]
    pub selector: PoolSelector,
}

/// Contiguous range of addresses.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolRange {
    /// First address; empty for the first of the subnet.
    #[serde(deserialize_with = "or_default")]
    pub range_start: String,
    /// Last address; empty for the last of the subnet.
    #[serde(deserialize_with = "or_default")]
    pub range_end: String,
    /// Subnet of the range.
    pub subnet: String,
}

/// Selector of the clients that may use a pool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PoolSelector {
    /// Network that the clients belong to.
    #[serde(deserialize_with = "or_default")]
    pub network: String,
    /// Scopes that may use the pool.
    #[serde(deserialize_with = "or_default")]
    pub scope: Vec<PoolScope>,
}

/// Scope of clients that may use a pool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolScope {
    /// Rancher project; `*` for any.
    #[serde(deserialize_with = "or_default")]
    pub project: String,
    /// Namespace; `*` for any.
    #[serde(deserialize_with = "or_default")]
    pub namespace: String,
    /// Guest cluster; `*` for any.
    #[serde(deserialize_with = "or_default")]
    pub guest_cluster: String,
}

/// Status of a pool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolStatus {
    /// Number of addresses in the pool.
    #[serde(deserialize_with = "or_default")]
    pub total: u64,
    /// Number of free addresses.
    #[serde(deserialize_with = "or_default")]
    pub available: u64,
    /// Load balancers by the address that is allocated to them.
    #[serde(deserialize_with = "or_default")]
    pub allocated: BTreeMap<String, String>,
    /// Load balancers by the address that they had last.
    #[serde(deserialize_with = "or_default")]
    pub allocated_history: BTreeMap<String, String>,
}

resource!(Balancer, "LoadBalancer", "loadbalancers", GROUP, "v1beta1");
resource!(Pool, "IPPool", "ippools", GROUP, "v1beta1");

/// Event of the watches on both kinds.
#[derive(Debug, Clone, PartialEq)]
pub enum Told {
    /// The kinds do not exist, or this process has no permission to read them.
    Missing,
    /// Event about a load balancer of a guest cluster.
    Balancers(Heard<Balancer>),
    /// Event about an IP pool.
    Pools(Heard<Pool>),
}

/// Outcome of a change.
#[derive(Debug, Clone, PartialEq)]
pub enum Changed {
    /// The change was made; contains the resulting object.
    Yes(Box<Balancer>),
    /// The object no longer exists.
    Gone,
    /// The object has been changed since it was read, or another one of the same name exists.
    Conflict,
}

/// Watches load balancers and pools indefinitely, as soon as the kinds exist.
pub fn follow_balancers(cluster: &Cluster) -> impl Stream<Item = Told> + Send + use<> {
    let balancers = Api::<Balancer>::all(cluster.client());
    let pools = Api::<Pool>::all(cluster.client());
    let missing = stream::unfold((balancers.clone(), false), async |(api, was_missing)| {
        if was_missing {
            tokio::time::sleep(AGAIN).await;
        }
        loop {
            match lists::in_time(api.list(&ListParams::default().limit(1))).await {
                Ok(_) => return None,
                Err(Failed::Answered(error)) if matches!(code(&error), Some(403 | 404)) => {
                    return Some((Told::Missing, (api, true)));
                }
                Err(_) => tokio::time::sleep(SOON).await,
            }
        }
    });
    let teller = cluster.teller("the load balancers of guest clusters cannot be read, and may be stale");
    let of_clusters = Selector { labels: Some(CLUSTER.to_owned()), ..Selector::default() };
    let balancers = follow(balancers, of_clusters, Some(teller));
    let balancers = balancers.filter_map(|heard| std::future::ready(heard.map(|one| Some(slim(one)))));
    let teller = cluster.teller("the pools of addresses cannot be read, and may be stale");
    let pools = follow(pools, Selector::default(), Some(teller));
    missing.chain(stream::select(balancers.map(Told::Balancers), pools.map(Told::Pools))).boxed()
}

/// Drops the fields that are never read.
fn slim(mut balancer: Balancer) -> Balancer {
    balancer.metadata.managed_fields = None;
    balancer
}

impl Cluster {
    /// Reads the load balancers of a namespace with these labels from the API server.
    ///
    /// # Errors
    /// If they cannot be read.
    pub async fn balancers(&self, namespace: &str, labels: String) -> Result<Vec<Balancer>, VolumeError> {
        let api = Api::<Balancer>::namespaced(self.client(), namespace);
        let selector = Selector { labels: Some(labels), ..Selector::default() };
        let what = format!("list the LoadBalancers of the namespace {namespace}");
        let listed = lists::all(&api, &selector, PAGE).await.map_err(|failed| unanswered(&what, &failed))?;
        Ok(listed.all.into_iter().map(slim).collect())
    }

    /// Creates a load balancer.
    ///
    /// # Errors
    /// If it cannot be created; [`VolumeError::Refused`] with the message of the admission webhook that denied it.
    pub async fn make_balancer(&self, namespace: &str, object: &Value) -> Result<Changed, VolumeError> {
        let what = format!("create a LoadBalancer in the namespace {namespace}");
        let path = format!("/apis/{API}/namespaces/{namespace}/loadbalancers");
        let request = json_request(Method::POST, &path, object, &what)?;
        let made = self.alter(&what, self.client().request::<Balancer>(request)).await?;
        changed(made, &what)
    }

    /// Applies a merge patch to a load balancer, unless it has been changed since it was read.
    ///
    /// # Errors
    /// Those of [`Cluster::make_balancer`].
    pub async fn change_balancer(&self, read: &Balancer, mut patch: Value) -> Result<Changed, VolumeError> {
        let (namespace, name) = place(read);
        let what = format!("change the LoadBalancer {namespace}/{name}");
        patch["metadata"]["uid"] = read.metadata.uid.clone().into();
        patch["metadata"]["resourceVersion"] = read.metadata.resource_version.clone().into();
        let api = Api::<Balancer>::namespaced(self.client(), namespace);
        let parameters = PatchParams::default();
        let patched = self.alter(&what, api.patch(name, &parameters, &Patch::Merge(&patch))).await?;
        changed(patched, &what)
    }

    /// Deletes exactly the load balancer that was read. The object remains until its address has been released.
    ///
    /// # Errors
    /// If it cannot be deleted.
    pub async fn delete_balancer(&self, read: &Balancer) -> Result<Changed, VolumeError> {
        let (namespace, name) = place(read);
        let what = format!("delete the LoadBalancer {namespace}/{name}");
        // The version is a precondition too: a service may have begun to share the address.
        let preconditions = Preconditions {
            uid: read.metadata.uid.clone(),
            resource_version: read.metadata.resource_version.clone(),
        };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let api = Api::<Balancer>::namespaced(self.client(), namespace);
        match self.alter(&what, api.delete(name, &parameters)).await? {
            Ok(deleted) => {
                Ok(deleted.left().map_or(Changed::Gone, |left| Changed::Yes(Box::new(slim(left)))))
            }
            Err(error) => changed(Err(error), &what),
        }
    }
}

fn changed(outcome: Result<Balancer, Error>, what: &str) -> Result<Changed, VolumeError> {
    match outcome {
        Ok(object) => Ok(Changed::Yes(Box::new(slim(object)))),
        Err(error) if code(&error) == Some(409) => Ok(Changed::Conflict),
        Err(error) if code(&error) == Some(404) => Ok(Changed::Gone),
        Err(error) => Err(refusal(&error)
            .map_or_else(|| failed(what, &error), |words| VolumeError::Refused(words.to_owned()))),
    }
}

/// Returns the namespace and name of a load balancer.
fn place(balancer: &Balancer) -> (&str, &str) {
    let metadata = &balancer.metadata;
    (metadata.namespace.as_deref().unwrap_or_default(), metadata.name.as_deref().unwrap_or_default())
}
