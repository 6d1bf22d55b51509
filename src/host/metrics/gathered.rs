//! Counters of requests for the metrics of guests, by outcome.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// Outcome of a request for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The guest answered with its metrics.
    Answered,
    /// The guest denies this host half its metrics, or does not support the call.
    Denied,
    /// The guest did not answer in time.
    Late,
    /// The guest answered with another error, or its session has ended.
    Failed,
}

const OUTCOMES: [&str; 4] = ["answered", "denied", "late", "failed"];

/// Number of requests by outcome.
#[derive(Debug, Default)]
pub struct Gathered([AtomicU64; OUTCOMES.len()]);

impl Gathered {
    /// Counts one more request.
    pub fn count(&self, outcome: Outcome) {
        self.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn render(&self, text: &mut String) {
        let name = "guestlet_host_guest_metrics_total";
        super::head(text, name, "counter", "Requests for the metrics of guests, by outcome.");
        for (outcome, count) in OUTCOMES.iter().zip(&self.0) {
            let _ = writeln!(text, "{name}{{outcome=\"{outcome}\"}} {}", count.load(Ordering::Relaxed));
        }
    }
}
