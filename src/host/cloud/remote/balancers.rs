//! The load balancers of all guest clusters, as they were last heard of or written, and what cannot be had of what clusters asked
//! for. Pure. An object that was heard of is never put in the place of a newer one that was written.

use std::collections::{BTreeMap, BTreeSet};

use super::super::book::Book;
use super::super::meet::Failure;
use super::super::wanted::{Service, Wanted};
use super::leaving::Leaving;
use super::object::{self, Object, Sharer};
use crate::host::backends::kubevirt::balancers::{Balancer, Pool, Told};
use crate::kubernetes::follow::Heard;

/// Key of a load balancer: its cluster, and the UID of its Service or something that is none.
pub type Key = (String, String);

/// Request of a Service that cannot be had.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// Whose it is.
    pub service: Service,
    /// What was asked for.
    pub wanted: Wanted,
    /// Why it is not there.
    pub failure: Failure,
}

/// Knowledge of load balancers in the host cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Standing {
    /// Nothing yet.
    #[default]
    Unknown,
    /// The host cluster has none.
    Missing,
    /// All.
    There,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Balancers {
    /// What is known.
    pub standing: Standing,
    /// For the rules.
    pub book: Book,
    /// By namespace and name.
    objects: BTreeMap<String, Object>,
    /// The identifiers of the records that an object has in the book.
    records: BTreeMap<String, Vec<String>>,
    /// The objects of Services, and those whose address others share.
    own: BTreeMap<Key, String>,
    /// More than one while a Service changes whose it shares.
    shared: BTreeMap<Key, BTreeSet<String>>,
    /// The pools, if they are known.
    pub pools: Option<BTreeMap<String, Pool>>,
    /// What cannot be had.
    pub asked: BTreeMap<Key, Asked>,
    /// What is deleted as soon as Harvester has taken it up.
    pub leaving: BTreeMap<Key, Leaving>,
    changes: Changes,
}

/// Which objects have changed while some are listed, of which the answer may not know.
#[derive(Debug, Default)]
struct Changes {
    count: u64,
    /// Lists that are under way.
    lists: usize,
    /// What has changed since the first of them has begun, and when last.
    last: BTreeMap<String, u64>,
}

/// When a list was begun.
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

    /// A list has ended; the objects that have changed since it began.
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
    /// Takes in what is heard; the load balancers that it is about.
    pub fn hear(&mut self, told: Told) -> BTreeSet<Key> {
        match told {
            Told::Missing => self.standing = Standing::Missing,
            Told::Pools(heard) => {
                // Whether a cluster may have an address depends on the network of its pool.
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
                // Another one may have its name by now.
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

    /// Takes in what is heard of pools; whether any is of another network now.
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

    /// Takes in an object that was heard of or written; the load balancers that it is about.
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

    /// Takes out an object; the load balancers that it was about.
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

    /// Load balancers are listed from now on.
    pub fn list_begins(&mut self) -> Begun {
        self.changes.lists += 1;
        Begun(self.changes.count)
    }

    /// They could not be listed.
    pub fn list_failed(&mut self, begun: &Begun) {
        self.changes.end(begun);
    }

    /// Takes in a cluster's load balancers as they were listed: there are no others, but for those that have come meanwhile.
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

    /// The object of a Service of its own: by its UID, or by the name that Harvester's cloud provider has given it.
    pub fn own(&self, cluster: &str, service: &Service) -> Option<&Object> {
        match self.own.get(&(cluster.to_owned(), service.uid.clone())) {
            Some(id) => self.objects.get(id),
            None => self.unclaimed(cluster, service),
        }
    }

    /// The object that Harvester's cloud provider has made for a Service, and that was not taken over yet.
    pub fn unclaimed(&self, cluster: &str, service: &Service) -> Option<&Object> {
        let (namespace, label) = cluster.split_once('/')?;
        let object = self.objects.get(&format!("{namespace}/{}", object::name(label, service)))?;
        let is_its = object.cluster == cluster
            && object.service.uid.is_empty()
            && (&object.service.namespace, &object.service.name) == (&service.namespace, &service.name);
        is_its.then_some(object)
    }

    /// Whether an object that was not taken over yet is that of a Service which has asked for what it cannot have: then it is told
    /// of as that Service's.
    pub fn is_asked_for(&self, object: &Object) -> bool {
        let is_its = |asked: &Asked| {
            let Service { namespace, name, .. } = &asked.service;
            (namespace, name) == (&object.service.namespace, &object.service.name)
                && self.unclaimed(&object.cluster, &asked.service).is_some_and(|own| own.id() == object.id())
        };
        object.service.uid.is_empty() && self.asked_of(&object.cluster).any(|(_, asked)| is_its(asked))
    }

    /// What Services of a cluster have asked for and cannot have.
    pub fn asked_of<'b>(&'b self, cluster: &'b str) -> impl Iterator<Item = (&'b Key, &'b Asked)> {
        let of = (cluster.to_owned(), String::new());
        self.asked.range(of..).take_while(move |((of, _), _)| of == cluster)
    }

    /// The objects of a Service of this name that nobody has taken over.
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

    /// The object whose address a Service shares, and how.
    pub fn shared(&self, cluster: &str, uid: &str) -> Option<(&Object, &Sharer)> {
        self.all_shared(cluster, uid).into_iter().next()
    }

    /// The same, with those whose address it is to share no more.
    pub fn all_shared(&self, cluster: &str, uid: &str) -> Vec<(&Object, &Sharer)> {
        let all = self.shared.get(&(cluster.to_owned(), uid.to_owned())).into_iter().flatten();
        let sharing = |id: &String| {
            let object = self.objects.get(id)?;
            let sharer = object.sharers.iter().flatten().find(|sharer| sharer.service.uid == uid)?;
            Some((object, sharer))
        };
        all.filter_map(sharing).collect()
    }

    /// All objects, by namespace and name.
    pub fn objects(&self) -> impl Iterator<Item = &Object> {
        self.objects.values()
    }

    /// An object by namespace and name.
    pub fn get(&self, id: &str) -> Option<&Object> {
        self.objects.get(id)
    }

    /// The object that is known by this key.
    pub fn keyed(&self, key: &Key) -> Option<&Object> {
        self.objects.get(self.own.get(key)?)
    }

    /// Whether the Service of this key is not kept any more for what it has, which its cluster is not told of then.
    pub fn is_left(&self, key: &Key) -> bool {
        self.leaving.get(key).is_some_and(|leaving| leaving.is_left)
    }

    /// Counts the Services of a cluster that have asked for what they cannot have.
    pub fn count_asked(&self, cluster: &str) -> usize {
        self.asked_of(cluster).count()
    }

    /// The keys of the load balancers of a cluster, or of all.
    pub fn keys(&self, cluster: Option<&str>) -> BTreeSet<Key> {
        let all = self.own.keys().chain(self.shared.keys()).chain(self.asked.keys());
        all.filter(|(of, _)| cluster.is_none_or(|cluster| of == cluster)).cloned().collect()
    }
}

/// The load balancers that an object is about.
fn keys(object: &Object) -> BTreeSet<Key> {
    let sharers = object.sharers.iter().flatten().map(|sharer| sharer.service.uid.clone());
    std::iter::once(object.key()).chain(sharers).map(|key| (object.cluster.clone(), key)).collect()
}
