//! How exporters in guests answer.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

/// How one has answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// With metrics.
    Answered,
    /// The guest does not let it be reached.
    Denied,
    /// There is no session, or nothing answers there.
    Unreachable,
    /// Not in time.
    Late,
    /// With more bytes than it may.
    TooLarge,
    /// With something else, or with more series than it may.
    Wrong,
}

const OUTCOMES: [&str; 6] = ["answered", "denied", "unreachable", "late", "too-large", "wrong"];

/// How often exporters have answered how, by jobs, of which settings have few.
#[derive(Debug, Default)]
pub struct Exporters(Mutex<BTreeMap<String, [u64; OUTCOMES.len()]>>);

impl Exporters {
    /// One of this job has answered so once more.
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
