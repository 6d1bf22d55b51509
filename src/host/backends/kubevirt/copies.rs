//! Copies of what is listed often: our claims, and the storage classes. Watches keep them up to date; nothing is decided by
//! them that must not be decided by what was so a moment ago.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::Api;
use kube::{Resource, ResourceExt as _};
use tokio::sync::watch;

use super::api::Cluster;
use super::claims::{self, OURS};
use super::names::Claim;
use crate::host::backends::volumes::{Class, Volume};
use crate::kubernetes::follow::{Heard, follow};
use crate::kubernetes::lists::Selector;
use crate::supervise::Scope;

/// The annotation of a storage class for claims that name none.
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";

/// By namespace, which may be empty, and name; none before all were listed once.
type Kept<T> = watch::Receiver<Option<BTreeMap<(String, String), T>>>;

/// The copies.
#[derive(Debug)]
pub struct Copies {
    claims: Kept<Volume>,
    classes: Kept<Class>,
    _tasks: Scope,
}

impl Copies {
    /// Those of this cluster, of which nothing is there yet.
    pub fn begin(cluster: &Cluster) -> Self {
        let tasks = Scope::new();
        let ours = Selector { labels: Some(format!("{}={}", OURS.0, OURS.1)), ..Selector::default() };
        let claims = Api::<PersistentVolumeClaim>::all(cluster.client());
        let teller =
            cluster.teller("the claims of volumes cannot be read, and what is listed of them may be old");
        let claims = copy(&tasks, follow(claims, ours, Some(teller)), claims::volume);
        let classes = Api::<StorageClass>::all(cluster.client());
        let teller = cluster.teller("the storage classes of the cluster cannot be read, and may be old");
        let classes =
            copy(&tasks, follow(classes, Selector::default(), Some(teller)), |one| Some(class(one)));
        Self { claims, classes, _tasks: tasks }
    }

    /// Returns when all of them are there; as long as the API server cannot be asked, it does not.
    pub async fn there(&self) {
        let (mut claims, mut classes) = (self.claims.clone(), self.classes.clone());
        // They fail only when nobody follows any more, which ends with this value.
        drop(claims.wait_for(Option::is_some).await);
        drop(classes.wait_for(Option::is_some).await);
    }

    /// Whether all of them are there.
    pub fn are_there(&self) -> bool {
        self.claims.borrow().is_some() && self.classes.borrow().is_some()
    }

    /// The volumes of our claims; none before all are there.
    pub fn volumes(&self) -> Option<Vec<Volume>> {
        self.claims.borrow().as_ref().map(|all| all.values().cloned().collect())
    }

    /// Whether the VM of this UUID is to have the volume that a claim is.
    pub fn is_published(&self, claim: &Claim, uuid: &str) -> bool {
        let key = (claim.namespace.clone(), claim.name.clone());
        let claims = self.claims.borrow();
        let volume = claims.as_ref().and_then(|all| all.get(&key));
        volume.and_then(|volume| volume.published.as_ref()).is_some_and(|published| published.uuid == uuid)
    }

    /// The storage classes, in the order of their names.
    pub fn classes(&self) -> Vec<Class> {
        self.classes.borrow().iter().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Waits until there is a copy of this claim, but no longer than that.
    pub async fn shows(&self, claim: &Claim, patience: Duration) {
        let key = (claim.namespace.clone(), claim.name.clone());
        let mut claims = self.claims.clone();
        let is_there = |all: &Option<BTreeMap<_, _>>| all.as_ref().is_some_and(|all| all.contains_key(&key));
        drop(tokio::time::timeout(patience, claims.wait_for(is_there)).await);
    }
}

fn class(class: &StorageClass) -> Class {
    let is_default = class.annotations().get(DEFAULT_CLASS).is_some_and(|value| value == "true");
    Class { name: class.name_any(), is_default }
}

/// Keeps what is read of all objects that are followed, for as long as the scope lasts.
fn copy<K, T>(
    tasks: &Scope,
    followed: impl Stream<Item = Heard<K>> + Send + 'static,
    read: fn(&K) -> Option<T>,
) -> Kept<T>
where
    K: Resource + Send + 'static,
    T: std::fmt::Debug + Send + Sync + 'static,
{
    let (kept, copy) = watch::channel(None);
    tasks.children().spawn(async move {
        let mut followed = std::pin::pin!(followed);
        while let Some(heard) = followed.next().await {
            kept.send_modify(|all| keep(all.get_or_insert_default(), heard, read));
        }
    });
    copy
}

fn keep<K: Resource, T>(all: &mut BTreeMap<(String, String), T>, heard: Heard<K>, read: fn(&K) -> Option<T>) {
    let key = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());
    match heard {
        Heard::All(objects) => {
            let made = |object: &K| Some((key(object), read(object)?));
            *all = objects.iter().filter_map(made).collect();
        }
        Heard::There(object) => match read(&object) {
            Some(made) => drop(all.insert(key(&object), made)),
            None => drop(all.remove(&key(&object))),
        },
        Heard::Gone(object) => drop(all.remove(&key(&object))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(name: &str, default: &str) -> StorageClass {
        let metadata = json!({ "name": name, "annotations": { DEFAULT_CLASS: default } });
        serde_json::from_value(json!({ "metadata": metadata, "provisioner": "x" })).unwrap()
    }

    #[test]
    fn a_copy_is_what_was_heard_last() {
        // Of one without the annotation nothing is kept.
        let only_defaults = |object: &StorageClass| Some(class(object)).filter(|class| class.is_default);
        let mut all = BTreeMap::new();
        let mut hear = |heard| {
            keep(&mut all, heard, only_defaults);
            all.values().map(|class| class.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(
            hear(Heard::All(vec![object("b", "true"), object("c", "false"), object("a", "true")])),
            ["a", "b"]
        );
        assert_eq!(hear(Heard::There(object("c", "true"))), ["a", "b", "c"]);
        assert_eq!(hear(Heard::There(object("b", "false"))), ["a", "c"]);
        assert_eq!(hear(Heard::Gone(object("a", "true"))), ["c"]);
        assert_eq!(hear(Heard::Gone(object("a", "true"))), ["c"]);
        assert_eq!(hear(Heard::All(vec![object("d", "true")])), ["d"]);
    }
}
