//! All volumes of all pools: read when a pool is first seen, kept on disk before anybody is told. Blocks.
//!
//! The index is behind a lock that is held for moments only; whatever takes long is done between. Who calls sees to it
//! that one operation at a time is at work on a volume.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::super::super::volumes::{Capacity, NewVolume, Published, Volume, VolumeError};
use super::folder::{Folder, Lock, is_full};
use super::record::{Record, Stage};
use super::{Allocation, Pool, authority, identity};
use crate::sys::usage::usage;

/// Where the largest volume ends: 64 TiB.
pub const LARGEST: u64 = 64 << 40;

/// All volumes.
#[derive(Debug)]
pub struct Store {
    settings: watch::Receiver<Vec<Pool>>,
    /// Held while pools are opened.
    opening: Mutex<()>,
    index: Mutex<Index>,
    /// After so many steps a test's program is killed.
    #[cfg(test)]
    steps: usize,
}

#[derive(Debug, Default)]
struct Index {
    /// The settings that it was made of.
    pools: Vec<Arc<Open>>,
    volumes: BTreeMap<String, Entry>,
    /// By serial number.
    damaged: BTreeMap<String, String>,
}

/// A pool as the settings have it, with its folder.
#[derive(Debug)]
struct Open {
    pool: Pool,
    folder: Arc<Folder>,
    lock: Result<Arc<Lock>, String>,
}

/// A volume, and where it is.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Its record, as it is kept.
    pub record: Record,
    /// Where that and its image are.
    pub folder: Arc<Folder>,
    /// Nobody else has the folder meanwhile.
    _lock: Arc<Lock>,
}

impl Entry {
    /// The disk's serial number.
    pub fn serial(&self) -> &str {
        identity::parse(&self.record.id).map_or("", |(_, serial)| serial)
    }

    /// Its image.
    pub fn image(&self) -> PathBuf {
        self.folder.image(self.serial(), self.record.format())
    }

    /// As others are told of it.
    pub fn volume(&self) -> Volume {
        self.record.volume(self.folder.problem(self.serial(), &self.record))
    }
}

