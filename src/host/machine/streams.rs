//! Limits for what callers may keep open in one guest for as long as they like. Callers other than root cannot use
//! up what is reserved for root, nor one caller what the others need.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tonic::Status;

use crate::host::caller::Caller;

/// Limits of one kind of stream.
#[derive(Debug)]
pub struct Bounds {
    /// Name of the kind for messages, in the plural.
    pub of: &'static str,
    /// Most streams of one guest.
    pub all: usize,
    /// Most streams of all callers but root together.
    pub others: usize,
    /// Most streams of one caller other than root.
    pub of_one: usize,
}

/// Number of streams by caller, named as in records. Root has the empty name. A count is never 0.
type Table = BTreeMap<String, usize>;

/// Streams that are open, with their limits; clones share them.
#[derive(Debug, Clone)]
pub struct Streams(Arc<(Bounds, Mutex<Table>)>);

/// Stream that counts until this is dropped.
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
    /// Creates a counter with these limits.
    pub fn within(bounds: Bounds) -> Self {
        Self(Arc::new((bounds, Mutex::default())))
    }

    /// Reports whether any stream is open.
    pub fn is_in_use(&self) -> bool {
        !self.table().is_empty()
    }

    /// Reserves one more stream for this caller.
    ///
    /// # Errors
    /// If a limit is reached.
    pub fn place(&self, caller: &Caller) -> Result<Stream, Status> {
        let Bounds { of, all, others, of_one } = self.0.0;
        let is_root = matches!(caller, Caller::User { uid: 0, .. });
        let name = if is_root { String::new() } else { caller.to_string() };
        let mut table = self.table();
        let taken: usize = table.values().sum();
        let own = table.get(&name).copied().unwrap_or_default();
        let of_root = table.get("").copied().unwrap_or_default();
        let refused = |words: String| Err(Status::resource_exhausted(words));
        if taken >= all {
            return refused(format!("this guest has {all} {of}, which is the limit"));
        }
        if !is_root && taken - of_root >= others {
            return refused(format!(
                "this guest has {others} {of}, which is the limit for callers other than root"
            ));
        }
        if !is_root && own >= of_one {
            return refused(format!(
                "{name} already has {of_one} {of} in this guest, which is the limit; end one of them"
            ));
        }
        *table.entry(name.clone()).or_default() += 1;
        Ok(Stream { streams: self.clone(), caller: name })
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        // A panic under the lock leaves the table consistent, so poisoning can be ignored.
        self.0.1.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: usize = 48;
    const OTHERS: usize = 32;
    const OF_ONE: usize = 16;

    #[test]
    fn no_caller_keeps_others_out_and_all_together_not_root() {
        let streams = Streams::within(Bounds { of: "things", all: ALL, others: OTHERS, of_one: OF_ONE });
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
