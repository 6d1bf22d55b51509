//! State of the pools: checked by each pool's worker between calls, and stored in the [`index`](super::index),
//! from where it can be read without waiting.

use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

use super::contents::Known;
use super::entry::Entry;
use super::folder::Folder;
use super::index::State;
use super::record::Stage;
use super::store::Store;

/// Number of free bytes below which a pool counts as full: QEMU writes whole clusters, and the file system
/// needs space for metadata.
const FULL: u64 = 1 << 20;
/// Number of images that are checked in one turn of the worker.
const CHECKED: usize = 64;

impl Store {
    /// Checks some of the images of a pool, beginning after that serial number; returns where to continue. Blocks.
    pub fn check(&self, path: &Path, after: Option<String>) -> Option<String> {
        let folder = Arc::clone(&self.index().open_at(path)?.folder);
        if after.is_none() {
            // If this cannot be determined, the check of each image shows what is wrong.
            if folder.has_moved().unwrap_or(false) {
                self.close(&folder, "its directory is missing or has been replaced");
                return None;
            }
            self.look_again(&folder);
            self.measure(&folder);
        }
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let entries: Vec<_> = {
            let mut index = self.index();
            let next =
                index.open_at(path)?.volumes().range::<String, _>((after, Bound::Unbounded)).take(CHECKED);
            next.map(|(_, known)| known.entry.clone()).collect()
        };
        for entry in entries.iter().filter(|entry| entry.record.stage == Stage::Ready) {
            let problem = entry.problem();
            let mut index = self.index();
            let could_be = index.open_at(path)?.note(entry.serial(), problem.clone());
            if let Some(problem) = problem.filter(|_| could_be) {
                tracing::warn!(volume = entry.record.id, problem, "a volume cannot be used");
            }
        }
        let last = entries.last().map(|entry| entry.serial().to_owned());
        last.filter(|_| entries.len() == CHECKED)
    }

    /// Records the total and free space of a pool. Blocks.
    fn measure(&self, folder: &Folder) {
        let Ok((size, free)) = folder.room() else { return };
        let mut index = self.index();
        let Some(open) = index.open_at(folder.path()) else { return };
        let is_full = free < FULL;
        if is_full && !open.is_full {
            tracing::warn!(path = %folder.path().display(), free, "a pool is full");
        }
        open.is_full = is_full;
        open.room = Some((size, free));
    }

    /// Closes a pool whose directory is no longer its own.
    fn close(&self, folder: &Arc<Folder>, problem: &str) {
        let mut index = self.index();
        let Some(slot) = index.at(folder.path()) else { return };
        if slot.open().is_some_and(|open| Arc::ptr_eq(&open.folder, folder)) {
            tracing::error!(pool = slot.pool.name, path = %folder.path().display(), problem, "a pool cannot be used");
            let uuid = Some(folder.uuid().to_owned());
            slot.state = State::Closed { problem: problem.to_owned(), uuid };
            slot.tried = None;
        }
    }

    /// Checks whether unusable records have been removed or repaired. Blocks.
    pub(super) fn look_again(&self, folder: &Arc<Folder>) {
        let serials: Vec<_> = match self.index().open_at(folder.path()) {
            Some(open) => open.damaged().keys().cloned().collect(),
            None => return,
        };
        for serial in serials {
            let found = folder.look(&serial);
            let mut index = self.index();
            let Some(open) = index.open_at(folder.path()) else { return };
            match found {
                Some(Err(damaged)) => open.damage(serial, damaged),
                found => {
                    open.mend(&serial);
                    let Some(Ok(record)) = found else { continue };
                    tracing::info!(volume = record.id, "the record of a volume can be used again");
                    let entry = Entry { record, folder: Arc::clone(folder) };
                    open.put(Known { entry, problem: None });
                }
            }
        }
    }
}
