//! How much is done, written or said of what others cause: a few things at once, and some in the long run. The rest is counted.
//! Pure, but for [`Complaints`]: the caller gives the time.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How many there may be of something.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// So many at once.
    pub burst: u32,
    /// One more after this time.
    pub again: Duration,
}

/// What there was of something of which there may be a limited number.
#[derive(Debug, Clone, Copy)]
pub struct Count {
    /// When none of it counts any more.
    until: Instant,
}

impl Count {
    /// There was none yet.
    pub fn new(now: Instant) -> Self {
        Self { until: now }
    }

    /// How long it is until there may be one more; zero: it may be now.
    pub fn wait(&self, rate: Rate, now: Instant) -> Duration {
        let full = rate.again * rate.burst;
        (self.until.max(now) + rate.again).saturating_duration_since(now + full)
    }

    /// There was one.
    pub fn add(&mut self, rate: Rate, now: Instant) {
        self.until = self.until.max(now) + rate.again;
    }

    /// Whether there may be one more, which counts then.
    pub fn take(&mut self, rate: Rate, now: Instant) -> bool {
        let may = self.wait(rate, now).is_zero();
        if may {
            self.add(rate, now);
        }
        may
    }

    /// Whether none of it counts any more.
    pub fn is_over(&self, now: Instant) -> bool {
        self.until <= now
    }
}

/// What somebody causes that is written down, and how much of it was not.
#[derive(Debug)]
pub struct Held {
    count: Count,
    left_out: u64,
    last: Instant,
}

impl Held {
    /// Nothing was caused yet.
    pub fn new(now: Instant) -> Self {
        Self { count: Count::new(now), left_out: 0, last: now }
    }

    /// Whether one more is written down; else it is counted.
    pub fn admit(&mut self, rate: Rate, now: Instant) -> bool {
        self.last = now;
        let is_admitted = self.count.take(rate, now);
        self.left_out += u64::from(!is_admitted);
        is_admitted
    }

    /// Takes how many were not written down and are not told yet.
    pub fn take_left_out(&mut self) -> u64 {
        std::mem::take(&mut self.left_out)
    }
}

/// Takes of each how many were not written down and are not told yet, if there are any, and forgets who has caused nothing for so
/// long.
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

/// One line a second in the log.
#[derive(Debug, Default)]
pub struct Lines {
    last: Option<Instant>,
    held: u64,
}

impl Lines {
    const INTERVAL: Duration = Duration::from_secs(1);

    /// Whether there may be one more line; then, how many there were not since the last one.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < Self::INTERVAL) {
            self.hold();
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held))
    }

    /// There is no line of something.
    pub fn hold(&mut self) {
        self.held += 1;
    }
}

/// Says what clients of a channel do wrong: at most one line a second, however much they send and however often they come.
#[derive(Debug, Default)]
pub struct Complaints(Mutex<Lines>);

impl Complaints {
    /// As [`tell`](Self::tell), of the peer of this name.
    pub fn say(&self, peer: &str, problem: &dyn std::fmt::Display) {
        self.tell(&format_args!("{peer}: {problem}"));
    }

    /// Logs a problem, or counts it; the next line says how many there were.
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
