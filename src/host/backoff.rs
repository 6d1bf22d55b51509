//! Delay before the next dial: exponential with full jitter. Pure: the caller supplies time and randomness.
//!
//! A guest that was just started, reset or lost comes back soon, so the delays stay short for a while. An agent
//! that has been silent for longer is probably not installed.

use std::time::Duration;

use tokio::time::Instant;

const FIRST: Duration = Duration::from_millis(50);
const EAGER_LIMIT: Duration = Duration::from_millis(500);
const PATIENT_LIMIT: Duration = Duration::from_secs(10);
/// Time for which the delays stay below [`EAGER_LIMIT`].
const EAGER_FOR: Duration = Duration::from_secs(120);

/// Minimum duration of a connection after which the delays are short again.
pub const LASTING: Duration = Duration::from_secs(5);

/// Delays between the dials of one guest.
#[derive(Debug, Clone)]
pub struct Backoff {
    limit: Duration,
    eager_until: Instant,
}

impl Backoff {
    /// Creates a backoff whose delays are short from `now` on.
    pub fn new(now: Instant) -> Self {
        Self { limit: FIRST, eager_until: now + EAGER_FOR }
    }

    /// Makes the delays short again, because the guest is expected back soon.
    pub fn restart(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// Returns the next delay; `chance` is a random number in 0..1 that spreads the dials of many guests.
    pub fn next(&mut self, now: Instant, chance: f64) -> Duration {
        let cap = if now < self.eager_until { EAGER_LIMIT } else { PATIENT_LIMIT };
        self.below(cap, chance)
    }

    /// Returns the next delay where there is no hurry.
    pub fn next_patient(&mut self, chance: f64) -> Duration {
        self.below(PATIENT_LIMIT, chance)
    }

    fn below(&mut self, cap: Duration, chance: f64) -> Duration {
        let limit = self.limit.min(cap);
        self.limit = (limit * 2).min(PATIENT_LIMIT);
        limit.mul_f64(chance.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn waits_double_up_to_the_limit_of_the_phase() {
        let start = Instant::now();
        let mut backoff = Backoff::new(start);
        let milliseconds: Vec<_> = (0..7).map(|_| backoff.next(start, 1.0).as_millis()).collect();
        assert_eq!(milliseconds, [50, 100, 200, 400, 500, 500, 500]);
        let later = start + EAGER_FOR;
        let milliseconds: Vec<_> = (0..5).map(|_| backoff.next(later, 1.0).as_millis()).collect();
        assert_eq!(milliseconds, [1000, 2000, 4000, 8000, 10_000]);
        backoff.restart(later);
        assert_eq!(backoff.next(later, 1.0), FIRST);
    }

    proptest! {
        #[test]
        fn no_wait_is_beyond_its_limit(seconds in 0_u64..1000, tries in 1_usize..100, chance in 0.0..1.0_f64) {
            let start = Instant::now();
            let mut backoff = Backoff::new(start);
            for _ in 0..tries {
                let wait = backoff.next(start + Duration::from_secs(seconds), chance);
                let limit = if seconds < 120 { EAGER_LIMIT } else { PATIENT_LIMIT };
                prop_assert!(wait <= limit);
            }
        }
    }
}
