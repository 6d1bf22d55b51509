//! Load balancers of clusters, and what is forwarded for them.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::head;

/// What load balancers are, in the order in which they are counted.
const STATES: [&str; 3] = ["ready", "pending", "failed"];

/// How many there are of each state.
pub type Counts = [u64; STATES.len()];

/// Load balancers and the rules by which the kernel forwards.
#[derive(Debug, Default)]
pub struct Balancers {
    counts: [AtomicU64; STATES.len()],
    /// How often somebody else had changed the rules.
    pub repairs: AtomicU64,
    /// What is to be forwarded is not.
    pub is_failing: AtomicBool,
}

impl Balancers {
    /// There are so many now: ready, pending and failed ones.
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
