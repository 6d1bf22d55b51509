//! How many events a guest may send: a token bucket. Pure: the caller gives the time.

use tokio::time::Instant;

/// Events that may come at once.
pub const BURST: f64 = 256.0;
/// Events per second in the long run.
pub const PER_SECOND: f64 = 64.0;

/// The allowance of one session.
#[derive(Debug, Clone)]
pub struct Allowance {
    left: f64,
    at: Instant,
}

impl Allowance {
    /// A full one.
    pub fn new(now: Instant) -> Self {
        Self { left: BURST, at: now }
    }

    /// Takes one event off; false if there is none left.
    pub fn take(&mut self, now: Instant) -> bool {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() * PER_SECOND;
        self.left = (self.left + gained).min(BURST);
        self.at = now;
        if self.left < 1.0 {
            return false;
        }
        self.left -= 1.0;
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
        let mut allowance = Allowance::new(start);
        assert!((0..256).all(|_| allowance.take(start)));
        assert!(!allowance.take(start));
        let later = start + Duration::from_secs(1);
        assert!((0..64).all(|_| allowance.take(later)));
        assert!(!allowance.take(later));
        let much_later = start + Duration::from_secs(1000);
        assert!((0..256).all(|_| allowance.take(much_later)));
        assert!(!allowance.take(much_later));
    }
}
