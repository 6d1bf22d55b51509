//! Copies of what is listed often: our claims, and the storage classes. Watches keep them up to date; nothing is decided by
//! them that must not be decided by what was so a moment ago.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::Api;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::reflector::{self, Lookup, Store};
use kube::runtime::watcher::{self, Config, watcher};
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::api::Cluster;
use super::claims::{self, OURS};
use crate::host::backends::volumes::Class;
use crate::supervise::Scope;

/// The annotation of a storage class for claims that name none.
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";
/// How often it is looked whether a copy shows what was written.
const LOOK: Duration = Duration::from_millis(10);

/// The copies.
#[derive(Debug)]
pub struct Copies {
    claims: Store<PersistentVolumeClaim>,
    classes: Store<StorageClass>,
    _tasks: Scope,
}

impl Copies {
    /// Those of this cluster. Returns when all of them are there; as long as the API server cannot be asked, it does not.
    pub async fn new(cluster: &Cluster) -> Self {
        let tasks = Scope::new();
        let ours = Config::default().labels(&format!("{}={}", OURS.0, OURS.1));
        let claims = follow(&tasks, Api::all(cluster.client()), ours);
        let classes = follow(&tasks, Api::all(cluster.client()), Config::default());
        // They fail only when the watch has ended, which ends with this value.
        drop(claims.wait_until_ready().await);
        drop(classes.wait_until_ready().await);
        Self { claims, classes, _tasks: tasks }
    }

    /// Our claims.
    pub fn claims(&self) -> Vec<Arc<PersistentVolumeClaim>> {
        self.claims.state()
    }

    /// The storage classes, in the order of their names.
    pub fn classes(&self) -> Vec<Class> {
        let class = |class: &Arc<StorageClass>| Class {
            name: class.name_any(),
            is_default: class.annotations().get(DEFAULT_CLASS).is_some_and(|value| value == "true"),
        };
        let mut classes: Vec<_> = self.classes.state().iter().map(class).collect();
        classes.sort_by(|one, other| one.name.cmp(&other.name));
        classes
    }

    /// Waits until the volume of this identifier is among the copies, but no longer than that.
    pub async fn shows(&self, id: &str, patience: Duration) {
        let begun = Instant::now();
        let is_it =
            |claim: &PersistentVolumeClaim| claims::volume(claim).is_some_and(|volume| volume.id == id);
        while self.claims.find(is_it).is_none() && begun.elapsed() < patience {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Keeps a copy of all objects of a kind, for as long as the scope lasts.
fn follow<K>(tasks: &Scope, api: Api<K>, config: Config) -> Store<K>
where
    K: Resource<DynamicType = ()>
        + Lookup<DynamicType = ()>
        + Clone
        + DeserializeOwned
        + Send
        + Sync
        + std::fmt::Debug
        + 'static,
{
    let (store, writer) = reflector::store();
    let changes = watcher(api, config).default_backoff().modify(trim).reflect(writer);
    tasks.children().spawn(told(changes));
    store
}

/// Takes off what nobody reads.
fn trim<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

/// Says of a watch that it is broken, once, and that it works again.
async fn told<K: Resource<DynamicType = ()>>(
    changes: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
) {
    let mut changes = std::pin::pin!(changes);
    let mut is_broken = false;
    while let Some(change) = changes.next().await {
        match change {
            Err(error) if !is_broken => {
                is_broken = true;
                let error = crate::sys::error_chain::words(&error);
                tracing::warn!(error, "cannot watch the {} of the host cluster", K::plural(&()));
            }
            Ok(_) if is_broken => {
                is_broken = false;
                tracing::info!("the {} of the host cluster are watched again", K::plural(&()));
            }
            _ => {}
        }
    }
}
