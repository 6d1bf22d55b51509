//! How often the conditions of a Service are written: what they say comes from guests, which may change their minds all the time. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::Conditions;
use crate::pace::{Count, Rate};

/// Conditions that say the same in other words are written so often at most.
const SPACING: Duration = Duration::from_secs(10);
/// Changes of what they say.
const CHANGES: Rate = Rate { burst: 10, again: SPACING };

/// What was written of one Service.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    last: Instant,
    changes: Count,
}

impl Pace {
    /// Nothing was written yet.
    pub fn new(now: Instant) -> Self {
        Self { last: now.checked_sub(SPACING).unwrap_or(now), changes: Count::new(now) }
    }

    /// How long it is until these conditions can be written after those; none: now.
    pub fn wait(&self, before: &Conditions, now: &Conditions, at: Instant) -> Option<Duration> {
        let wait = if is_same(before, now) {
            (self.last + SPACING).saturating_duration_since(at)
        } else {
            self.changes.wait(CHANGES, at)
        };
        Some(wait).filter(|wait| !wait.is_zero())
    }

    /// These were written after those.
    pub fn written(&mut self, before: &Conditions, now: &Conditions, at: Instant) {
        self.last = at;
        if !is_same(before, now) {
            self.changes.add(CHANGES, at);
        }
    }
}

/// Whether they say the same, in whatever words.
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
