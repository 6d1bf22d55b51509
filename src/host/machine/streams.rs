//! Connections beside the session of one guest, and how many of them one caller may have: whoever is not root cannot keep root out,
//! nor anybody else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tonic::Status;

use crate::host::caller::Caller;

/// Those of one guest. An agent takes 64 in all.
const ALL: usize = 48;
/// Those of all callers but root.
const OTHERS: usize = 32;
/// Those of one caller but root.
const OF_ONE: usize = 16;

/// By callers, as records name them; root is the empty name. None counts nothing.
type Table = BTreeMap<String, usize>;

/// How many there are; clones share it.
#[derive(Debug, Clone, Default)]
pub struct Streams(Arc<Mutex<Table>>);

/// A connection, until this is dropped.
#[derive(Debug)]
pub struct Stream {
    streams: Streams,
    caller: String,
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut table = self.streams.table();
        if let Some(count) = table.get_mut(&self.caller) {
            *count -= 1;
            if *count == 0 {
                table.remove(&self.caller);
            }
        }
    }
}

impl Streams {
    /// There are some.
    pub fn is_in_use(&self) -> bool {
        !self.table().is_empty()
    }

    /// A place for one more of this caller.
    ///
    /// # Errors
    /// If there are too many.
    pub fn place(&self, caller: &Caller) -> Result<Stream, Status> {
        let is_root = matches!(caller, Caller::User { uid: 0, .. });
        let name = if is_root { String::new() } else { caller.to_string() };
        let mut table = self.table();
        let all: usize = table.values().sum();
        let own = table.get(&name).copied().unwrap_or_default();
        let of_root = table.get("").copied().unwrap_or_default();
        let refused = |words: String| Err(Status::resource_exhausted(words));
        if all >= ALL {
            return refused(format!("{ALL} programs of this guest have clients, and one more is not let in"));
        }
        if !is_root && all - of_root >= OTHERS {
            return refused(format!(
                "{OTHERS} programs of this guest have clients, and one more that is not root's is not let in"
            ));
        }
        if !is_root && own >= OF_ONE {
            return refused(format!(
                "{OF_ONE} programs of {name} in this guest have clients: end one of them"
            ));
        }
        *table.entry(name.clone()).or_default() += 1;
        Ok(Stream { streams: self.clone(), caller: name })
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        // Nothing that is done under the lock leaves it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_caller_keeps_others_out_and_all_together_not_root() {
        let streams = Streams::default();
        let user = |uid| Caller::User { uid, name: None };
        let take = |uid| (0..100).map_while(|_| streams.place(&user(uid)).ok()).collect::<Vec<_>>();
        let first = take(1);
        assert_eq!(first.len(), OF_ONE);
        let second = take(2);
        assert_eq!((second.len(), take(3).len()), (OTHERS - OF_ONE, 0));
        let root = take(0);
        assert_eq!(root.len(), ALL - OTHERS);
        drop(first);
        assert_eq!(take(3).len(), OF_ONE);
        drop((second, root));
        assert!(!streams.is_in_use());
        assert_eq!(take(0).len(), ALL);
    }
}
