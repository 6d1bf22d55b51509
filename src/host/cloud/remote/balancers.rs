//! Load balancers of all guest clusters, as last read or written, and the requests of clusters that cannot be
//! satisfied. Pure. An object from a watch never replaces a newer version that was written.

use std::collections::{BTreeMap, BTreeSet};

use super::super::book::Book;
use super::super::meet::Failure;
use super::super::wanted::{Service, Wanted};
use super::leaving::Leaving;
use super::object::{self, Object, Sharer};
use crate::host::backends::kubevirt::balancers::{Balancer, Pool, Told};
use crate::kubernetes::follow::Heard;

/// Key of a load balancer: its cluster, and the UID of its Service. If the UID is unknown, `?` and the object's
/// name.
pub type Key = (String, String);

/// Request of a Service that cannot be satisfied now.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// Service that the request is for.
    pub service: Service,
    /// Requested configuration.
    pub wanted: Wanted,
    /// Reason why the request cannot be satisfied now.
    pub failure: Failure,
}

/// State of the knowledge about load balancers in the host cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Standing {
    /// The load balancers have not been listed yet.
    #[default]
    Unknown,
    /// The host cluster does not support load balancers: their resource type is missing.
    Missing,
    /// All load balancers have been listed.
    There,
}

/// Index of all load balancers in the host cluster.
#[derive(Debug, Default)]
pub struct Balancers {
    /// Whether the load balancers have been listed.
    pub standing: Standing,
    /// Records made from the objects, for the rules that are shared with single hosts.
    pub book: Book,
    /// Objects by namespace and name.
    objects: BTreeMap<String, Object>,
    /// Identifiers of the records in the book that each object has.
    records: BTreeMap<String, Vec<String>>,
    /// Objects by the keys of the Services that own them.
    own: BTreeMap<Key, String>,
    /// Objects by the keys of the Services that share their addresses. A Service has more than one while it changes to
    /// another.
    shared: BTreeMap<Key, BTreeSet<String>>,
    /// Pools by name, once they have been listed.
    pub pools: Option<BTreeMap<String, Pool>>,
    /// Requests that cannot be satisfied now, and are retried.
    pub asked: BTreeMap<Key, Asked>,
    /// Released load balancers that are deleted as soon as Harvester has taken them up.
    pub leaving: BTreeMap<Key, Leaving>,
    changes: Changes,
}

/// Objects that have changed while a list is being read, whose answer may be older than the change.
#[derive(Debug, Default)]
struct Changes {
    count: u64,
    /// Number of lists that are being read.
    lists: usize,
    /// Objects that have changed since the first of these lists began, with the count at the last change.
    last: BTreeMap<String, u64>,
}

/// Count of changes at the time when a list began.
#[derive(Debug)]
#[must_use]
pub struct Begun(u64);

impl Changes {
    fn note(&mut self, id: &str) {
        if self.lists > 0 {
            self.count += 1;
            self.last.insert(id.to_owned(), self.count);
        }
    }

    /// Ends a list. Returns the objects that have changed since it began.
    fn end(&mut self, begun: &Begun) -> BTreeSet<String> {
        let later = self.last.iter().filter(|(_, at)| **at > begun.0).map(|(id, _)| id.clone()).collect();
        self.lists = self.lists.saturating_sub(1);
        if self.lists == 0 {
            self.last.clear();
        }
        later
    }
}

impl Balancers {
    /// Takes in a report of a watch. Returns the keys of the affected load balancers.
    pub fn hear(&mut self, told: Told) -> BTreeSet<Key> {
        match told {
            Told::Missing => self.standing = Standing::Missing,
            Told::Pools(heard) => {
                // The network of its pool decides whether a cluster may have an address.
                if self.hear_pools(heard) {
                    return self.keys(None);
                }
            }
            Told::Balancers(Heard::There(one)) => return self.put(one),
            Told::Balancers(Heard::Gone(one)) => {
                let (metadata, empty) = (&one.metadata, String::new());
                let place = (metadata.namespace.as_ref(), metadata.name.as_ref());
                let id = format!("{}/{}", place.0.unwrap_or(&empty), place.1.unwrap_or(&empty));
                let is_it = |known: &Object| known.read.metadata.uid == one.metadata.uid;
                // Another object may have this name by now.
                if self.objects.get(&id).is_some_and(is_it) {
                    return self.drop(&id);
                }
            }
            Told::Balancers(Heard::All(all)) => {
                self.standing = Standing::There;
                let all: Vec<_> = all.into_iter().filter_map(Object::of).collect();
                let there: BTreeSet<_> = all.iter().map(Object::id).collect();
                let gone: Vec<_> = self.objects.keys().filter(|id| !there.contains(*id)).cloned().collect();
                let mut about: BTreeSet<Key> = gone.iter().flat_map(|id| self.drop(id)).collect();
                about.extend(all.into_iter().flat_map(|one| self.put_object(one)));
                return about;
            }
        }
        BTreeSet::new()
    }

