//! What is wrong with volumes, and was said: it is said again when it has changed, in more than numbers, such as seconds. Pure.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The last words about each volume, by its identifier.
#[derive(Debug, Default)]
pub struct Complaints(Mutex<BTreeMap<String, String>>);

impl Complaints {
    fn said(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        // Nothing that is done under the lock leaves it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is to be said, because it is another thing than was said of the volume before.
    pub fn is_new(&self, id: &str, words: &str) -> bool {
        let words: String = words.chars().filter(|one| !one.is_ascii_digit()).collect();
        self.said().insert(id.to_owned(), words.clone()) != Some(words)
    }

    /// Nothing is wrong with a volume any more.
    pub fn settle(&self, id: &str) {
        self.said().remove(id);
    }

    /// Whether anything was said that is not settled.
    pub fn are_any(&self) -> bool {
        !self.said().is_empty()
    }

    /// Forgets the volumes that there are no more.
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
