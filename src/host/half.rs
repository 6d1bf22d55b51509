//! This run of the host half: its name to guests, and its counters.

use std::time::SystemTime;

use super::metrics::Metrics;
use crate::wire::proto::v1::HostHalf;

/// What every session shares.
#[derive(Debug)]
pub struct Half {
    /// How guests know this run from any other.
    pub host: HostHalf,
    /// When it began.
    pub started: SystemTime,
    /// What it counts.
    pub metrics: Metrics,
}

impl Half {
    /// A new run on the host of this name.
    pub fn new(host_name: String) -> Self {
        let instance_id = format!("{:032x}", fastrand::u128(..));
        Self {
            host: HostHalf { instance_id, host_name },
            started: SystemTime::now(),
            metrics: Metrics::default(),
        }
    }
}
