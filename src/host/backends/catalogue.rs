//! An index of the volumes that a backend knows, so that a call of one guest finds what it is about without a walk over the
//! volumes of all: by identifier, by cluster, by name in a cluster, by the VM that is remembered to have them, and how much each
//! cluster has, which is counted with each change and never computed anew.
//!
//! The backend keeps the volumes themselves, and owns one catalogue for each set of them that comes and goes as a whole, such as a
//! pool: what goes takes its catalogue along. Each change is told by [`Catalogue::put`] and [`Catalogue::remove`]. To look for
//! volumes by something else: a field of [`Entry`], and a set that both of them keep.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use super::volumes::{Coming, Usage, Usages, Volume};

/// What is looked for and counted of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// See [`Volume::id`].
    pub id: Arc<str>,
    /// See [`Volume::cluster`].
    pub cluster: Arc<str>,
    /// See [`Volume::name`].
    pub name: Arc<str>,
    /// See [`Volume::class`].
    pub class: Arc<str>,
    /// Bytes.
    pub size: u64,
    /// UUID of the VM that is remembered to have it.
    pub holder: Option<Arc<str>>,
    /// Others are told of it. Of one that is being made or removed only the name is taken: it is not listed, and does not count.
    pub is_listed: bool,
}

impl From<&Volume> for Entry {
    fn from(volume: &Volume) -> Self {
        Self {
            id: volume.id.as_str().into(),
            cluster: volume.cluster.as_str().into(),
            name: volume.name.as_str().into(),
            class: volume.class.as_str().into(),
            size: volume.size,
            holder: volume.published.as_ref().map(|published| published.uuid.as_str().into()),
            is_listed: true,
        }
    }
}

/// Volumes together; as many bytes as there may be are no overflow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Count {
    volumes: u64,
    bytes: u128,
}

impl Count {
    fn add(&mut self, other: Self) {
        self.volumes += other.volumes;
        self.bytes += other.bytes;
    }

    fn usage(self) -> Usage {
        Usage { volumes: self.volumes, bytes: u64::try_from(self.bytes).unwrap_or(u64::MAX) }
    }
}

/// The index. Two are equal if what they index is.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Catalogue {
    all: BTreeMap<Arc<str>, Entry>,
    /// Cluster and identifier, of those that are listed.
    clusters: BTreeSet<(Arc<str>, Arc<str>)>,
    /// Cluster, name and identifier.
    names: BTreeSet<(Arc<str>, Arc<str>, Arc<str>)>,
    /// UUID of the VM and identifier, of those that are listed.
    holders: BTreeSet<(Arc<str>, Arc<str>)>,
    /// By cluster and class, of those that are listed; none that counts nothing.
    counts: BTreeMap<(Arc<str>, Arc<str>), Count>,
}

impl FromIterator<Entry> for Catalogue {
    fn from_iter<I: IntoIterator<Item = Entry>>(entries: I) -> Self {
        let mut catalogue = Self::default();
        for entry in entries {
            catalogue.put(entry);
        }
        catalogue
    }
}

impl Catalogue {
    /// Has a volume as it is now, in place of what was known under its identifier.
    pub fn put(&mut self, entry: Entry) {
        self.remove(&entry.id);
        let Entry { id, cluster, name, class, size, holder, is_listed } = entry.clone();
        self.names.insert((Arc::clone(&cluster), name, Arc::clone(&id)));
        if is_listed {
            self.clusters.insert((Arc::clone(&cluster), Arc::clone(&id)));
            self.holders.extend(holder.map(|uuid| (uuid, Arc::clone(&id))));
            let count = self.counts.entry((cluster, class)).or_default();
            count.add(Count { volumes: 1, bytes: size.into() });
        }
        self.all.insert(id, entry);
    }

    /// Knows a volume no more; nothing if it knew none of this identifier.
    pub fn remove(&mut self, id: &str) {
        let Some(Entry { id, cluster, name, class, size, holder, is_listed }) = self.all.remove(id) else {
            return;
        };
        self.names.remove(&(Arc::clone(&cluster), name, Arc::clone(&id)));
        if !is_listed {
            return;
        }
        self.clusters.remove(&(Arc::clone(&cluster), Arc::clone(&id)));
        if let Some(uuid) = holder {
            self.holders.remove(&(uuid, id));
        }
        let key = (cluster, class);
        if let Some(count) = self.counts.get_mut(&key) {
            count.volumes -= 1;
            count.bytes -= u128::from(size);
            if count.volumes == 0 {
                self.counts.remove(&key);
            }
        }
    }

