//! How guests answer when they are asked for what they measure.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

/// How one has answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// With what it measures.
    Answered,
    /// That it does not tell this host half.
    Denied,
    /// Not in time.
    Late,
    /// With another error, or its session has ended.
    Failed,
}

const OUTCOMES: [&str; 4] = ["answered", "denied", "late", "failed"];

/// How often guests have answered how.
#[derive(Debug, Default)]
pub struct Gathered([AtomicU64; OUTCOMES.len()]);

impl Gathered {
    /// One more has answered so.
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
