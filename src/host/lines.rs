//! How many lines a guest may cause in the log: one per second at info. The rest are for those who look for a
//! fault (debug), and the next line says how many they were.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::pace::Lines;

/// How long the same words about the same thing are not said again.
const SAME: Duration = Duration::from_secs(60);

/// The lines about what guests ask for, each guest's on its own account: one per second, and the same one once a minute.
#[derive(Debug, Default)]
pub struct Log(Mutex<BTreeMap<String, Asked>>);

/// The lines about what one guest asks for.
#[derive(Debug, Default)]
struct Asked {
    lines: Lines,
    /// The last line: when, what it was about, and its words.
    said: Option<(Instant, String, String)>,
}

impl Log {
    /// Warns of what came of something that the guest of this VM asked for.
    pub fn warn(&self, vm: &str, about: &str, words: &str) {
        match self.admit(vm, about, words, Instant::now()) {
            Some(0) => tracing::warn!(vm, about, "{words}"),
            Some(lines_left_out) => tracing::warn!(vm, about, lines_left_out, "{words}"),
            None => tracing::debug!(vm, about, "{words}"),
        }
    }

    /// Tells what came of something that the guest of this VM asked for.
    pub fn info(&self, vm: &str, about: &str, words: &str) {
        match self.admit(vm, about, words, Instant::now()) {
            Some(0) => tracing::info!(vm, about, "{words}"),
            Some(lines_left_out) => tracing::info!(vm, about, lines_left_out, "{words}"),
            None => tracing::debug!(vm, about, "{words}"),
        }
    }

    /// There is no such VM any more.
    pub fn forget(&self, vm: &str) {
        self.asked().remove(vm);
    }

    fn asked(&self) -> MutexGuard<'_, BTreeMap<String, Asked>> {
        // Nothing that is done under the lock leaves it half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there may be this line; then, how many there were not since the last one.
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