    /// The identifiers of the volumes that are listed, of one cluster or of all, that come after this one, in their order.
    pub fn after<'c>(&'c self, cluster: Option<&str>, after: &str) -> Box<dyn Iterator<Item = &'c str> + 'c> {
        let Some(cluster) = cluster else {
            let rest = self.all.range::<str, _>((Bound::Excluded(after), Bound::Unbounded));
            return Box::new(rest.filter(|(_, entry)| entry.is_listed).map(|(id, _)| &**id));
        };
        let (cluster, after): (Arc<str>, Arc<str>) = (cluster.into(), after.into());
        let from = Bound::Excluded((Arc::clone(&cluster), after));
        let rest = self
            .clusters
            .range((from, Bound::Unbounded))
            .map_while(move |(of, id)| (**of == *cluster).then_some(&**id));
        Box::new(rest)
    }

    /// The volumes of this name in a cluster, also those that are not listed: one at most, unless records are copies or cannot be
    /// read.
    pub fn named<'c>(&'c self, cluster: &str, name: &str) -> impl Iterator<Item = &'c Entry> {
        let first = (Arc::from(cluster), Arc::from(name), Arc::from(""));
        let (cluster, name) = (Arc::clone(&first.0), Arc::clone(&first.1));
        let is_its = move |(of, one, _): &&(Arc<str>, Arc<str>, Arc<str>)| *of == cluster && *one == name;
        self.names.range(first..).take_while(is_its).filter_map(|(_, _, id)| self.all.get(id))
    }

    /// The identifiers of the volumes that the VM of this UUID is remembered to have.
    pub fn of_vm<'c>(&'c self, uuid: &str) -> impl Iterator<Item = &'c str> {
        let first = (Arc::from(uuid), Arc::from(""));
        let uuid = Arc::clone(&first.0);
        self.holders.range(first..).take_while(move |(of, _)| *of == uuid).map(|(_, id)| &**id)
    }

    fn count(&self, cluster: &str, class: Option<&str>) -> Count {
        let first: (Arc<str>, Arc<str>) = (cluster.into(), class.unwrap_or_default().into());
        if class.is_some() {
            return self.counts.get(&first).copied().unwrap_or_default();
        }
        let mut sum = Count::default();
        // As many as there are storage classes.
        let its = self.counts.range(first..).take_while(|((of, _), _)| **of == *cluster);
        its.for_each(|(_, count)| sum.add(*count));
        sum
    }

    /// Bytes of the volume of this name, if one is listed; in one class, or in any.
    fn size(&self, cluster: &str, name: &str, class: Option<&str>) -> Option<u64> {
        let counts = |entry: &&Entry| entry.is_listed && class.is_none_or(|class| class == &*entry.class);
        self.named(cluster, name).filter(counts).map(|entry| entry.size).max()
    }
}

/// What a cluster has in these catalogues together, with what is coming: in all, and in one class. What is coming and is there
/// already counts once, with the larger of both sizes.
pub fn usages<'c>(
    parts: &(impl Iterator<Item = &'c Catalogue> + Clone),
    cluster: &str,
    class: &str,
    coming: &[Coming],
) -> Usages {
    let usage = |class: Option<&str>| {
        let mut sum = Count::default();
        parts.clone().for_each(|part| sum.add(part.count(cluster, class)));
        for Coming { name, size, .. } in
            coming.iter().filter(|one| class.is_none_or(|class| class == one.class))
        {
            let there = parts.clone().filter_map(|part| part.size(cluster, name, class)).max();
            let more = size.saturating_sub(there.unwrap_or(0));
            sum.add(Count { volumes: u64::from(there.is_none()), bytes: more.into() });
        }
        sum.usage()
    };
    Usages { all: usage(None), in_class: usage(Some(class)) }
}

#[cfg(test)]
mod tests;
