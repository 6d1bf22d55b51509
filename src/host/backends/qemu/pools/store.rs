//! Operations in the pools' directories: each change is stored on disk before it is reported, and then entered
//! in the [`index`](super::index). Functions whose documentation says so block; they are called on the pool's
//! worker (see [`access`](super::access)).
//!
//! The lock of the index is held for moments only, and never during an operation that takes long. The caller
//! ensures that only one operation at a time works on a volume.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::watch;

use super::super::super::volumes::{Capacity, NewVolume, Published, Volume, VolumeError};
use super::super::claim::Use;
use super::super::link::Owner;
use super::contents::{Known, Open};
use super::entry::Entry;
use super::folder::{Folder, GONE, is_full};
use super::index::{Index, State};
use super::record::{Record, Stage};
use super::register::Register;
use super::steps::Steps;
use super::{Allocation, Pool, identity};
use crate::sys::host_name::host_name;

/// Maximum size of a volume: 64 TiB.
pub const LARGEST: u64 = 64 << 40;

/// Stored volumes of all pools.
#[derive(Debug)]
pub struct Store {
    settings: watch::Receiver<Vec<Pool>>,
    index: Mutex<Index>,
    /// Name of this machine.
    host: String,
    /// Register of the pools by path.
    register: Register,
    /// Test hooks by directory.
    #[cfg(test)]
    pub steps: Vec<(PathBuf, Steps)>,
}