    /// Takes in a report on pools. Returns whether the network of any pool has changed.
    fn hear_pools(&mut self, heard: Heard<Pool>) -> bool {
        let name = |pool: &Pool| pool.metadata.name.clone().unwrap_or_default();
        let network = |pool: &Pool| pool.spec.selector.network.clone();
        let was_known = self.pools.is_some();
        let pools = self.pools.get_or_insert_default();
        match heard {
            Heard::All(all) => {
                let networks = |pools: &BTreeMap<String, Pool>| -> BTreeMap<String, String> {
                    pools.iter().map(|(name, pool)| (name.clone(), network(pool))).collect()
                };
                let before = networks(pools);
                *pools = all.into_iter().map(|pool| (name(&pool), pool)).collect();
                !was_known || before != networks(pools)
            }
            Heard::There(pool) => {
                let now = network(&pool);
                let before = pools.insert(name(&pool), pool);
                !was_known || before.map(|before| network(&before)) != Some(now)
            }
            Heard::Gone(pool) => pools.remove(&name(&pool)).is_some(),
        }
    }

    /// Takes in an object that was read or written. Returns the keys of the affected load balancers.
    pub fn put(&mut self, read: Balancer) -> BTreeSet<Key> {
        Object::of(read).map(|object| self.put_object(object)).unwrap_or_default()
    }

    fn put_object(&mut self, object: Object) -> BTreeSet<Key> {
        let id = object.id();
        if self.objects.get(&id).is_some_and(|known| known.version() > object.version()) {
            return BTreeSet::new();
        }
        let mut about = self.drop(&id);
        self.changes.note(&id);
        about.extend(keys(&object));
        for record in object.records() {
            self.records.entry(id.clone()).or_default().push(record.id.clone());
            self.book.put(record);
        }
        self.own.insert((object.cluster.clone(), object.key()), id.clone());
        for sharer in object.sharers.iter().flatten() {
            let key = (object.cluster.clone(), sharer.service.uid.clone());
            self.shared.entry(key).or_default().insert(id.clone());
        }
        self.objects.insert(id, object);
        about
    }

    /// Removes an object. Returns the keys of the affected load balancers.
    pub fn drop(&mut self, id: &str) -> BTreeSet<Key> {
        self.changes.note(id);
        let Some(object) = self.objects.remove(id) else { return BTreeSet::new() };
        for record in self.records.remove(id).unwrap_or_default() {
            self.book.remove(&record);
        }
        let about = keys(&object);
        for key in &about {
            if self.own.get(key).is_some_and(|known| known == id) {
                self.own.remove(key);
            }
            if let Some(known) = self.shared.get_mut(key) {
                known.remove(id);
                if known.is_empty() {
                    self.shared.remove(key);
                }
            }
        }
        about
    }

    /// Notes that a list begins. From now on, changes are remembered until it ends.
    pub fn list_begins(&mut self) -> Begun {
        self.changes.lists += 1;
        Begun(self.changes.count)
    }

    /// Notes that a list has failed.
    pub fn list_failed(&mut self, begun: &Begun) {
        self.changes.end(begun);
    }

    /// Takes in a complete list of a cluster's load balancers: others do not exist, except those that have changed
    /// meanwhile.
    pub fn listed(&mut self, cluster: &str, begun: &Begun, all: Vec<Balancer>) -> BTreeSet<Key> {
        let later = self.changes.end(begun);
        let all = all.into_iter().filter_map(Object::of).filter(|object| !later.contains(&object.id()));
        let all: Vec<_> = all.collect();
        let there: BTreeSet<_> = all.iter().map(Object::id).collect();
        let is_meant = |object: &&Object| {
            let id = object.id();
            object.cluster == cluster && !there.contains(&id) && !later.contains(&id)
        };
        let gone: Vec<_> = self.objects.values().filter(is_meant).map(Object::id).collect();
        let mut about: BTreeSet<Key> = gone.iter().flat_map(|id| self.drop(id)).collect();
        about.extend(all.into_iter().flat_map(|one| self.put_object(one)));
        about
    }