impl Store {
    /// The pools of these settings. Nothing is read yet.
    pub fn new(settings: watch::Receiver<Vec<Pool>>) -> Self {
        Self {
            settings,
            opening: Mutex::default(),
            index: Mutex::default(),
            #[cfg(test)]
            steps: usize::MAX,
        }
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self, reason = "only a test's program is killed")]
    fn folder(&self, path: PathBuf) -> Folder {
        Folder::new(path)
    }

    #[cfg(test)]
    fn folder(&self, path: PathBuf) -> Folder {
        Folder::killed_after(path, self.steps)
    }

    /// A store whose program is killed after so many steps.
    #[cfg(test)]
    pub fn killed_after(self, steps: usize) -> Self {
        Self { steps, ..self }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        // Nothing that is done under the lock leaves it half changed.
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the pools that are new in the settings, and those that could not be opened before.
    fn refresh(&self) {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        let settings = self.settings.borrow().clone();
        let before = {
            let index = self.index();
            let same = index.pools.iter().map(|open| &open.pool).eq(&settings);
            if same && index.pools.iter().all(|open| open.lock.is_ok()) {
                return;
            }
            index.pools.clone()
        };
        let mut pools = Vec::new();
        let mut found = Vec::new();
        for pool in settings {
            let known = before.iter().find(|open| open.pool.path == pool.path && open.lock.is_ok());
            if let Some(known) = known {
                let (folder, lock) = (Arc::clone(&known.folder), known.lock.clone());
                pools.push(Arc::new(Open { pool, folder, lock }));
                continue;
            }
            let folder = Arc::new(self.folder(pool.path.clone()));
            let loaded = folder.lock().and_then(|lock| Ok((Arc::new(lock), folder.load()?)));
            let lock = match loaded {
                Ok((lock, loaded)) => {
                    found.push((Arc::clone(&folder), Arc::clone(&lock), loaded));
                    Ok(lock)
                }
                Err(error) => {
                    let problem = error.to_string();
                    let told = before.iter().any(|open| {
                        open.pool.path == pool.path && open.lock.as_ref().err() == Some(&problem)
                    });
                    if !told {
                        tracing::error!(pool = pool.name, path = %pool.path.display(), problem, "a pool cannot be used");
                    }
                    Err(problem)
                }
            };
            pools.push(Arc::new(Open { pool, folder, lock }));
        }
        let mut index = self.index();
        index.volumes.retain(|_, entry| pools.iter().any(|open| open.pool.path == entry.folder.path()));
        for (folder, lock, loaded) in found {
            tracing::info!(path = %folder.path().display(), volumes = loaded.records.len(), "a pool is open");
            for record in loaded.records.into_values() {
                let entry = Entry { record, folder: Arc::clone(&folder), _lock: Arc::clone(&lock) };
                index.volumes.insert(entry.record.id.clone(), entry);
            }
            for (serial, problem) in loaded.damaged {
                tracing::error!(path = %folder.path().display(), serial, problem, "the record of a volume cannot be read");
                index.damaged.insert(serial, problem);
            }
        }
        index.pools = pools;
    }

    /// The pool of a class, ready to be used.
    fn pool(&self, class: &str) -> Result<(Arc<Open>, Arc<Lock>), VolumeError> {
        self.refresh();
        let open = self.index().pools.iter().find(|open| open.pool.name == class).cloned();
        let open = open.ok_or_else(|| VolumeError::NoClass(class.to_owned()))?;
        match open.lock.clone() {
            Ok(lock) => Ok((open, lock)),
            Err(problem) => Err(VolumeError::Unavailable(format!(
                "the pool {class} ({}) cannot be used: {problem}",
                open.pool.path.display()
            ))),
        }
    }

    /// How much room a class has.
    ///
    /// # Errors
    /// If it is unknown, or cannot be used now.
    pub fn capacity(&self, class: &str) -> Result<Capacity, VolumeError> {
        let (open, _lock) = self.pool(class)?;
        let free = free(&open)?;
        let largest = match open.pool.allocation {
            Allocation::Thin => LARGEST,
            Allocation::Full => free.min(LARGEST),
        };
        Ok(Capacity { free, largest })
    }

    /// All volumes.
    pub fn list(&self) -> Vec<Volume> {
        self.refresh();
        let ready = |entry: &&Entry| entry.record.stage == Stage::Ready;
        let entries: Vec<_> = self.index().volumes.values().filter(ready).cloned().collect();
        entries.iter().map(Entry::volume).collect()
    }

    /// One volume; none if there is none.
    ///
    /// # Errors
    /// If its record cannot be read, or its pool cannot be used now.
    pub fn get(&self, id: &str) -> Result<Option<Entry>, VolumeError> {
        self.refresh();
        let index = self.index();
        if let Some(entry) = index.volumes.get(id) {
            return Ok(Some(entry.clone()).filter(|entry| entry.record.stage != Stage::Making));
        }
        let Some((pool, serial)) = identity::parse(id) else { return Ok(None) };
        if let Some(problem) = index.damaged.get(serial) {
            return Err(VolumeError::Damaged(format!(
                "the record of the volume {id} cannot be read: {problem}"
            )));
        }
        match index.pools.iter().find(|open| open.pool.name == pool).map(|open| &open.lock) {
            Some(Ok(_)) => Ok(None),
            Some(Err(problem)) => {
                Err(VolumeError::Unavailable(format!("the pool {pool} cannot be used: {problem}")))
            }
            None => Err(VolumeError::Unavailable(format!("the pool {pool} is not in the settings"))),
        }
    }

    /// As [`Store::get`], where there has to be one.
    ///
    /// # Errors
    /// If there is none, too.
    pub fn entry(&self, id: &str) -> Result<Entry, VolumeError> {
        self.get(id)?.ok_or_else(|| VolumeError::Unknown(id.to_owned()))
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// If there is no room, or the system refuses; nothing of it is left then.
    pub fn create(&self, new: NewVolume) -> Result<Volume, VolumeError> {
        let (open, lock) = self.pool(&new.class)?;
        let full = open.pool.allocation == Allocation::Full;
        if full && free(&open)? < new.size {
            return Err(no_room(&open.pool.name, new.size));
        }
        let (name, size) = (open.pool.name.clone(), new.size);
        let mut entry = {
            let mut index = self.index();
            let serial = loop {
                let serial = identity::draw();
                let taken = |id: &String| id.ends_with(&serial);
                if !index.damaged.contains_key(&serial) && !index.volumes.keys().any(taken) {
                    break serial;
                }
            };
            let record = Record::new(identity::id(&name, &serial), new, open.pool.format, full);
            let entry = Entry { record, folder: Arc::clone(&open.folder), _lock: lock };
            index.volumes.insert(entry.record.id.clone(), entry.clone());
            entry
        };
        let serial = entry.serial().to_owned();
        let made = entry.folder.keep(&serial, &entry.record).and_then(|()| {
            entry.folder.make(&serial, &entry.record)?;
            entry.record.stage = Stage::Ready;
            entry.folder.keep(&serial, &entry.record)
        });
        match made {
            Ok(()) => {
                self.remember(&entry);
                Ok(entry.volume())
            }
            Err(error) => {
                if let Err(left) = entry.folder.clear(&serial) {
                    tracing::warn!(volume = entry.record.id, error = %left, "cannot remove what is left of a volume");
                }
                self.index().volumes.remove(&entry.record.id);
                Err(system(&name, size, "make", entry.image(), error))
            }
        }
    }

    /// Removes a volume.
    ///
    /// # Errors
    /// If the system refuses; then it is removed when it is asked for again, or at the next start.
    pub fn remove(&self, id: &str) -> Result<(), VolumeError> {
        let mut entry = self.entry(id)?;
        let serial = entry.serial().to_owned();
        // Held until the image is gone.
        let _claim = authority::claim(&entry.image())?;
        entry.record.stage = Stage::Removing;
        self.keep(&entry, Folder::keep_anyhow)?;
        let failed = |error| VolumeError::System("remove", entry.image(), error);
        entry.folder.clear(&serial).map_err(failed)?;
        self.index().volumes.remove(id);
        Ok(())
    }

    /// Remembers which VM has a volume.
    ///
    /// # Errors
    /// If the system refuses; then what was remembered before is.
    pub fn publish(&self, id: &str, published: Option<Published>) -> Result<(), VolumeError> {
        let mut entry = self.entry(id)?;
        let published = published.map(Into::into);
        if entry.record.published != published {
            entry.record.published = published;
            self.keep(&entry, Folder::keep_anyhow)?;
        }
        Ok(())
    }

    /// Makes room for a volume that is to have at least so many bytes, and remembers its size. Where no VM has it,
    /// that is all.
    ///
    /// # Errors
    /// If there is no room, or the system refuses; the volume has the size that it had then.
    pub fn grow(&self, id: &str, size: u64) -> Result<Entry, VolumeError> {
        let mut entry = self.entry(id)?;
        let (serial, pool) = (entry.serial().to_owned(), entry.record.class.clone());
        if size > entry.record.size {
            if entry.record.full {
                let failed = |error| system(&pool, size, "make room for", entry.image(), error);
                entry.folder.reserve(&serial, &entry.record, size).map_err(failed)?;
            }
            entry.record.size = size;
            self.keep(&entry, Folder::keep)?;
        }
        Ok(entry)
    }

    fn keep(
        &self,
        entry: &Entry,
        how: impl FnOnce(&Folder, &str, &Record) -> io::Result<()>,
    ) -> Result<(), VolumeError> {
        let failed = |error| system(&entry.record.class, 0, "keep the record of", entry.image(), error);
        how(&entry.folder, entry.serial(), &entry.record).map_err(failed)?;
        self.remember(entry);
        Ok(())
    }

    fn remember(&self, entry: &Entry) {
        if let Some(known) = self.index().volumes.get_mut(&entry.record.id) {
            *known = entry.clone();
        }
    }
}

fn free(open: &Open) -> Result<u64, VolumeError> {
    let path = &open.pool.path;
    let failed = |error| VolumeError::System("look at", path.clone(), error);
    Ok(usage(path).map_err(failed)?.available)
}

fn no_room(pool: &str, size: u64) -> VolumeError {
    VolumeError::Full(format!("the storage class {pool} has no room for {size} bytes"))
}

/// What an error of the system means.
fn system(pool: &str, size: u64, what: &'static str, path: PathBuf, error: io::Error) -> VolumeError {
    match error.kind() {
        io::ErrorKind::FileTooLarge if size > 0 => no_room(pool, size),
        _ if is_full(&error) && size > 0 => no_room(pool, size),
        _ if is_full(&error) => VolumeError::Full(format!("the storage class {pool} is full")),
        _ => VolumeError::System(what, path, error),
    }
}
