//! One operation at a time on one disk or place: whoever has its turn.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type Doing = HashMap<PathBuf, &'static str>;

/// What is being done to which device or place.
#[derive(Debug, Default)]
pub struct Busy(Arc<Mutex<Doing>>);

/// Nobody else does anything to it until the last copy of this is gone.
#[derive(Debug, Clone)]
pub struct Turn(#[expect(dead_code, reason = "it is held, and let go of with this")] Arc<Entry>);

#[derive(Debug)]
struct Entry {
    what: PathBuf,
    all: Arc<Mutex<Doing>>,
}

impl Busy {
    /// Begins to do something to `what`.
    ///
    /// # Errors
    /// What is being done to it, if something is.
    pub fn begin(&self, what: &Path, doing: &'static str) -> Result<Turn, &'static str> {
        let mut all = locked(&self.0);
        if let Some(doing) = all.get(what) {
            return Err(doing);
        }
        all.insert(what.to_owned(), doing);
        Ok(Turn(Arc::new(Entry { what: what.to_owned(), all: Arc::clone(&self.0) })))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        locked(&self.all).remove(&self.what);
    }
}

fn locked(all: &Mutex<Doing>) -> MutexGuard<'_, Doing> {
    all.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let busy = Busy::default();
        let (disk, other) = (Path::new("/dev/vdb"), Path::new("/dev/vdc"));
        let held = busy.begin(disk, "formatting").unwrap();
        let copy = held.clone();
        assert_eq!(busy.begin(disk, "mounting").unwrap_err(), "formatting");
        busy.begin(other, "mounting").unwrap();
        drop(held);
        busy.begin(disk, "mounting").unwrap_err();
        drop(copy);
        busy.begin(disk, "mounting").unwrap();
    }
}
