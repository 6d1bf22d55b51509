//! Metrics of the load balancers of clusters, and of the forwarding for them.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::head;

/// States of load balancers, in the order of their counts.
const STATES: [&str; 3] = ["ready", "pending", "failed"];

/// Number of load balancers in each state.
pub type Counts = [u64; STATES.len()];

/// Counters of load balancers, and of the kernel's forwarding rules.
#[derive(Debug, Default)]
pub struct Balancers {
    counts: [AtomicU64; STATES.len()],
    /// Number of times that another program had changed the rules, which were then restored.
    pub repairs: AtomicU64,
    /// True while traffic that should be forwarded is not.
    pub is_failing: AtomicBool,
}

impl Balancers {
    /// Sets the current numbers of load balancers: ready, pending and failed.
    pub fn set(&self, counts: Counts) {
        for (place, count) in self.counts.iter().zip(counts) {
            place.store(count, Ordering::Relaxed);
        }
    }

    pub(super) fn render(&self, text: &mut String) {
        let name = "guestlet_host_load_balancers";
        head(text, name, "gauge", "Load balancers of clusters, by their states.");
        for (state, count) in STATES.iter().zip(&self.counts) {
            let _ = writeln!(text, "{name}{{state=\"{state}\"}} {}", count.load(Ordering::Relaxed));
        }
        let name = "guestlet_host_forwarding_failing";
        head(text, name, "gauge", "1 while traffic that should be forwarded to nodes is not.");
        let _ = writeln!(text, "{name} {}", u8::from(self.is_failing.load(Ordering::Relaxed)));
        let name = "guestlet_host_forwarding_repairs_total";
        head(text, name, "counter", "How often the forwarding rules had been changed by another program.");
        let _ = writeln!(text, "{name} {}", self.repairs.load(Ordering::Relaxed));
    }
}
