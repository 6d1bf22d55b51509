//! Caches of the objects that are listed often: guestlet's claims, and the storage classes. Watches keep them
//! up to date. Decisions that must not be based on slightly stale data do not use them.

use std::collections::{BTreeMap, BTreeSet};
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
use crate::host::backends::catalogue::{Catalogue, Entry, usages};
use crate::host::backends::volumes::{Class, Coming, Usages, Volume, VolumeError};
use crate::kubernetes::follow::{Heard, follow};
use crate::kubernetes::lists::Selector;
use crate::supervise::Scope;

/// Annotation of the default storage class.
const DEFAULT_CLASS: &str = "storageclass.kubernetes.io/is-default-class";

/// Error text before all claims and storage classes have been listed.
pub const UNREAD: &str =
    "the claims and storage classes of the cluster have not been read yet; guestctl doctor shows why";

/// Namespace, which may be empty, and name.
type Key = (String, String);
/// Cache contents; `None` before all objects have been listed once.
type Kept<K> = watch::Receiver<Option<K>>;

/// Cache that is kept up to date by a watch.
trait Copy: std::fmt::Debug + Default + Send + Sync + 'static {
    /// Data kept for each object.
    type Of;
    /// Inserts or replaces an object.
    fn put(&mut self, key: Key, one: Self::Of);
    /// Removes an object.
    fn remove(&mut self, key: &Key);
}

impl Copy for BTreeMap<Key, Class> {
    type Of = Class;

    fn put(&mut self, key: Key, one: Class) {
        self.insert(key, one);
    }

    fn remove(&mut self, key: &Key) {
        Self::remove(self, key);
    }
}

/// Volumes with their index.
#[derive(Debug, Default)]
struct Indexed {
    all: BTreeMap<Key, Volume>,
    catalogue: Catalogue,
}

impl Indexed {
    /// Returns the volume with this identifier, which is in the catalogue.
    fn get(&self, id: &str) -> Option<&Volume> {
        let Claim { namespace, name } = Claim::of_id(id)?;
        self.all.get(&(namespace, name))
    }
}

impl Copy for Indexed {
    type Of = Volume;

    fn put(&mut self, key: Key, one: Volume) {
        Copy::remove(self, &key);
        self.catalogue.put(Entry::from(&one));
        self.all.insert(key, one);
    }

    fn remove(&mut self, key: &Key) {
        if let Some(one) = self.all.remove(key) {
            self.catalogue.remove(&one.id);
        }
    }
}

/// Caches of the claims and storage classes.
#[derive(Debug)]
pub struct Copies {
    claims: Kept<Indexed>,
    classes: Kept<BTreeMap<Key, Class>>,
    _tasks: Scope,
}

impl Copies {
    /// Starts the watches on this cluster; the caches are empty at first.
    pub fn begin(cluster: &Cluster) -> Self {
        let tasks = Scope::new();
        let ours = Selector { labels: Some(format!("{}={}", OURS.0, OURS.1)), ..Selector::default() };
        let claims = Api::<PersistentVolumeClaim>::all(cluster.client());
        let teller = cluster.teller("the claims of volumes cannot be read, and their list may be stale");
        let claims = copy(&tasks, follow(claims, ours, Some(teller)), claims::volume);
        let classes = Api::<StorageClass>::all(cluster.client());
        let teller = cluster.teller("the storage classes of the cluster cannot be read, and may be stale");
        let classes =
            copy(&tasks, follow(classes, Selector::default(), Some(teller)), |one| Some(class(one)));
        Self { claims, classes, _tasks: tasks }
    }

    /// Waits until both caches are filled; this takes as long as the API server cannot be reached.
    pub async fn there(&self) {
        let (mut claims, mut classes) = (self.claims.clone(), self.classes.clone());
        // The waits fail only when the watches have ended, which happens only after this value is dropped.
        drop(claims.wait_for(Option::is_some).await);
        drop(classes.wait_for(Option::is_some).await);
    }

    /// Reports whether both caches are filled.
    pub fn are_there(&self) -> bool {
        self.claims.borrow().is_some() && self.classes.borrow().is_some()
    }

    /// Returns the volumes of guestlet's claims; `None` before they have been listed.
    pub fn volumes(&self) -> Option<Vec<Volume>> {
        self.claims.borrow().as_ref().map(|claims| claims.all.values().cloned().collect())
    }

