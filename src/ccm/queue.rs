//! Queue of the objects that are to be looked at, and when. An object is processed at most once at a time,
//! again with growing waits after a failure, and at once when it changes. Pure: the caller supplies time and
//! randomness.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

/// Waits after failures, at first and at most.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// Result of looking at an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Done until something changes.
    Done,
    /// Failed; retried after a wait.
    Failed,
    /// Look again after this time; this is not a failure.
    Again(Duration),
}

/// Queue of objects by their keys.
#[derive(Debug)]
pub struct Queue<K> {
    due: BTreeMap<K, Instant>,
    running: BTreeSet<K>,
    /// Failures in a row.
    failures: BTreeMap<K, u32>,
}

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self { due: BTreeMap::new(), running: BTreeSet::new(), failures: BTreeMap::new() }
    }
}

impl<K: Ord + Clone> Queue<K> {
    /// Schedules an object that has changed for now, or for the end of the wait that a failure has caused.
    pub fn changed(&mut self, key: K, now: Instant) {
        if self.failures.contains_key(&key) {
            self.due.entry(key).or_insert(now);
        } else {
            self.due.insert(key, now);
        }
    }

    /// Schedules an object for a time, unless it is due earlier. A change brings it forward.
    pub fn later(&mut self, key: K, at: Instant) {
        let due = self.due.entry(key).or_insert(at);
        *due = at.min(*due);
    }

    /// Schedules an object for now and forgets its failures, because their cause may be over.
    pub fn afresh(&mut self, key: K, now: Instant) {
        self.failures.remove(&key);
        self.due.insert(key, now);
    }

    /// Removes all that is known of an object.
    pub fn forget(&mut self, key: &K) {
        self.due.remove(key);
        self.failures.remove(key);
    }

    /// Returns an object that is due. It is not returned again until it is [done](Self::done).
    pub fn next(&mut self, now: Instant) -> Option<K> {
        let is_next = |(key, due): &(&K, &Instant)| **due <= now && !self.running.contains(*key);
        let key = self.due.iter().filter(is_next).min_by_key(|(_, due)| **due)?.0.clone();
        self.due.remove(&key);
        self.running.insert(key.clone());
        Some(key)
    }

    /// Records the outcome of a look at an object. `chance` is a random number in 0..1 that spreads retries of
    /// what failed at the same time.
    pub fn done(&mut self, key: K, outcome: Outcome, now: Instant, chance: f64) {
        self.running.remove(&key);
        let wait = match outcome {
            // An earlier schedule stays in force.
            Outcome::Done => {
                self.failures.remove(&key);
                return;
            }
            Outcome::Again(wait) => {
                self.failures.remove(&key);
                wait
            }
            Outcome::Failed => {
                let failures = self.failures.entry(key.clone()).or_default();
                *failures = failures.saturating_add(1);
                let longest = FIRST.saturating_mul(1 << (*failures - 1).min(16)).min(LONGEST);
                longest.mul_f64(0.5 + chance.clamp(0.0, 1.0) / 2.0)
            }
        };
        let due = self.due.entry(key).or_insert(now + wait);
        if matches!(outcome, Outcome::Failed) {
            // It has changed meanwhile, too, but still has to wait.
            *due = now + wait;
        }
    }

    /// Returns how often the object has failed in a row.
    pub fn failures(&self, key: &K) -> u32 {
        self.failures.get(key).copied().unwrap_or_default()
    }

    /// Returns when the next object is due, apart from those that are being processed.
    pub fn due(&self) -> Option<Instant> {
        self.due.iter().filter(|(key, _)| !self.running.contains(*key)).map(|(_, due)| *due).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_comes_once_at_a_time_and_waits_longer_after_each_failure() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        queue.changed("a", now);
        queue.changed("a", now);
        assert_eq!((queue.next(now), queue.next(now)), (Some("a"), None));
        // The object changes while it is being looked at.
        queue.changed("a", now);
        assert_eq!(queue.next(now), None);
        queue.done("a", Outcome::Done, now, 1.0);
        assert_eq!(queue.next(now), Some("a"));
        let mut waits = Vec::new();
        for _ in 0..8 {
            queue.done("a", Outcome::Failed, now, 1.0);
            // Changes do not shorten the wait.
            queue.changed("a", now);
            assert_eq!(queue.next(now), None);
            waits.push((queue.due().unwrap() - now).as_secs());
            now = queue.due().unwrap();
            assert_eq!(queue.next(now), Some("a"));
        }
        assert_eq!((waits, queue.failures(&"a")), (vec![1, 2, 4, 8, 16, 32, 60, 60], 8));
        queue.done("a", Outcome::Failed, now, 0.0);
        assert_eq!(queue.due(), Some(now + LONGEST / 2));
        queue.afresh("a", now);
        assert_eq!((queue.next(now), queue.failures(&"a")), (Some("a"), 0));
        queue.done("a", Outcome::Again(Duration::from_secs(5)), now, 1.0);
        assert_eq!(queue.due(), Some(now + Duration::from_secs(5)));
        queue.changed("a", now);
        assert_eq!(queue.due(), Some(now));
        queue.forget(&"a");
        assert_eq!((queue.due(), queue.next(now)), (None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn the_one_that_has_waited_longest_is_first() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        let second = Duration::from_secs(1);
        queue.changed("b", now);
        queue.changed("a", now + second);
        queue.changed("c", now + 2 * second);
        assert_eq!(queue.due(), Some(now));
        let later = now + second;
        assert_eq!([queue.next(later), queue.next(later), queue.next(later)], [Some("b"), Some("a"), None]);
        assert_eq!(queue.due(), Some(now + 2 * second));
    }
}