impl Store {
    /// Creates the store of the pools of these settings. A pool that is in the register has to be the registered
    /// one. Nothing is read yet.
    pub fn new(settings: watch::Receiver<Vec<Pool>>, register: Register) -> Self {
        Self {
            settings,
            register,
            index: Mutex::default(),
            host: host_name(),
            #[cfg(test)]
            steps: Vec::new(),
        }
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self, reason = "only a test's program is killed")]
    fn steps(&self, _: &Path) -> Steps {
        Steps::default()
    }

    #[cfg(test)]
    fn steps(&self, path: &Path) -> Steps {
        let found = self.steps.iter().find(|(folder, _)| path.starts_with(folder));
        found.map(|(_, steps)| steps.clone()).unwrap_or_default()
    }

    /// Locks the index, after adopting the pools of the present settings.
    pub fn index(&self) -> MutexGuard<'_, Index> {
        // A poisoned lock can be used: no operation under it leaves the index inconsistent.
        let mut index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        index.follow(&self.settings.borrow());
        index
    }

    /// Opens the pool at a path and reads its volumes, if that has not been done yet. Blocks.
    pub fn open(&self, path: &Path) {
        if self.index().at(path).is_none_or(|slot| slot.open().is_some()) {
            return;
        }
        let outcome = self.read(path);
        let mut index = self.index();
        let Some(slot) = index.at(path) else { return };
        slot.tried = Some(Instant::now());
        slot.checked = None;
        match outcome {
            Ok(mut open) => {
                tracing::info!(path = %path.display(), volumes = open.volumes().len(), "a pool is open");
                for (serial, damaged) in open.damaged() {
                    let problem = &damaged.problem;
                    tracing::error!(path = %path.display(), serial, problem, "the record of a volume cannot be used");
                }
                // The pool may have been renamed while it was being read.
                open.rename(&slot.pool.name);
                slot.state = State::Open(Box::new(open));
            }
            Err((problem, uuid)) => {
                if !matches!(&slot.state, State::Closed { problem: known, .. } if *known == problem) {
                    tracing::error!(pool = slot.pool.name, path = %path.display(), problem, "a pool cannot be used");
                }
                slot.state = State::Closed { problem, uuid };
            }
        }
    }

    fn read(&self, path: &Path) -> Result<Open, (String, Option<String>)> {
        let words = |error: io::Error| (error.to_string(), None);
        let expected = self.register.expected(path).map_err(words)?;
        let folder = Folder::open(path, expected.as_ref(), self.steps(path)).map_err(words)?;
        let uuid = folder.uuid().to_owned();
        let name = {
            // Record the UUID first: a copy of a pool must be detected before anything in it is read or removed.
            let mut index = self.index();
            if let Some(slot) = index.at(path)
                && let State::Closed { uuid: known, .. } = &mut slot.state
            {
                *known = Some(uuid.clone());
            }
            let twin = index.slots.iter().find(|slot| slot.pool.path == path);
            if let Some(problem) = twin.and_then(|slot| index.twin(slot, &uuid)) {
                return Err((problem, Some(uuid)));
            }
            twin.map(|slot| slot.pool.name.clone()).unwrap_or_default()
        };
        // Register the pool before anything is stored in it.
        self.register.remember(path, &uuid).map_err(|error| (error.to_string(), Some(uuid.clone())))?;
        let loaded = folder.load().map_err(|error| (error.to_string(), Some(uuid)))?;
        Ok(Open::new(&name, Arc::new(folder), loaded))
    }

    /// Returns the total and free space of a class. Blocks.
    ///
    /// # Errors
    /// If the class is unknown, or its pool is unusable at present.
    pub fn capacity(&self, class: &str) -> Result<Capacity, VolumeError> {
        let (folder, pool) = self.class(class)?;
        let (size, free) = room(&folder)?;
        let largest = match pool.allocation {
            Allocation::Thin => LARGEST,
            Allocation::Full => free.min(LARGEST),
        };
        Ok(Capacity { size, free, largest })
    }

    fn class(&self, class: &str) -> Result<(Arc<Folder>, Pool), VolumeError> {
        let index = self.index();
        let slot = index.class(class)?;
        Ok((Arc::clone(&index.usable(slot)?.folder), slot.pool.clone()))
    }

    /// Returns all volumes of the opened pools.
    #[cfg(test)]
    pub fn list(&self) -> Vec<Volume> {
        self.index().part(None, "", usize::MAX)
    }

    /// Returns a volume; `None` if it certainly does not exist.
    ///
    /// # Errors
    /// If it may exist: its record or its pool is unusable, or it belongs to another host.
    pub fn get(&self, id: &str) -> Result<Option<Entry>, VolumeError> {
        let index = self.index();
        let known = index.find(id, &self.host)?.map(|(_, known)| &known.entry);
        Ok(known.filter(|entry| entry.record.stage != Stage::Making).cloned())
    }

    /// Returns a volume in the form for clients; `None` if it certainly does not exist.
    ///
    /// # Errors
    /// Those of [`Store::get`].
    pub fn volume(&self, id: &str) -> Result<Option<Volume>, VolumeError> {
        let index = self.index();
        let found = index.find(id, &self.host)?;
        let found = found.filter(|(_, known)| known.entry.record.stage != Stage::Making);
        Ok(found.and_then(|(slot, known)| Some(index.show(slot, slot.open()?, known))))
    }

    /// Returns a volume that has to exist, like [`Store::get`].
    ///
    /// # Errors
    /// Those of [`Store::get`], and if the volume does not exist.
    pub fn entry(&self, id: &str) -> Result<Entry, VolumeError> {
        self.get(id)?.ok_or_else(|| VolumeError::Unknown(id.to_owned()))
    }

    /// Creates a volume. Blocks.
    ///
    /// # Errors
    /// If there is not enough space, or the system refuses, in which case nothing is left behind; and if a volume
    /// with this name may exist.
    pub fn create(&self, new: NewVolume) -> Result<Volume, VolumeError> {
        let (folder, pool) = self.class(&new.class)?;
        self.look_again(&folder);
        let full = pool.allocation == Allocation::Full;
        if full && room(&folder)?.1 < new.size {
            return Err(no_room(&pool.name, new.size));
        }
        let size = new.size;
        let entry = {
            let mut index = self.index();
            let slot = index.class(&new.class)?;
            index.check_name(index.usable(slot)?, &new)?;
            let serial = index.draw();
            let id = identity::id(&pool.name, folder.uuid(), &serial);
            let entry = Entry { record: Record::new(id, new, pool.format, full), folder };
            let mut known = Known { entry: entry.clone(), problem: None };
            known.entry.record.stage = Stage::Making;
            let open = index.open_at(&pool.path).ok_or_else(|| gone(&pool.name))?;
            open.put(known);
            entry
        };
        let serial = entry.serial();
        match entry.folder.make(serial, &entry.record) {
            Ok(()) => {
                self.remember(&entry);
                Ok(entry.record.volume(None))
            }
            Err(error) => {
                let clear = |claims| entry.folder.clear(serial, claims);
                if let Err(left) = entry.folder.claim(serial).and_then(clear) {
                    tracing::warn!(volume = entry.record.id, error = %left, "cannot remove the remains of a volume");
                }
                self.drop(&entry);
                Err(system(&pool.name, size, "make", entry.image(), error))
            }
        }
    }

    /// Removes a volume. Blocks.
    ///
    /// # Errors
    /// If the system refuses; the removal is completed by the next call, or at the next start. And if the file
    /// under the image's name is not an image.
    pub fn remove(&self, id: &str) -> Result<(), VolumeError> {
        let mut entry = self.entry(id)?;
        if let Some(problem) = entry.problem().filter(|problem| problem != GONE) {
            return Err(entry.damaged(&problem));
        }
        let serial = entry.serial().to_owned();
        // Keep the claims until the image has been removed, so that no process can open it meanwhile.
        let claims = entry.folder.claim(&serial).map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => VolumeError::InUse(format!(
                "the image {} is open in another program",
                entry.image().display()
            )),
            _ => entry.refused("remove")(error),
        })?;
        entry.record.stage = Stage::Removing;
        self.keep(&entry, |folder, serial, record| folder.anyhow(|folder| folder.keep(serial, record)))?;
        let mut removed = match self.index().open_at(entry.folder.path()) {
            Some(open) => open.removed.clone(),
            None => return Err(gone(&entry.record.class)),
        };
        entry.folder.bury(&mut removed, &entry.record).map_err(entry.refused("remove"))?;
        entry.folder.clear(&serial, claims).map_err(entry.refused("remove"))?;
        if let Some(open) = self.index().open_at(entry.folder.path()) {
            open.removed = removed;
        }
        self.drop(&entry);
        Ok(())
    }

    /// Determines whether any process has a volume's image open; `None` if there is no image. Blocks.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn look(&self, id: &str) -> Result<Option<Use>, VolumeError> {
        let entry = self.entry(id)?;
        entry.folder.used(entry.serial(), &entry.record).map_err(entry.refused("examine"))
    }

    /// Checks that a volume's image is usable. Blocks.
    ///
    /// # Errors
    /// If it is not.
    pub fn sound(&self, id: &str) -> Result<(), VolumeError> {
        self.entry(id)?.check()
    }

    /// Records which VM has a volume. Blocks.
    ///
    /// # Errors
    /// If the system refuses; the previous record then remains.
    pub fn publish(&self, id: &str, published: Option<Published>) -> Result<(), VolumeError> {
        let mut entry = self.entry(id)?;
        let before = entry.record.published.clone().map(Published::from);
        if before == published {
            return Ok(());
        }
        // Whether the volume is being detached matters after a restart of the program, but not after a power loss,
        // which ends the VM as well.
        let same = |one: &Published, other: &Published| {
            Published { leaving: other.leaving, ..one.clone() } == *other
        };
        let lasting = !matches!((&before, &published), (Some(one), Some(other)) if same(one, other));
        entry.record.publish(published);
        self.keep(&entry, |folder, serial, record| {
            folder.anyhow(|folder| {
                if lasting {
                    folder.keep(serial, record)
                } else {
                    folder.keep_until_power_loss(serial, record)
                }
            })
        })
    }

    /// Gives a volume's image to QEMU's user, if known, and returns the path by which QEMU opens it, with links
    /// resolved. Blocks.
    ///
    /// # Errors
    /// If the image is not as it should be, or the system refuses.
    pub fn give(&self, id: &str, owner: Option<Owner>) -> Result<PathBuf, VolumeError> {
        let entry = self.entry(id)?;
        entry.check()?;
        let given = entry.folder.give(entry.serial(), &entry.record, owner);
        given.and_then(|()| entry.image().canonicalize()).map_err(entry.refused("change the owner of"))
    }

    /// Reserves space for a volume that is to have at least `size` bytes, and records the size. If no VM has the
    /// volume, [`Store::lengthen`] completes the operation. Blocks.
    ///
    /// # Errors
    /// If there is not enough space, or the system refuses; the volume then keeps its size.
    pub fn grow(&self, id: &str, size: u64) -> Result<Entry, VolumeError> {
        let mut entry = self.entry(id)?;
        entry.check()?;
        let (serial, pool) = (entry.serial().to_owned(), entry.record.class.clone());
        if size > entry.record.size {
            if entry.record.full {
                let failed = |error| system(&pool, size, "reserve space for", entry.image(), error);
                entry.folder.reserve(&serial, &entry.record, size).map_err(failed)?;
            }
            entry.record.size = size;
            self.keep(&entry, Folder::keep)?;
        }
        Ok(entry)
    }

    /// Expands the image of a volume that no VM has to the recorded size. Blocks.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn lengthen(&self, id: &str) -> Result<(), VolumeError> {
        let entry = self.entry(id)?;
        let lengthened = entry.folder.lengthen(entry.serial(), &entry.record);
        lengthened.map_err(entry.refused("extend"))
    }

    fn keep(
        &self,
        entry: &Entry,
        how: impl FnOnce(&Folder, &str, &Record) -> io::Result<()>,
    ) -> Result<(), VolumeError> {
        let failed = |error| system(&entry.record.class, 0, "write the record of", entry.image(), error);
        how(&entry.folder, entry.serial(), &entry.record).map_err(failed)?;
        self.remember(entry);
        Ok(())
    }

    /// Updates the index to the state on disk.
    fn remember(&self, entry: &Entry) {
        let mut index = self.index();
        let open = index.open_at(entry.folder.path()).filter(|open| Arc::ptr_eq(&open.folder, &entry.folder));
        if let Some(open) = open {
            open.update(entry);
        }
    }

    fn drop(&self, entry: &Entry) {
        let mut index = self.index();
        let open = index.open_at(entry.folder.path()).filter(|open| Arc::ptr_eq(&open.folder, &entry.folder));
        if let Some(open) = open {
            open.remove(entry.serial());
        }
    }
}

/// Returns the total and free bytes of a pool's file system.
fn room(folder: &Folder) -> Result<(u64, u64), VolumeError> {
    folder.room().map_err(|error| VolumeError::System("examine", folder.path().to_owned(), error))
}

/// Returns the error for a pool that was removed from the settings meanwhile.
fn gone(pool: &str) -> VolumeError {
    VolumeError::Unavailable(format!("the pool {pool} is no longer in the settings"))
}

fn no_room(pool: &str, size: u64) -> VolumeError {
    VolumeError::Full(format!("the storage class {pool} has no space for {size} bytes"))
}

/// Converts a system error.
fn system(pool: &str, size: u64, what: &'static str, path: PathBuf, error: io::Error) -> VolumeError {
    match error.kind() {
        io::ErrorKind::FileTooLarge if size > 0 => no_room(pool, size),
        _ if is_full(&error) && size > 0 => no_room(pool, size),
        _ if is_full(&error) => VolumeError::Full(format!("the storage class {pool} is full")),
        _ => VolumeError::System(what, path, error),
    }
}
