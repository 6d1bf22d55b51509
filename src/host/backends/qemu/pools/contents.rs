//! Known contents of one pool's directory: its volumes, those whose records are unusable, and the [`Catalogue`]
//! of both, which every change here keeps up to date.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::super::super::catalogue::{self, Catalogue};
use super::entry::Entry;
use super::folder::{Folder, Loaded};
use super::identity;
use super::record::{Damaged, Record, Stage};

/// Pool whose volumes are known.
#[derive(Debug)]
pub struct Open {
    /// Directory of the pool.
    pub folder: Arc<Folder>,
    /// Serial numbers of removed volumes whose identifiers do not name the pool.
    pub removed: BTreeSet<String>,
    /// True if the file system is full.
    pub is_full: bool,
    /// Total and free bytes of its file system, at the last check.
    pub room: Option<(u64, u64)>,
    /// Name of the pool.
    pool: String,
    /// Usable volumes by serial number.
    volumes: BTreeMap<String, Known>,
    /// Volumes with unusable records, by serial number.
    damaged: BTreeMap<String, Damaged>,
    catalogue: Catalogue,
}

/// State of a volume.
#[derive(Debug)]
pub struct Known {
    /// Record of the volume, as stored.
    pub entry: Entry,
    /// Reason why its image was unusable at the last check, if it was.
    pub problem: Option<String>,
}

impl Open {
    /// Builds the contents of the pool with this name from what was found in its directory.
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

    /// Computes the index anew, to compare with the maintained one.
    pub(super) fn walk(&self) -> Catalogue {
        let known = self.volumes.values().map(|known| listed(&known.entry.record));
        let damaged = self.damaged.iter().map(|(serial, damaged)| self.listed_damaged(serial, damaged));
        known.chain(damaged).collect()
    }

    /// Returns the index of the volumes.
    pub fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// Returns the volumes by serial number.
    pub fn volumes(&self) -> &BTreeMap<String, Known> {
        &self.volumes
    }

    /// Returns the volumes with unusable records, by serial number.
    pub fn damaged(&self) -> &BTreeMap<String, Damaged> {
        &self.damaged
    }

    /// Returns the identifier of a volume with an unusable record.
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

    /// Renames the pool. This affects volumes whose records do not contain their identifiers.
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

    /// Inserts or replaces a volume.
    pub fn put(&mut self, known: Known) {
        self.catalogue.put(listed(&known.entry.record));
        self.volumes.insert(known.entry.serial().to_owned(), known);
    }

    /// Updates the record of a known volume.
    pub fn update(&mut self, entry: &Entry) {
        if let Some(known) = self.volumes.get_mut(entry.serial()) {
            known.entry = entry.clone();
            self.catalogue.put(listed(&entry.record));
        }
    }

    /// Records why the image of a volume is unusable, if it is; returns whether it was usable before.
    pub fn note(&mut self, serial: &str, problem: Option<String>) -> bool {
        let Some(known) = self.volumes.get_mut(serial) else { return false };
        std::mem::replace(&mut known.problem, problem).is_none()
    }

    /// Removes a volume.
    pub fn remove(&mut self, serial: &str) {
        if let Some(known) = self.volumes.remove(serial) {
            self.catalogue.remove(&known.entry.record.id);
        }
    }

    /// Marks the record of a volume as unusable.
    pub fn damage(&mut self, serial: String, damaged: Damaged) {
        self.mend(&serial);
        self.catalogue.put(self.listed_damaged(&serial, &damaged));
        self.damaged.insert(serial, damaged);
    }

    /// Clears the mark of a record that was removed, or is usable again.
    pub fn mend(&mut self, serial: &str) {
        if let Some(damaged) = self.damaged.remove(serial) {
            self.catalogue.remove(&self.id_of(serial, &damaged));
        }
    }
}

/// Builds the index entry of a volume from its record.
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
