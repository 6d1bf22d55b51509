//! Index of the volumes that a backend knows, so that a request of one guest does not walk over the volumes of
//! all guests. Volumes are found by identifier, by cluster, by name within a cluster, and by the VM on record
//! as their holder. The usage of each cluster is updated with every change and never recomputed.
//!
//! The backend stores the volumes themselves. It owns one catalogue for each set of volumes that appears and
//! disappears as a whole, such as a pool, and drops the catalogue together with the set. Every change is
//! reported with [`Catalogue::put`] and [`Catalogue::remove`]. To look volumes up by another property, add a
//! field to [`Entry`] and a set that both functions maintain.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use super::volumes::{Coming, Usage, Usages, Volume};

/// Properties of a volume that are indexed or counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Identifier; see [`Volume::id`].
    pub id: Arc<str>,
    /// Owner; see [`Volume::cluster`].
    pub cluster: Arc<str>,
    /// Name within the cluster; see [`Volume::name`].
    pub name: Arc<str>,
    /// Storage class; see [`Volume::class`].
    pub class: Arc<str>,
    /// Size in bytes.
    pub size: u64,
    /// UUID of the VM on record as its holder.
    pub holder: Option<Arc<str>>,
    /// True if the volume is shown to clients. A volume that is being created or removed only reserves its name: it
    /// is neither listed nor counted.
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

/// Number and total size of volumes; wide enough that the total cannot overflow.
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

/// Index of volumes. Two indexes are equal if they contain the same volumes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Catalogue {
    all: BTreeMap<Arc<str>, Entry>,
    /// Listed volumes by cluster and identifier.
    clusters: BTreeSet<(Arc<str>, Arc<str>)>,
    /// All volumes by cluster, name and identifier.
    names: BTreeSet<(Arc<str>, Arc<str>, Arc<str>)>,
    /// Listed volumes by the UUID of their VM and identifier.
    holders: BTreeSet<(Arc<str>, Arc<str>)>,
    /// Usage of the listed volumes by cluster and class; entries that drop to zero are removed.
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
    /// Inserts a volume, or replaces the entry that has the same identifier.
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

    /// Removes the entry with this identifier; does nothing if there is none.
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

    /// Returns the identifiers of the listed volumes of a cluster, or of all clusters, that sort after `after`, in
    /// that order.
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

    /// Returns the volumes with this name in a cluster, including those that are not listed. There is at most one,
    /// unless records were copied or are unreadable.
    pub fn named<'c>(&'c self, cluster: &str, name: &str) -> impl Iterator<Item = &'c Entry> {
        let first = (Arc::from(cluster), Arc::from(name), Arc::from(""));
        let (cluster, name) = (Arc::clone(&first.0), Arc::clone(&first.1));
        let is_its = move |(of, one, _): &&(Arc<str>, Arc<str>, Arc<str>)| *of == cluster && *one == name;
        self.names.range(first..).take_while(is_its).filter_map(|(_, _, id)| self.all.get(id))
    }

    /// Returns the identifiers of the volumes that the VM with this UUID is on record for.
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
        // The number of entries is at most that of the storage classes.
        let its = self.counts.range(first..).take_while(|((of, _), _)| **of == *cluster);
        its.for_each(|(_, count)| sum.add(*count));
        sum
    }

    /// Returns the size in bytes of the listed volume with this name, if there is one; in one class, or in any.
    fn size(&self, cluster: &str, name: &str, class: Option<&str>) -> Option<u64> {
        let counts = |entry: &&Entry| entry.is_listed && class.is_none_or(|class| class == &*entry.class);
        self.named(cluster, name).filter(counts).map(|entry| entry.size).max()
    }
}

/// Returns the usage of a cluster over all these catalogues, in total and in one class, including volumes that
/// are `coming`. A coming volume that already exists counts once, with the larger of the two sizes.
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