    /// Returns the result of `look` on the volumes of guestlet's claims.
    ///
    /// # Errors
    /// If the claims have not been listed yet.
    fn known<T>(&self, look: impl FnOnce(&Indexed) -> T) -> Result<T, VolumeError> {
        let claims = self.claims.borrow();
        claims.as_ref().map(look).ok_or_else(|| VolumeError::Unavailable(UNREAD.to_owned()))
    }

    /// Returns at most `most` volumes of a cluster, or of all clusters, that sort after this identifier.
    ///
    /// # Errors
    /// If the claims have not been listed yet.
    pub fn part(&self, cluster: Option<&str>, after: &str, most: usize) -> Result<Vec<Volume>, VolumeError> {
        self.known(|claims| {
            let ids = claims.catalogue.after(cluster, after).take(most);
            ids.filter_map(|id| claims.get(id)).cloned().collect()
        })
    }

    /// Returns the volume with this name in a cluster, if there is one.
    ///
    /// # Errors
    /// If the claims have not been listed yet.
    pub fn named(&self, cluster: &str, name: &str) -> Result<Option<Volume>, VolumeError> {
        self.known(|claims| {
            let first = claims.catalogue.named(cluster, name).next();
            first.and_then(|entry| claims.get(&entry.id)).cloned()
        })
    }

    /// Returns the usage of a cluster, including volumes that are coming.
    ///
    /// # Errors
    /// If the claims have not been listed yet.
    pub fn usage(&self, cluster: &str, class: &str, coming: &[Coming]) -> Result<Usages, VolumeError> {
        self.known(|claims| usages(&std::iter::once(&claims.catalogue), cluster, class, coming))
    }

    /// Returns the identifiers of the volumes that are published to the VM with this UUID.
    ///
    /// # Errors
    /// If the claims have not been listed yet.
    pub fn of_vm(&self, uuid: &str) -> Result<BTreeSet<String>, VolumeError> {
        self.known(|claims| claims.catalogue.of_vm(uuid).map(str::to_owned).collect())
    }

    /// Reports whether the volume of this claim is published to the VM with this UUID.
    pub fn is_published(&self, claim: &Claim, uuid: &str) -> bool {
        let key = (claim.namespace.clone(), claim.name.clone());
        let claims = self.claims.borrow();
        let volume = claims.as_ref().and_then(|claims| claims.all.get(&key));
        volume.and_then(|volume| volume.published.as_ref()).is_some_and(|published| published.uuid == uuid)
    }

    /// Returns the storage classes, ordered by name.
    pub fn classes(&self) -> Vec<Class> {
        self.classes.borrow().iter().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Waits until this claim is in the cache, for at most this time.
    pub async fn shows(&self, claim: &Claim, patience: Duration) {
        let key = (claim.namespace.clone(), claim.name.clone());
        let mut claims = self.claims.clone();
        let is_there =
            |claims: &Option<Indexed>| claims.as_ref().is_some_and(|claims| claims.all.contains_key(&key));
        drop(tokio::time::timeout(patience, claims.wait_for(is_there)).await);
    }
}

fn class(class: &StorageClass) -> Class {
    let is_default = class.annotations().get(DEFAULT_CLASS).is_some_and(|value| value == "true");
    Class { name: class.name_any(), is_default }
}

/// Starts a watch that fills a cache for as long as the scope lasts.
fn copy<K: Resource + Send + 'static, C: Copy>(
    tasks: &Scope,
    followed: impl Stream<Item = Heard<K>> + Send + 'static,
    read: fn(&K) -> Option<C::Of>,
) -> Kept<C> {
    let (kept, copy) = watch::channel(None);
    tasks.children().spawn(async move {
        let mut followed = std::pin::pin!(followed);
        while let Some(heard) = followed.next().await {
            kept.send_modify(|all| keep(all.get_or_insert_default(), heard, read));
        }
    });
    copy
}

fn keep<K: Resource, C: Copy>(all: &mut C, heard: Heard<K>, read: fn(&K) -> Option<C::Of>) {
    let key = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());
    match heard {
        Heard::All(objects) => {
            *all = C::default();
            for object in &objects {
                if let Some(made) = read(object) {
                    all.put(key(object), made);
                }
            }
        }
        Heard::There(object) => match read(&object) {
            Some(made) => all.put(key(&object), made),
            None => all.remove(&key(&object)),
        },
        Heard::Gone(object) => all.remove(&key(&object)),
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
        // Classes without the annotation for the default class are not kept.
        let only_defaults = |object: &StorageClass| Some(class(object)).filter(|class| class.is_default);
        let mut all: BTreeMap<Key, Class> = BTreeMap::new();
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
