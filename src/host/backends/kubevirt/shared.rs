//! Expensive readings that many callers request at the same time: each reading serves all callers that asked
//! before it began.
//!
//! ```text
//!  asked ──a reading is under way──▶ waits ──one has begun since it asked──▶ takes the result of that one
//!    └───────none is under way────────┴──none has───────────────────────────▶ reads, for itself and all that wait
//! ```
//!
//! A result is never older than the request, and is dropped as soon as no caller waits any longer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// Readings of one kind, by key; clones share the readings.
#[derive(Debug)]
pub struct Shared<K: Ord, T>(Arc<Mutex<BTreeMap<K, Arc<Slot<T>>>>>);

/// Result of the last reading of a key, and the time when that reading began. The holder of the lock is the
/// reader.
type Slot<T> = tokio::sync::Mutex<Option<(Instant, Outcome<T>)>>;

/// Result of a reading, or a text that says why it failed.
pub type Outcome<T> = Result<Arc<T>, String>;

impl<K: Ord, T> Clone for Shared<K, T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: Ord, T> Default for Shared<K, T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Ord + Clone, T> Shared<K, T> {
    /// Returns the result of a reading that begins now or later. Runs `read` itself unless another caller's reading
    /// will do.
    ///
    /// # Errors
    /// The text of the reading's error.
    pub async fn read(&self, key: &K, read: impl Future<Output = Result<T, String>>) -> Outcome<T> {
        let asked = Instant::now();
        let place =
            Asker { shared: self, key, slot: Arc::clone(self.slots().entry(key.clone()).or_default()) };
        let mut last = place.slot.lock().await;
        match &*last {
            Some((begun, outcome)) if *begun >= asked => outcome.clone(),
            _ => {
                let begun = Instant::now();
                let outcome = read.await.map(Arc::new);
                *last = Some((begun, outcome.clone()));
                outcome
            }
        }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<K, Arc<Slot<T>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Caller that waits for a reading.
struct Asker<'s, K: Ord + Clone, T> {
    shared: &'s Shared<K, T>,
    key: &'s K,
    slot: Arc<Slot<T>>,
}

impl<K: Ord + Clone, T> Drop for Asker<'_, K, T> {
    fn drop(&mut self) {
        let mut slots = self.shared.slots();
        // Only the map and this caller still hold the slot.
        if Arc::strong_count(&self.slot) == 2 {
            slots.remove(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Counts the readings; each takes a second and returns its number.
    async fn reading(count: &AtomicU32) -> Result<u32, String> {
        let number = count.fetch_add(1, Ordering::Relaxed) + 1;
        tokio::time::sleep(SECOND).await;
        if number == 3 { Err("the third one fails".to_owned()) } else { Ok(number) }
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_while_one_reads_shares_the_next_one() {
        let (shared, count) = (Shared::default(), AtomicU32::new(0));
        let ask = async |after: Duration, key: &'static str| {
            tokio::time::sleep(after).await;
            shared.read(&key, reading(&count)).await.map(|found| *found)
        };
        let late = SECOND / 2;
        let found = tokio::join!(ask(Duration::ZERO, "a"), ask(late, "a"), ask(late, "a"), ask(late, "a"));
        // The first reading had begun before the other callers asked.
        assert_eq!(found, (Ok(1), Ok(2), Ok(2), Ok(2)));
        assert!(shared.slots().is_empty(), "nothing is kept");
        // A failure is shared as well, and is not kept either.
        let failed = tokio::join!(ask(Duration::ZERO, "a"), ask(Duration::ZERO, "a"));
        let words = || Err("the third one fails".to_owned());
        assert_eq!(failed, (words(), words()));
        let others = tokio::join!(ask(Duration::ZERO, "a"), ask(Duration::ZERO, "b"));
        assert_eq!(others, (Ok(4), Ok(5)), "another thing has readings of its own");
    }

    #[tokio::test(start_paused = true)]
    async fn who_goes_while_it_reads_leaves_that_to_the_next_one() {
        let (shared, count) = (Shared::default(), AtomicU32::new(0));
        let gone = tokio::time::timeout(SECOND / 2, shared.read(&"a", reading(&count)));
        let (gone, found) = tokio::join!(gone, shared.read(&"a", reading(&count)));
        assert!(gone.is_err());
        assert_eq!(found.map(|found| *found), Ok(2));
        assert!(shared.slots().is_empty());
    }
}
