//! How the pools are: looked at by each pool's worker between the calls, and noted in the [`index`](super::index), where
//! everybody reads it without waiting.

use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

use super::contents::Known;
use super::entry::Entry;
use super::folder::Folder;
use super::index::State;
use super::record::Stage;
use super::store::Store;

/// A pool that has fewer bytes free is full: QEMU writes clusters, and the file system has metadata of its own.
const FULL: u64 = 1 << 20;
/// Images that are looked at in one turn of the worker.
const CHECKED: usize = 64;

impl Store {
    /// Looks at some of the images of a pool, those after that serial number; the one after which to go on. Blocks.
    pub fn check(&self, path: &Path, after: Option<String>) -> Option<String> {
        let folder = Arc::clone(&self.index().open_at(path)?.folder);
        if after.is_none() {
            // If that cannot be told, each image says what is wrong.
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

    /// Notes what room a pool has. Blocks.
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

    /// That a directory is not that of its pool any more.
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

    /// Looks whether records that cannot be used are gone or repaired. Blocks.
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
