//! What is said in the log of clients that do something wrong.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Says what clients of a channel do wrong: at most one line a second, however much they send and however often
/// they come.
#[derive(Debug, Default)]
pub struct Complaints(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    last: Option<Instant>,
    unsaid: u64,
}

impl Complaints {
    /// Logs the problem, or counts it.
    pub fn say(&self, peer: &str, problem: &dyn std::fmt::Display) {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if said.last.is_some_and(|last| last.elapsed() < Duration::from_secs(1)) {
            said.unsaid += 1;
            return;
        }
        match std::mem::take(&mut said.unsaid) {
            0 => tracing::warn!("{peer}: {problem}"),
            unsaid => tracing::warn!("{peer}: {problem} (and {unsaid} problems more before)"),
        }
        said.last = Some(Instant::now());
    }
}
