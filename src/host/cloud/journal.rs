//! Changes since a client last looked, for the long polls of `Watch…` calls. There is one journal for each cluster
//! and kind of thing, so that a poll costs only as much as has changed, and a waiting poll costs only a timer.

use std::collections::{BTreeMap, VecDeque};

use tokio::sync::watch;

/// Removed things that are remembered. A client whose position is older gets the complete list again.
const MOST_GONE: usize = 1024;

/// Things by their keys, with the number of each one's last change.
#[derive(Debug)]
pub struct Journal<V> {
    /// Run of the host half. Positions of another run are invalid.
    run: String,
    number: u64,
    things: BTreeMap<String, (u64, V)>,
    gone: VecDeque<(u64, V)>,
    /// Number of the last removal that was forgotten: older positions cannot be continued.
    horizon: u64,
    told: watch::Sender<u64>,
}

/// Changes since a position, or the complete list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News<V> {
    /// Position from which the next poll continues.
    pub position: String,
    /// True if the list is complete rather than a difference.
    pub complete: bool,
    /// New and changed things, as they are now.
    pub there: Vec<V>,
    /// Removed things, as they were when they were removed.
    pub gone: Vec<V>,
}

impl<V: Clone + PartialEq> Journal<V> {
    /// Creates an empty journal. `run` identifies the run of the host half.
    pub fn new(run: &str) -> Self {
        Self {
            run: run.to_owned(),
            number: 0,
            things: BTreeMap::new(),
            gone: VecDeque::new(),
            horizon: 0,
            told: watch::Sender::new(0),
        }
    }

    /// Adds or changes a thing. Does nothing if it is the same as before.
    pub fn set(&mut self, key: &str, value: V) {
        if self.things.get(key).is_some_and(|(_, before)| *before == value) {
            return;
        }
        self.number += 1;
        self.things.insert(key.to_owned(), (self.number, value));
    }

    /// Removes a thing, and remembers its removal.
    pub fn remove(&mut self, key: &str) {
        let Some((_, value)) = self.things.remove(key) else { return };
        self.number += 1;
        self.gone.push_back((self.number, value));
        if self.gone.len() > MOST_GONE
            && let Some((number, _)) = self.gone.pop_front()
        {
            self.horizon = number;
        }
    }

    /// Wakes the waiting polls, if there is news.
    pub fn tell(&self) {
        self.told.send_if_modified(|told| std::mem::replace(told, self.number) != self.number);
    }

    /// Returns all things, ordered by their keys.
    pub fn all(&self) -> impl Iterator<Item = &V> {
        self.things.values().map(|(_, value)| value)
    }

    /// Returns the thing with this key.
    pub fn get(&self, key: &str) -> Option<&V> {
        self.things.get(key).map(|(_, value)| value)
    }

    /// Returns a receiver that changes when there is news after this call.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        let mut told = self.told.subscribe();
        told.mark_unchanged();
        told
    }

    /// Returns the changes since a position, or `None` if nothing has changed. For an unknown position it returns the
    /// complete list.
    pub fn since(&self, position: &str) -> Option<News<V>> {
        let known = position.strip_prefix(self.run.as_str()).and_then(|rest| rest.strip_prefix('.'));
        let since = known.and_then(|rest| rest.parse::<u64>().ok());
        let since = since.filter(|since| (self.horizon..=self.number).contains(since));
        let after = since.unwrap_or(0);
        if since == Some(self.number) {
            return None;
        }
        let there = self.things.values().filter(|(number, _)| since.is_none() || *number > after);
        let gone = self.gone.iter().filter(|(number, _)| since.is_some() && *number > after);
        Some(News {
            position: self.position(),
            complete: since.is_none(),
            there: there.map(|(_, value)| value.clone()).collect(),
            gone: gone.map(|(_, value)| value.clone()).collect(),
        })
    }

    /// Returns the current position.
    pub fn position(&self) -> String {
        format!("{}.{}", self.run, self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_again_gets_what_has_changed() {
        let mut journal = Journal::new("run");
        let all = journal.since("").unwrap();
        assert_eq!((all.complete, all.there.len()), (true, 0));
        assert_eq!(journal.since(&all.position), None);
        journal.set("a", 1);
        journal.set("b", 1);
        journal.set("c", 1);
        journal.set("a", 2);
        journal.set("b", 1);
        journal.remove("c");
        journal.remove("never");
        let news = journal.since(&all.position).unwrap();
        assert_eq!((news.complete, news.there, news.gone), (false, vec![2, 1], vec![1]));
        assert_eq!(journal.since(&news.position), None);
        for unknown in ["", "other.1", "run.99", "run.", "run.x", "run"] {
            let all = journal.since(unknown).unwrap();
            assert_eq!((all.complete, all.there, all.gone), (true, vec![2, 1], vec![]), "{unknown}");
        }
    }

    #[test]
    fn who_was_away_for_too_long_gets_everything() {
        let mut journal = Journal::new("run");
        let old = journal.position();
        for number in 0..=MOST_GONE {
            journal.set("x", number);
            journal.remove("x");
        }
        journal.set("y", 7);
        assert!(journal.since(&old).unwrap().complete);
        let mut told = journal.subscribe();
        assert!(!told.has_changed().unwrap());
        journal.tell();
        assert!(told.has_changed().unwrap());
        told.mark_unchanged();
        journal.tell();
        assert!(!told.has_changed().unwrap(), "nothing new");
    }
}
