//! Rate limits on work, records and log lines that others cause: a burst at once, then a steady rate. The rest is
//! counted. Pure, except for [`Complaints`]: the caller passes the time.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Rate that is allowed: a token bucket.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Number that is allowed at once.
    pub burst: u32,
    /// Time after which one more is allowed.
    pub again: Duration,
}

/// Use of a rate so far.
#[derive(Debug, Clone, Copy)]
pub struct Count {
    /// Time at which the full burst is available again.
    until: Instant,
}

impl Count {
    /// Creates a count of nothing.
    pub fn new(now: Instant) -> Self {
        Self { until: now }
    }

    /// Returns the time until one more is allowed; zero if it is allowed now.
    pub fn wait(&self, rate: Rate, now: Instant) -> Duration {
        let full = rate.again * rate.burst;
        (self.until.max(now) + rate.again).saturating_duration_since(now + full)
    }

    /// Counts one more, allowed or not.
    pub fn add(&mut self, rate: Rate, now: Instant) {
        self.until = self.until.max(now) + rate.again;
    }

    /// Returns whether one more is allowed, and counts it if so.
    pub fn take(&mut self, rate: Rate, now: Instant) -> bool {
        let may = self.wait(rate, now).is_zero();
        if may {
            self.add(rate, now);
        }
        may
    }

    /// Returns whether the full burst is available again, so that the count may be forgotten.
    pub fn is_over(&self, now: Instant) -> bool {
        self.until <= now
    }
}

/// Count of one source's records: those written at the allowed rate, and those left out.
#[derive(Debug)]
pub struct Held {
    count: Count,
    left_out: u64,
    last: Instant,
}

impl Held {
    /// Creates a count of nothing.
    pub fn new(now: Instant) -> Self {
        Self { count: Count::new(now), left_out: 0, last: now }
    }

    /// Returns whether one more record may be written; if not, counts it as left out.
    pub fn admit(&mut self, rate: Rate, now: Instant) -> bool {
        self.last = now;
        let is_admitted = self.count.take(rate, now);
        self.left_out += u64::from(!is_admitted);
        is_admitted
    }

    /// Takes the number of records that were left out and not yet reported.
    pub fn take_left_out(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }
}

/// Takes, for each source that has any, the number of records that were left out and not yet reported. Forgets
/// sources that have caused nothing for `idle`.
pub fn settle<K: Clone + Ord>(all: &mut BTreeMap<K, Held>, idle: Duration, now: Instant) -> Vec<(K, u64)> {
    let mut left_out = Vec::new();
    all.retain(|key, held| {
        match held.take_left_out() {
            0 => {}
            more => left_out.push((key.clone(), more)),
        }
        now.saturating_duration_since(held.last) < idle
    });
    left_out
}

/// Rate limit of one log line a second.
#[derive(Debug, Default)]
pub struct Lines {
    last: Option<Instant>,
    held: u64,
}

impl Lines {
    const INTERVAL: Duration = Duration::from_secs(1);

    /// Returns, if one more line may be logged, the number of lines that were left out since the last one.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < Self::INTERVAL) {
            self.hold();
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held))
    }

    /// Counts a line that is left out.
    pub fn hold(&mut self) {
        self.held += 1;
    }
}

/// Log of what clients of a channel do wrong: at most one line a second, however much they send and however often
/// they connect.
#[derive(Debug, Default)]
pub struct Complaints(Mutex<Lines>);

impl Complaints {
    /// Logs a problem as [`tell`](Self::tell) does, with the name of the peer.
    pub fn say(&self, peer: &str, problem: &dyn std::fmt::Display) {
        self.tell(&format_args!("{peer}: {problem}"));
    }

    /// Logs a problem, or counts it; the next line says how many were left out.
    pub fn tell(&self, problem: &dyn std::fmt::Display) {
        let admitted = self.0.lock().unwrap_or_else(PoisonError::into_inner).admit(Instant::now());
        match admitted {
            Some(0) => tracing::warn!("{problem}"),
            Some(unsaid) => tracing::warn!("{problem} (and {unsaid} more problems before)"),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: Rate = Rate { burst: 10, again: Duration::from_secs(60) };

    #[test]
    fn a_few_at_once_and_then_one_after_the_other() {
        let start = Instant::now();
        let (mut count, second) = (Count::new(start), Duration::from_secs(1));
        let mut taken =
            |seconds: u32| (0..100).filter(|_| count.take(RATE, start + second * seconds)).count();
        assert_eq!([0, 0, 59, 60, 61, 120, 3600].map(&mut taken), [10, 0, 0, 1, 0, 1, 10]);
        assert_eq!(count.wait(RATE, start + second * 3601), second * 59);
        assert!(!count.is_over(start + second * 4199) && count.is_over(start + second * 4200));
    }

    #[test]
    fn what_is_left_out_is_told_once_and_who_is_idle_is_forgotten() {
        let (start, idle) = (Instant::now(), Duration::from_secs(90));
        let mut all = BTreeMap::from([("a", Held::new(start)), ("b", Held::new(start))]);
        let admitted = (0..30).filter(|_| all.get_mut("a").unwrap().admit(RATE, start)).count();
        assert_eq!(admitted, 10);
        assert_eq!(settle(&mut all, idle, start), [("a", 20)]);
        assert!(all.get_mut("b").unwrap().admit(RATE, start + RATE.again));
        assert_eq!(settle(&mut all, idle, start + idle), []);
        assert_eq!(all.keys().collect::<Vec<_>>(), [&"b"]);
    }

    #[test]
    fn one_line_a_second_and_the_rest_counted() {
        let start = Instant::now();
        let mut lines = Lines::default();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let cases = [(0, Some(0)), (1, None), (999, None), (1000, Some(2)), (1500, None), (9000, Some(1))];
        for (milliseconds, expected) in cases {
            assert_eq!(lines.admit(at(milliseconds)), expected, "{milliseconds} ms");
        }
        assert_eq!(lines.admit(at(10_000)), Some(0));
    }
}
