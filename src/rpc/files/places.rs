//! How many copies are under way at a time, in all and of one caller.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tonic::Status;

/// Calls that are under way: each takes a thread, and some 3 MiB.
const ALL: usize = 16;
const OF_ONE: usize = 8;

/// The calls of each caller; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Places(Arc<Mutex<BTreeMap<String, usize>>>);

/// One of them, until its last clone is dropped.
#[derive(Debug, Clone)]
#[allow(dead_code, reason = "held, not looked at")]
pub struct Place(Arc<Taken>);

#[derive(Debug)]
struct Taken {
    places: Places,
    owner: String,
}

impl Places {
    /// One for this caller.
    ///
    /// # Errors
    /// If there are too many.
    pub fn take(&self, owner: &str) -> Result<Place, Status> {
        let mut table = self.table();
        let own = table.get(owner).copied().unwrap_or_default();
        if table.values().sum::<usize>() >= ALL || own >= OF_ONE {
            return Err(Status::resource_exhausted(format!(
                "files are copied from or to this guest {ALL} times at a time, and {OF_ONE} times for one caller; try again later"
            )));
        }
        *table.entry(owner.to_owned()).or_default() += 1;
        Ok(Place(Arc::new(Taken { places: self.clone(), owner: owner.to_owned() })))
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut table = self.places.table();
        if let Some(count) = table.get_mut(&self.owner) {
            *count -= 1;
            if *count == 0 {
                table.remove(&self.owner);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_caller_takes_all() {
        let places = Places::default();
        let take = |owner: &str| (0..ALL).map_while(|_| places.take(owner).ok()).collect::<Vec<_>>();
        let (first, second) = (take("a"), take("b"));
        assert_eq!((first.len(), second.len(), take("c").len()), (OF_ONE, ALL - OF_ONE, 0));
        drop(first);
        assert_eq!(take("c").len(), OF_ONE);
        drop(second);
        assert!(places.table().is_empty());
    }
}
