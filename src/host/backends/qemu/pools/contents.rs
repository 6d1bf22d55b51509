//! What one pool's directory holds, as far as it is known: its volumes, those whose records cannot be used, and the
//! [`Catalogue`] of both, which each change here keeps up to date.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::super::super::catalogue::{self, Catalogue};
use super::entry::Entry;
use super::folder::{Folder, Loaded};
use super::identity;
use super::record::{Damaged, Record, Stage};

/// A directory whose volumes are known.
#[derive(Debug)]
pub struct Open {
    /// Reaches what is in it.
    pub folder: Arc<Folder>,
    /// Serial numbers of volumes that were removed, and whose identifiers do not name the pool.
    pub removed: BTreeSet<String>,
    /// Its file system has no room left.
    pub is_full: bool,
    /// Bytes of its file system, and those of them that are free, when that was looked at the last time.
    pub room: Option<(u64, u64)>,
    /// What the pool is called.
    pool: String,
    /// By serial number.
    volumes: BTreeMap<String, Known>,
    /// By serial number.
    damaged: BTreeMap<String, Damaged>,
    catalogue: Catalogue,
}

/// What is known of a volume.
#[derive(Debug)]
pub struct Known {
    /// As it is kept.
    pub entry: Entry,
    /// Why its image cannot be used, when that was looked at the last time.
    pub problem: Option<String>,
}

impl Open {
    /// What was found in the directory of the pool of this name.
    pub fn new(pool: &str, folder: Arc<Folder>, loaded: Loaded) -> Self {
        let known =
            |record: Record| Known { entry: Entry { record, folder: Arc::clone(&folder) }, problem: None };
        let volumes = loaded.records.into_iter().map(|(serial, record)| (serial, known(record))).collect();
        let mut open = Self {
            folder,
            removed: loaded.removed,
            is_full: false,
            room: None,
            pool: pool.to_owned(),
            volumes,
            damaged: loaded.damaged,
            catalogue: Catalogue::default(),
        };
        open.catalogue = open.walk();
        open
    }

    /// The catalogue that there has to be.
    pub(super) fn walk(&self) -> Catalogue {
        let known = self.volumes.values().map(|known| listed(&known.entry.record));
        let damaged = self.damaged.iter().map(|(serial, damaged)| self.listed_damaged(serial, damaged));
        known.chain(damaged).collect()
    }

    /// By what its volumes are found.
    pub fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// Its volumes, by serial number.
    pub fn volumes(&self) -> &BTreeMap<String, Known> {
        &self.volumes
    }

    /// Volumes whose records cannot be used, by serial number.
    pub fn damaged(&self) -> &BTreeMap<String, Damaged> {
        &self.damaged
    }

    /// The identifier of a volume whose record cannot be used.
    pub fn id_of(&self, serial: &str, damaged: &Damaged) -> String {
        let own = |id: &&String| {
            identity::parse(id).is_some_and(|parts| {
                parts.serial == serial && parts.uuid.is_none_or(|uuid| uuid == self.folder.uuid())
            })
        };
        let id = damaged.id.as_ref().filter(own).cloned();
        id.unwrap_or_else(|| identity::id(&self.pool, self.folder.uuid(), serial))
    }

    fn listed_damaged(&self, serial: &str, damaged: &Damaged) -> catalogue::Entry {
        (&damaged.volume(self.id_of(serial, damaged))).into()
    }

    /// The pool has another name, which those volumes are told by whose records do not say their identifiers.
    pub fn rename(&mut self, pool: &str) {
        if self.pool == pool {
            return;
        }
        let damaged = std::mem::take(&mut self.damaged);
        for (serial, damaged) in &damaged {
            self.catalogue.remove(&self.id_of(serial, damaged));
        }
        pool.clone_into(&mut self.pool);
        for (serial, damaged) in damaged {
            self.damage(serial, damaged);
        }
    }

    /// Has a volume, as it is now.
    pub fn put(&mut self, known: Known) {
        self.catalogue.put(listed(&known.entry.record));
        self.volumes.insert(known.entry.serial().to_owned(), known);
    }

    /// Has a volume that is there as it is kept now.
    pub fn update(&mut self, entry: &Entry) {
        if let Some(known) = self.volumes.get_mut(entry.serial()) {
            known.entry = entry.clone();
            self.catalogue.put(listed(&entry.record));
        }
    }

    /// Notes why the image of a volume cannot be used, if it cannot; whether it could before.
    pub fn note(&mut self, serial: &str, problem: Option<String>) -> bool {
        let Some(known) = self.volumes.get_mut(serial) else { return false };
        std::mem::replace(&mut known.problem, problem).is_none()
    }

    /// Has a volume no more.
    pub fn remove(&mut self, serial: &str) {
        if let Some(known) = self.volumes.remove(serial) {
            self.catalogue.remove(&known.entry.record.id);
        }
    }

    /// Has a volume whose record cannot be used.
    pub fn damage(&mut self, serial: String, damaged: Damaged) {
        self.mend(&serial);
        self.catalogue.put(self.listed_damaged(&serial, &damaged));
        self.damaged.insert(serial, damaged);
    }

    /// The record of a volume is gone, or can be used again.
    pub fn mend(&mut self, serial: &str) {
        if let Some(damaged) = self.damaged.remove(serial) {
            self.catalogue.remove(&self.id_of(serial, &damaged));
        }
    }
}

/// As a volume is found by its record.
fn listed(record: &Record) -> catalogue::Entry {
    catalogue::Entry {
        id: record.id.as_str().into(),
        cluster: record.cluster.as_str().into(),
        name: record.name.as_str().into(),
        class: record.class.as_str().into(),
        size: record.size,
        holder: record.published.as_ref().map(|published| published.uuid().into()),
        is_listed: record.stage == Stage::Ready,
    }
}
