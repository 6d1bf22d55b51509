//! Counters of requests to exporters in guests, by outcome.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

/// Outcome of a request to an exporter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The exporter answered with metrics.
    Answered,
    /// The guest does not allow connections to the exporter.
    Denied,
    /// The guest has no session, or nothing listens at the address.
    Unreachable,
    /// The exporter did not answer in time.
    Late,
    /// The answer had more bytes than allowed.
    TooLarge,
    /// The answer was not metrics, or had more series than allowed.
    Wrong,
}

const OUTCOMES: [&str; 6] = ["answered", "denied", "unreachable", "late", "too-large", "wrong"];

/// Number of requests by job and outcome. Jobs come from the settings, so there are few.
#[derive(Debug, Default)]
pub struct Exporters(Mutex<BTreeMap<String, [u64; OUTCOMES.len()]>>);

impl Exporters {
    /// Counts one more request of this job.
    pub fn count(&self, job: &str, outcome: Outcome) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !all.contains_key(job) {
            all.insert(job.to_owned(), Default::default());
        }
        if let Some(count) = all.get_mut(job).and_then(|counts| counts.get_mut(outcome as usize)) {
            *count += 1;
        }
    }

    pub(super) fn render(&self, text: &mut String) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.is_empty() {
            return;
        }
        let name = "guestlet_host_scrapes_total";
        super::head(text, name, "counter", "Requests to exporters in guests, by outcome.");
        for (job, counts) in all.iter() {
            for (outcome, count) in OUTCOMES.iter().zip(counts) {
                let _ = writeln!(text, "{name}{{scrape_job=\"{job}\",outcome=\"{outcome}\"}} {count}");
            }
        }
    }
}
