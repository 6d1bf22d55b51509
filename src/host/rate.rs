//! Rate limit for what a guest sends: a token bucket. Pure: the caller supplies the time.

use tokio::time::Instant;

/// An allowance of events, bytes or calls.
#[derive(Debug, Clone)]
pub struct Allowance {
    burst: f64,
    per_second: f64,
    left: f64,
    at: Instant,
}

impl Allowance {
    /// Creates a full allowance: `burst` at once, `per_second` in the long run.
    pub fn new(now: Instant, burst: f64, per_second: f64) -> Self {
        Self { burst, per_second, left: burst, at: now }
    }

    /// Takes `amount`; returns false, and takes nothing, if there is not as much left.
    pub fn take(&mut self, now: Instant, amount: f64) -> bool {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() * self.per_second;
        self.left = (self.left + gained).min(self.burst);
        self.at = now;
        if self.left < amount {
            return false;
        }
        self.left -= amount;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_burst_is_allowed_and_a_flood_is_not() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start, 256.0, 64.0);
        assert!((0..256).all(|_| allowance.take(start, 1.0)));
        assert!(!allowance.take(start, 1.0));
        let later = start + Duration::from_secs(1);
        assert!(allowance.take(later, 64.0));
        assert!(!allowance.take(later, 1.0));
        let much_later = start + Duration::from_secs(1000);
        assert!(!allowance.take(much_later, 257.0));
        assert!(allowance.take(much_later, 256.0));
    }
}
