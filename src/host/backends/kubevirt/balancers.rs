//! Harvester's load balancers, `loadbalancer.harvesterhci.io/v1beta1`: what is read of them and of their pools, and what is asked of
//! the API server about the former. Neither has a status of its own: whoever may change one may change all of it.
//!
//! Where there is no Harvester there are no such kinds; that is looked at again now and then.

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

/// Their group and version.
pub const API: &str = "loadbalancer.harvesterhci.io/v1beta1";
const GROUP: &str = "loadbalancer.harvesterhci.io";
/// The label that those of guest clusters have.
pub const CLUSTER: &str = "cloudprovider.harvesterhci.io/cluster";
/// When it is looked again whether there are such kinds.
const AGAIN: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_secs(2);
/// Objects in one answer.
const PAGE: u32 = 100;

/// A load balancer.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Balancer {
    /// Name, namespace, labels and annotations.
    pub metadata: ObjectMeta,
    /// What is wanted.
    #[serde(default)]
    pub spec: BalancerSpec,
    /// How it is.
    #[serde(default, deserialize_with = "or_default")]
    pub status: BalancerStatus,
}

/// Spec of a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BalancerSpec {
    /// `vm` or `cluster`; empty is the former.
    pub workload_type: String,
    /// `pool` or `dhcp`; empty is the former.
    pub ipam: String,
}

/// Status of a load balancer.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BalancerStatus {
    /// Where it is reached, as whoever has it announced says.
    #[serde(deserialize_with = "or_default")]
    pub address: String,
    /// The address that it was given.
    #[serde(deserialize_with = "or_default")]
    pub allocated_address: Allocated,
    /// What is said of it.
    #[serde(deserialize_with = "or_default")]
    pub conditions: Vec<super::objects::Condition>,
}

/// An address that a load balancer was given.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Allocated {
    /// The pool that it is from.
    #[serde(deserialize_with = "or_default")]
    pub ip_pool: String,
    /// The address; `0.0.0.0` where somebody else gets one by DHCP.
    #[serde(deserialize_with = "or_default")]
    pub ip: String,
}

/// Addresses that load balancers are given.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Pool {
    /// Its name.
    pub metadata: ObjectMeta,
    /// What it is.
    #[serde(default)]
    pub spec: PoolSpec,
    /// What of it is taken.
    #[serde(default, deserialize_with = "or_default")]
    pub status: PoolStatus,
}

/// Spec of a pool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PoolSpec {
    /// Its addresses.
    #[serde(deserialize_with = "or_default")]
    pub ranges: Vec<PoolRange>,
    /// Who may have them.
    #[serde(deserialize_with = "or_default")]
    pub selector: PoolSelector,
}

/// Addresses of a pool that follow each other.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolRange {
    /// The first one; empty: that of the subnet.
    #[serde(deserialize_with = "or_default")]
    pub range_start: String,
    /// The last one; empty: that of the subnet.
    #[serde(deserialize_with = "or_default")]
    pub range_end: String,
    /// The subnet that they are in.
    pub subnet: String,
}

/// Selector of those who may have addresses of a pool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PoolSelector {
    /// The network that they belong to.
    #[serde(deserialize_with = "or_default")]
    pub network: String,
    /// Those that may have them.
    #[serde(deserialize_with = "or_default")]
    pub scope: Vec<PoolScope>,
}

/// Some that may have addresses of a pool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolScope {
    /// A project of Rancher; `*` is any.
    #[serde(deserialize_with = "or_default")]
    pub project: String,
    /// A namespace; `*` is any.
    #[serde(deserialize_with = "or_default")]
    pub namespace: String,
    /// A guest cluster; `*` is any.
    #[serde(deserialize_with = "or_default")]
    pub guest_cluster: String,
}

/// Status of a pool.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PoolStatus {
    /// Its addresses.
    #[serde(deserialize_with = "or_default")]
    pub total: u64,
    /// Those that are free.
    #[serde(deserialize_with = "or_default")]
    pub available: u64,
    /// Who has which.
    #[serde(deserialize_with = "or_default")]
    pub allocated: BTreeMap<String, String>,
    /// Who had which last.
    #[serde(deserialize_with = "or_default")]
    pub allocated_history: BTreeMap<String, String>,
}

resource!(Balancer, "LoadBalancer", "loadbalancers", GROUP, "v1beta1");
resource!(Pool, "IPPool", "ippools", GROUP, "v1beta1");

/// What is heard.
#[derive(Debug, Clone, PartialEq)]
pub enum Told {
    /// There are no such kinds, or no right to read them.
    Missing,
    /// Of the load balancers of guest clusters.
    Balancers(Heard<Balancer>),
    /// Of the pools.
    Pools(Heard<Pool>),
}

/// Outcome of a change.
#[derive(Debug, Clone, PartialEq)]
pub enum Changed {
    /// It was made; the object as it is now.
    Yes(Box<Balancer>),
    /// The object is gone.
    Gone,
    /// Somebody has changed the object since it was read, or there is another one of its name.
    Conflict,
}

/// Follows load balancers and pools, for ever, as soon as there are such kinds.
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

/// Without what nobody reads.
fn slim(mut balancer: Balancer) -> Balancer {
    balancer.metadata.managed_fields = None;
    balancer
}

impl Cluster {
    /// The load balancers of a namespace with these labels, as the API server says now.
    ///
    /// # Errors
    /// If it does not.
    pub async fn balancers(&self, namespace: &str, labels: String) -> Result<Vec<Balancer>, VolumeError> {
        let api = Api::<Balancer>::namespaced(self.client(), namespace);
        let selector = Selector { labels: Some(labels), ..Selector::default() };
        let what = format!("list the LoadBalancers of the namespace {namespace}");
        let listed = lists::all(&api, &selector, PAGE).await.map_err(|failed| unanswered(&what, &failed))?;
        Ok(listed.all.into_iter().map(slim).collect())
    }

    /// Makes a load balancer.
    ///
    /// # Errors
    /// If it cannot be made; [`VolumeError::Refused`] in the words of whoever does not admit it.
    pub async fn make_balancer(&self, namespace: &str, object: &Value) -> Result<Changed, VolumeError> {
        let what = format!("make a LoadBalancer in the namespace {namespace}");
        let path = format!("/apis/{API}/namespaces/{namespace}/loadbalancers");
        let request = json_request(Method::POST, &path, object, &what)?;
        let made = self.alter(&what, self.client().request::<Balancer>(request)).await?;
        changed(made, &what)
    }

    /// Changes a load balancer as a merge patch says, unless it has changed since it was read.
    ///
    /// # Errors
    /// As those of [`Cluster::make_balancer`].
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

    /// Deletes the very load balancer that was read. It is there until its address is given back.
    ///
    /// # Errors
    /// If it cannot be deleted.
    pub async fn delete_balancer(&self, read: &Balancer) -> Result<Changed, VolumeError> {
        let (namespace, name) = place(read);
        let what = format!("delete the LoadBalancer {namespace}/{name}");
        // Its version counts as well: somebody may have begun to share its address.
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

/// Where a load balancer is.
fn place(balancer: &Balancer) -> (&str, &str) {
    let metadata = &balancer.metadata;
    (metadata.namespace.as_deref().unwrap_or_default(), metadata.name.as_deref().unwrap_or_default())
}
