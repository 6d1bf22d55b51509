//! Decision when a Node is deleted. Pure.
//!
//! ```text
//!          not ready, and its VM is not reported
//!  fine ───────────────────────────────────────────────────▶ asked ──GONE──▶ gone once ──GONE again, later──▶ deleted
//!   ▲                                                         ▲ │                │
//!   │                                  UNKNOWN, no answer, …──┘ └─◀──anything else┤
//!   └──────────── ready, reported again, or another machine ◀────────────────────┘
//! ```
//!
//! A VM that is missing from the reports proves nothing: only two GONE answers of the host half do. A missing
//! answer never counts as one.

use std::time::Duration;

use tokio::time::Instant;

use crate::wire::proto::v1::get_instance_response::Existence;

/// Wait between two inquiries that were not answered with GONE, at first and at most.
const FIRST: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(60);

/// State of the inquiry about a VM that the host half does not report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Doubt {
    /// Inquiries in a row that were not answered with GONE.
    asked: u32,
    /// Time of the first GONE answer; cleared by any other answer.
    gone_since: Option<Instant>,
    /// True if GONE was answered again, late enough.
    is_certain: bool,
    /// Time of the next inquiry; `None` means at once.
    next: Option<Instant>,
}

/// Conclusion from an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Ask again after this time.
    Wait(Duration),
    /// Delete the Node: its VM certainly no longer exists.
    Delete,
}

impl Doubt {
    /// Returns the time until the next inquiry.
    pub fn due(&self, now: Instant) -> Duration {
        self.next.map_or(Duration::ZERO, |next| next.saturating_duration_since(now))
    }

    /// Returns whether the last answers prove that the VM no longer exists.
    pub fn is_certain(&self) -> bool {
        self.is_certain
    }

    /// Decides by the answer of the host half, which is `None` if the call failed. GONE has to be confirmed after
    /// at least `confirm`.
    pub fn answered(&mut self, existence: Option<Existence>, now: Instant, confirm: Duration) -> Verdict {
        if existence == Some(Existence::Gone) {
            let since = *self.gone_since.get_or_insert(now);
            let rest = (since + confirm).saturating_duration_since(now);
            // Two answers are required, however short the time is.
            if rest.is_zero() && since != now {
                (self.is_certain, self.next) = (true, None);
                return Verdict::Delete;
            }
            self.asked = 0;
            return self.wait(now, rest);
        }
        (self.gone_since, self.is_certain) = (None, false);
        let wait = FIRST.saturating_mul(1 << self.asked.min(16)).min(LONGEST);
        self.asked = self.asked.saturating_add(1);
        self.wait(now, wait)
    }

    fn wait(&mut self, now: Instant, wait: Duration) -> Verdict {
        self.next = Some(now + wait);
        Verdict::Wait(wait)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CONFIRM: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn gone_once_is_not_gone() {
        let (mut doubt, now) = (Doubt::default(), Instant::now());
        assert_eq!(doubt.due(now), Duration::ZERO);
        assert_eq!(doubt.answered(Some(Existence::Gone), now, CONFIRM), Verdict::Wait(CONFIRM));
        assert_eq!(doubt.due(now), CONFIRM);
        let later = now + CONFIRM;
        let mut again = doubt;
        assert_eq!(again.answered(Some(Existence::Gone), later, CONFIRM), Verdict::Delete);
        assert!(again.is_certain() && !doubt.is_certain());
        // Any other answer in between starts the confirmation again.
        for other in [None, Some(Existence::Unknown), Some(Existence::Exists), Some(Existence::Unspecified)] {
            let mut doubt = doubt;
            assert_eq!(doubt.answered(other, later, CONFIRM), Verdict::Wait(FIRST));
            assert_eq!(doubt.answered(Some(Existence::Gone), later + FIRST, CONFIRM), Verdict::Wait(CONFIRM));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_that_does_not_know_is_asked_less_and_less_often() {
        let (mut doubt, mut now) = (Doubt::default(), Instant::now());
        let mut waits = Vec::new();
        for _ in 0..6 {
            let Verdict::Wait(wait) = doubt.answered(None, now, CONFIRM) else { panic!("nothing was said") };
            waits.push(wait.as_secs());
            now += wait;
        }
        assert_eq!(waits, [5, 10, 20, 40, 60, 60]);
    }

    proptest! {
        #[test]
        fn two_answers_that_it_is_gone_with_nothing_else_between_them(answers in prop::collection::vec((0..5_u8, 0..20_u64), 1..40)) {
            let (mut doubt, mut now) = (Doubt::default(), Instant::now());
            let mut gone: Vec<Instant> = Vec::new();
            for (kind, seconds) in answers {
                now += Duration::from_secs(seconds);
                let answer = [None, Some(Existence::Unknown), Some(Existence::Exists), Some(Existence::Gone), Some(Existence::Gone)][usize::from(kind)];
                if answer == Some(Existence::Gone) { gone.push(now) } else { gone.clear() }
                let verdict = doubt.answered(answer, now, CONFIRM);
                let is_certain = gone.len() >= 2 && now - gone[0] >= CONFIRM;
                prop_assert_eq!(verdict == Verdict::Delete, is_certain);
                if is_certain {
                    break;
                }
            }
        }
    }
}
