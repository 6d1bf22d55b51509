//! Limit on how often the conditions of a Service are written: their content comes from guests, which may
//! change it all the time. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::Conditions;
use crate::pace::{Count, Rate};

/// Minimum interval between conditions that differ only in their messages.
const SPACING: Duration = Duration::from_secs(10);
/// Limit on changes of the conditions themselves.
const CHANGES: Rate = Rate { burst: 10, again: SPACING };

/// Record of the writes to one Service.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    last: Instant,
    changes: Count,
}

impl Pace {
    /// Starts without any write so far.
    pub fn new(now: Instant) -> Self {
        Self { last: now.checked_sub(SPACING).unwrap_or(now), changes: Count::new(now) }
    }

    /// Returns the time until the present conditions may replace those written before; `None` if they may be
    /// written now.
    pub fn wait(&self, before: &Conditions, now: &Conditions, at: Instant) -> Option<Duration> {
        let wait = if is_same(before, now) {
            (self.last + SPACING).saturating_duration_since(at)
        } else {
            self.changes.wait(CHANGES, at)
        };
        Some(wait).filter(|wait| !wait.is_zero())
    }

    /// Records that these conditions have replaced those before.
    pub fn written(&mut self, before: &Conditions, now: &Conditions, at: Instant) {
        self.last = at;
        if !is_same(before, now) {
            self.changes.add(CHANGES, at);
        }
    }
}

/// Returns whether both are the same, apart from their messages.
fn is_same(one: &Conditions, other: &Conditions) -> bool {
    let said = |all: &Conditions| -> Vec<_> {
        all.iter().map(|(kind, (is_true, reason, _))| (kind.clone(), *is_true, reason.clone())).collect()
    };
    said(one) == said(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conditions(is_true: bool, words: &str) -> Conditions {
        [("Healthy".to_owned(), (is_true, "Reason".to_owned(), words.to_owned()))].into()
    }

    #[tokio::test(start_paused = true)]
    async fn other_words_wait_and_changes_of_mind_are_few() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let (a, b, bad) = (conditions(true, "a"), conditions(true, "b"), conditions(false, "a"));
        let mut pace = Pace::new(start);
        assert_eq!(pace.wait(&Conditions::new(), &a, start), None);
        pace.written(&Conditions::new(), &a, start);
        assert_eq!(pace.wait(&a, &b, start + second), Some(9 * second));
        assert_eq!(pace.wait(&a, &b, start + 10 * second), None);
        let mut written = 1;
        for turn in 0..10_000_u64 {
            let at = start + Duration::from_millis(turn * 10);
            let (before, now) = if turn % 2 == 0 { (&a, &bad) } else { (&bad, &a) };
            if pace.wait(before, now, at).is_none() {
                pace.written(before, now, at);
                written += 1;
            }
        }
        assert!((10..=20).contains(&written), "{written} in 100 s");
    }
}