    /// Returns the object that a Service owns: by its UID, or else an unclaimed one by its name.
    pub fn own(&self, cluster: &str, service: &Service) -> Option<&Object> {
        match self.own.get(&(cluster.to_owned(), service.uid.clone())) {
            Some(id) => self.objects.get(id),
            None => self.unclaimed(cluster, service),
        }
    }

    /// Returns the object that Harvester's cloud provider has created for a Service and that has not been taken over
    /// yet.
    pub fn unclaimed(&self, cluster: &str, service: &Service) -> Option<&Object> {
        let (namespace, label) = cluster.split_once('/')?;
        let object = self.objects.get(&format!("{namespace}/{}", object::name(label, service)))?;
        let is_its = object.cluster == cluster
            && object.service.uid.is_empty()
            && (&object.service.namespace, &object.service.name) == (&service.namespace, &service.name);
        is_its.then_some(object)
    }

    /// Reports whether an object that has not been taken over belongs to a Service whose request cannot be satisfied.
    /// Such an object is reported as that Service's load balancer.
    pub fn is_asked_for(&self, object: &Object) -> bool {
        let is_its = |asked: &Asked| {
            let Service { namespace, name, .. } = &asked.service;
            (namespace, name) == (&object.service.namespace, &object.service.name)
                && self.unclaimed(&object.cluster, &asked.service).is_some_and(|own| own.id() == object.id())
        };
        object.service.uid.is_empty() && self.asked_of(&object.cluster).any(|(_, asked)| is_its(asked))
    }

    /// Returns the requests of a cluster that cannot be satisfied.
    pub fn asked_of<'b>(&'b self, cluster: &'b str) -> impl Iterator<Item = (&'b Key, &'b Asked)> {
        let of = (cluster.to_owned(), String::new());
        self.asked.range(of..).take_while(move |((of, _), _)| of == cluster)
    }

    /// Returns the objects of a Service of this name that have not been taken over.
    pub fn of_before<'b>(
        &'b self,
        cluster: &'b str,
        service: &'b Service,
    ) -> impl Iterator<Item = &'b Object> {
        self.objects.values().filter(move |object| {
            object.cluster == cluster
                && object.service.uid.is_empty()
                && (&object.service.namespace, &object.service.name) == (&service.namespace, &service.name)
        })
    }

    /// Returns the object whose address a Service shares, with its entry there.
    pub fn shared(&self, cluster: &str, uid: &str) -> Option<(&Object, &Sharer)> {
        self.all_shared(cluster, uid).into_iter().next()
    }

    /// Returns the same, including objects whose address the Service is about to stop sharing.
    pub fn all_shared(&self, cluster: &str, uid: &str) -> Vec<(&Object, &Sharer)> {
        let all = self.shared.get(&(cluster.to_owned(), uid.to_owned())).into_iter().flatten();
        let sharing = |id: &String| {
            let object = self.objects.get(id)?;
            let sharer = object.sharers.iter().flatten().find(|sharer| sharer.service.uid == uid)?;
            Some((object, sharer))
        };
        all.filter_map(sharing).collect()
    }

    /// Returns all objects, ordered by namespace and name.
    pub fn objects(&self) -> impl Iterator<Item = &Object> {
        self.objects.values()
    }

    /// Returns an object by namespace and name.
    pub fn get(&self, id: &str) -> Option<&Object> {
        self.objects.get(id)
    }

    /// Returns the object that is owned under this key.
    pub fn keyed(&self, key: &Key) -> Option<&Object> {
        self.objects.get(self.own.get(key)?)
    }

    /// Reports whether the Service of this key no longer waits for its load balancer to be deleted. The load balancer
    /// is then not reported to its cluster either.
    pub fn is_left(&self, key: &Key) -> bool {
        self.leaving.get(key).is_some_and(|leaving| leaving.is_left)
    }

    /// Counts the requests of a cluster that cannot be satisfied now.
    pub fn count_asked(&self, cluster: &str) -> usize {
        self.asked_of(cluster).count()
    }

    /// Returns the keys of the load balancers of a cluster, or of all clusters.
    pub fn keys(&self, cluster: Option<&str>) -> BTreeSet<Key> {
        let all = self.own.keys().chain(self.shared.keys()).chain(self.asked.keys());
        all.filter(|(of, _)| cluster.is_none_or(|cluster| of == cluster)).cloned().collect()
    }
}

/// Returns the keys of the load balancers that an object provides: its own, and those of its sharers.
fn keys(object: &Object) -> BTreeSet<Key> {
    let sharers = object.sharers.iter().flatten().map(|sharer| sharer.service.uid.clone());
    std::iter::once(object.key()).chain(sharers).map(|key| (object.cluster.clone(), key)).collect()
}
