//! Schedules further attempts where a device or mount point was in use: no event reports that it has become free.
//! While nothing is in use, nothing is scheduled.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Ticks of the agent before the first retry, and the longest pause between two.
const FIRST: u32 = 1;
const MOST: u32 = 32;

#[derive(Debug)]
struct Wait {
    /// Ticks until the next attempt; 0 while it is being made.
    left: u32,
    /// Ticks to wait after the next failure.
    next: u32,
    tries: u32,
    why: String,
}

/// Waiting retries by their mount points.
#[derive(Debug, Default)]
pub(super) struct Patience(HashMap<PathBuf, Wait>);

impl Patience {
    /// Records a failure at `point` because something was in use. Returns whether it is the first one or has a new
    /// reason, and so should be reported.
    pub(super) fn failed(&mut self, point: &Path, why: &str) -> bool {
        let why = why.to_owned();
        if let Some(wait) = self.0.get_mut(point) {
            (wait.left, wait.next) = (wait.next, (wait.next * 2).min(MOST));
            wait.tries += 1;
            std::mem::replace(&mut wait.why, why.clone()) != why
        } else {
            self.0.insert(point.to_owned(), Wait { left: FIRST, next: FIRST * 2, tries: 0, why });
            true
        }
    }

    /// Counts one tick and returns the mount points that are to be tried now.
    pub(super) fn tick(&mut self) -> Vec<PathBuf> {
        let due = |(point, wait): (&PathBuf, &mut Wait)| {
            let waited = wait.left == 1;
            wait.left = wait.left.saturating_sub(1);
            waited.then(|| point.clone())
        };
        self.0.iter_mut().filter_map(due).collect()
    }

    /// Returns the number of failed retries.
    pub(super) fn tries(&self, point: &Path) -> u32 {
        self.0.get(point).map_or(0, |wait| wait.tries)
    }

    /// Forgets a mount point that is no longer in use.
    pub(super) fn forget(&mut self, point: &Path) {
        self.0.remove(point);
    }

    /// Forgets all mount points that are no longer to be tried.
    pub(super) fn retain(&mut self, wanted: impl Fn(&Path) -> bool) {
        self.0.retain(|point, _| wanted(point));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_get_rarer_and_are_told_once() {
        let (mut patience, point) = (Patience::default(), Path::new("/a"));
        assert!(patience.tick().is_empty());
        assert!(patience.failed(point, "busy"));
        let mut waited = Vec::new();
        for _ in 0..8 {
            let ticks = (1..100).find(|_| patience.tick() == [point]).unwrap();
            assert!(patience.tick().is_empty(), "it is being tried");
            assert!(!patience.failed(point, "busy"));
            waited.push(ticks);
        }
        assert_eq!(waited, [1, 2, 4, 8, 16, 32, 32, 32]);
        assert_eq!(patience.tries(point), 8);
        assert!(patience.failed(point, "busy with something else"));
        patience.retain(|point| point == Path::new("/a"));
        assert!(!patience.is_empty());
        patience.forget(point);
        assert!(patience.is_empty());
    }
}
