//! What has changed since somebody looked: for the long polls of `Watch…` calls. One journal for each cluster and kind of thing,
//! so that a poll costs what has changed, and one that waits costs a timer.

use std::collections::{BTreeMap, VecDeque};

use tokio::sync::watch;

/// Things that are gone and remembered; who has not looked for longer gets everything anew.
const MOST_GONE: usize = 1024;

/// Things by their keys, and when they changed.
#[derive(Debug)]
pub struct Journal<V> {
    /// The run of the host half: positions of another one mean nothing.
    run: String,
    number: u64,
    things: BTreeMap<String, (u64, V)>,
    gone: VecDeque<(u64, V)>,
    /// What is gone was forgotten up to here.
    horizon: u64,
    told: watch::Sender<u64>,
}

/// What has changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News<V> {
    /// Where to go on.
    pub position: String,
    /// These are all that there are.
    pub complete: bool,
    /// As they are now.
    pub there: Vec<V>,
    /// As they were when they went.
    pub gone: Vec<V>,
}

impl<V: Clone + PartialEq> Journal<V> {
    /// An empty one.
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

    /// A thing is so now.
    pub fn set(&mut self, key: &str, value: V) {
        if self.things.get(key).is_some_and(|(_, before)| *before == value) {
            return;
        }
        self.number += 1;
        self.things.insert(key.to_owned(), (self.number, value));
    }

    /// A thing is gone.
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

    /// Tells those who wait that there is news, if there is.
    pub fn tell(&self) {
        self.told.send_if_modified(|told| std::mem::replace(told, self.number) != self.number);
    }

    /// All things, in the order of their keys.
    pub fn all(&self) -> impl Iterator<Item = &V> {
        self.things.values().map(|(_, value)| value)
    }

    /// The thing with this key.
    pub fn get(&self, key: &str) -> Option<&V> {
        self.things.get(key).map(|(_, value)| value)
    }

    /// Completes when there is news after it was asked for.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        let mut told = self.told.subscribe();
        told.mark_unchanged();
        told
    }

    /// What has changed since a position; nothing if nothing has.
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

    /// Where it is now.
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
