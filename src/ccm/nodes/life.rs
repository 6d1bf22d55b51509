//! When a Node is deleted. Pure.
//!
//! ```text
//!          not ready, and the host half tells of no such VM
//!  fine ───────────────────────────────────────────────────▶ asked ──GONE──▶ gone once ──GONE again, later──▶ deleted
//!   ▲                                                         ▲ │                │
//!   │                                  UNKNOWN, no answer, …──┘ └─◀──anything else┤
//!   └───────────── ready, told of again, or another machine ◀────────────────────┘
//! ```
//!
//! That a VM is not told of says nothing: only the host half's GONE, twice, does. No answer is never taken for one.

use std::time::Duration;

use tokio::time::Instant;

use crate::wire::proto::v1::get_instance_response::Existence;

/// Between two questions that were not answered with GONE, at first and at most.
const FIRST: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(60);

/// What is known of a VM that the host half does not tell of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Doubt {
    /// How often it was asked about in a row without being gone.
    asked: u32,
    /// When it was first said to be gone, and by nothing else since.
    gone_since: Option<Instant>,
    /// It was said again, late enough.
    is_certain: bool,
    /// When it is asked about next; at once if there is none.
    next: Option<Instant>,
}

/// What follows from an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Ask again then.
    Wait(Duration),
    /// It is gone for certain.
    Delete,
}

impl Doubt {
    /// How long until it is asked about.
    pub fn due(&self, now: Instant) -> Duration {
        self.next.map_or(Duration::ZERO, |next| next.saturating_duration_since(now))
    }

    /// Whether the last answers say that it is gone for certain.
    pub fn is_certain(&self) -> bool {
        self.is_certain
    }

    /// What follows from what the host half answered; none if it did not. A VM has to be gone for `confirm` at least.
    pub fn answered(&mut self, existence: Option<Existence>, now: Instant, confirm: Duration) -> Verdict {
        if existence == Some(Existence::Gone) {
            let since = *self.gone_since.get_or_insert(now);
            let rest = (since + confirm).saturating_duration_since(now);
            // Twice, however short the time is.
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
        // Anything else in between, and it begins anew.
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
