//! How many lines a guest may cause in the log: one per second at info. The rest are for those who look for a
//! fault (debug), and the next line says how many they were.

use std::time::Duration;

use tokio::time::Instant;

const INTERVAL: Duration = Duration::from_secs(1);

/// The lines about one VM.
#[derive(Debug, Default)]
pub struct Lines {
    last: Option<Instant>,
    held: u64,
}

impl Lines {
    /// Whether there may be one more line; then, how many there were not since the last one.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL) {
            self.held += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.held))
    }
}

/// Logs at info, or at debug what is too much, with the fields and words that `tracing::info!` takes.
macro_rules! line {
    ($lines:expr, $($line:tt)+) => {
        match $lines.admit(tokio::time::Instant::now()) {
            Some(0) => tracing::info!($($line)+),
            Some(held) => tracing::info!(lines_left_out = held, $($line)+),
            None => tracing::debug!($($line)+),
        }
    };
}

pub(super) use line;

#[cfg(test)]
mod tests {
    use super::*;

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
