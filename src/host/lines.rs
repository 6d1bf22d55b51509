//! Limits on the log lines that a guest may cause: one per second at level info. Further lines are logged at level
//! debug, and the next line at info has their number.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::pace::Lines;

/// Time for which the same message about the same subject is not repeated.
const SAME: Duration = Duration::from_secs(60);

/// Log for the results of guests' requests, limited for each guest: one line per second, and the same line once a
/// minute.
#[derive(Debug, Default)]
pub struct Log(Mutex<BTreeMap<String, Asked>>);

/// State of the log for one guest.
#[derive(Debug, Default)]
struct Asked {
    lines: Lines,
    /// Time, subject and message of the last line.
    said: Option<(Instant, String, String)>,
}

impl Log {
    /// Logs a result of a request of this VM's guest as a warning.
    pub fn warn(&self, vm: &str, about: &str, words: &str) {
        match self.admit(vm, about, words, Instant::now()) {
            Some(0) => tracing::warn!(vm, about, "{words}"),
            Some(lines_left_out) => tracing::warn!(vm, about, lines_left_out, "{words}"),
            None => tracing::debug!(vm, about, "{words}"),
        }
    }

    /// Logs a result of a request of this VM's guest.
    pub fn info(&self, vm: &str, about: &str, words: &str) {
        match self.admit(vm, about, words, Instant::now()) {
            Some(0) => tracing::info!(vm, about, "{words}"),
            Some(lines_left_out) => tracing::info!(vm, about, lines_left_out, "{words}"),
            None => tracing::debug!(vm, about, "{words}"),
        }
    }

    /// Removes the state of a VM that no longer exists.
    pub fn forget(&self, vm: &str) {
        self.asked().remove(vm);
    }

    fn asked(&self) -> MutexGuard<'_, BTreeMap<String, Asked>> {
        // A panic under the lock cannot leave the map half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of lines that were left out since the last one, or `None` if this line is to be left out as
    /// well.
    fn admit(&self, vm: &str, about: &str, words: &str, now: Instant) -> Option<u64> {
        let mut all = self.asked();
        let asked = all.entry(vm.to_owned()).or_default();
        let again = |(at, before, said): &(Instant, String, String)| {
            before == about && said == words && now.saturating_duration_since(*at) < SAME
        };
        if asked.said.as_ref().is_some_and(again) {
            asked.lines.hold();
            return None;
        }
        let held = asked.lines.admit(now)?;
        asked.said = Some((now, about.to_owned(), words.to_owned()));
        Some(held)
    }
}

/// Logs at level info, or at level debug beyond the limit, with the arguments of `tracing::info!`.
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
    fn what_a_guest_repeats_is_said_once_a_minute_and_of_another_guest_at_once() {
        let start = Instant::now();
        let log = Log::default();
        let admit = |milliseconds, vm: &str, words: &str| {
            log.admit(vm, "pvc-1", words, start + Duration::from_millis(milliseconds))
        };
        let said = (0..600).filter(|tenth| admit(tenth * 100, "a", "no room").is_some()).count();
        assert_eq!(said, 1);
        assert_eq!(admit(59_950, "b", "no room"), Some(0));
        assert_eq!(admit(60_000, "a", "no room"), Some(599));
        assert_eq!(admit(60_500, "a", "something else"), None, "one line a second");
        assert_eq!(admit(61_000, "a", "something else"), Some(1));
        log.forget("a");
        assert_eq!(admit(61_100, "a", "something else"), Some(0));
    }
}
