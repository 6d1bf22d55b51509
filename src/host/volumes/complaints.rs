//! Problems with volumes that have been logged. A problem is logged again only if its text changes in more than
//! numbers, such as a count of seconds. Pure.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Text of the last problem of each volume without digits, by identifier.
#[derive(Debug, Default)]
pub struct Complaints(Mutex<BTreeMap<String, String>>);

impl Complaints {
    fn said(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        // A panic under the lock leaves the map consistent, so poisoning can be ignored.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports whether a problem is to be logged, since it differs from the last one of this volume.
    pub fn is_new(&self, id: &str, words: &str) -> bool {
        let words: String = words.chars().filter(|one| !one.is_ascii_digit()).collect();
        self.said().insert(id.to_owned(), words.clone()) != Some(words)
    }

    /// Forgets the problem of a volume, which is solved.
    pub fn settle(&self, id: &str) {
        self.said().remove(id);
    }

    /// Reports whether any logged problem is unsolved.
    pub fn are_any(&self) -> bool {
        !self.said().is_empty()
    }

    /// Forgets the problems of volumes that no longer exist.
    pub fn keep(&self, is_there: impl Fn(&str) -> bool) {
        self.said().retain(|id, _| is_there(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_said_once_until_they_change() {
        let complaints = Complaints::default();
        let said: Vec<_> = ["for 1 s", "for 12 s", "b", "for 1 s"]
            .into_iter()
            .map(|words| complaints.is_new("v", words))
            .collect();
        assert_eq!(said, [true, false, true, true]);
        assert!(complaints.is_new("w", "a"));
        complaints.settle("v");
        assert!(complaints.is_new("v", "a"));
        assert!(complaints.are_any() && !Complaints::default().are_any());
        complaints.keep(|id| id == "w");
        assert!(complaints.is_new("v", "a") && !complaints.is_new("w", "a"));
    }
}
