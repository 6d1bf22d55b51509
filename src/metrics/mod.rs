//! The metrics of guests: which there are ([`table`]), what of a guest's answer is believed ([`check`]), how Prometheus reads it
//! ([`exposition`]), what has changed between two answers ([`change`]), what is kept of the last minutes
//! ([`recent`]), and whose the answers of exporters in guests are ([`relabel`]). Pure, and of both ends: agents measure, host halves and guestctl show.
//!
//! To add a metric: its row in the table, where the agent measures it (`guest::metrics`), and docs/metrics.md, which a test writes.

pub mod change;
pub mod check;
pub mod exposition;
pub mod recent;
pub mod relabel;
pub mod table;

use crate::wire::proto::v1::{CollectMetricsResponse, MetricFamily, MetricSample};

/// What the names of all metrics begin with.
pub const PREFIX: &str = "guestlet_guest_";
/// Most series of one guest, those included that the host half adds.
pub const MOST_SERIES: usize = 150;
/// Most of them that are the guest's own.
pub const MOST_OF_GUEST: usize = 148;
/// Of these, the series that are kept free for what the VM's hypervisor measures, where it is asked: all but its disks, which have what the
/// guest leaves. What a guest says of itself is not dropped for what others say of it.
pub const ROOM_OF_HYPERVISOR: usize = 7;
/// Longest value of a label, in bytes.
pub const MAX_LABEL: usize = 128;

/// What kind of numbers a metric has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Goes up and down.
    Gauge,
    /// Only goes up, and starts anew when the guest does.
    Counter,
}

impl Kind {
    /// As Prometheus writes it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
        }
    }
}

/// One metric.
#[derive(Debug, PartialEq, Eq)]
pub struct Family {
    /// Without [`PREFIX`] and the `_total` of counters.
    pub name: &'static str,
    /// What kind of numbers.
    pub kind: Kind,
    /// The unit, which the name ends with; empty if it has none.
    pub unit: &'static str,
    /// Its labels beside `vm`.
    pub labels: &'static [&'static str],
    /// What it tells.
    pub help: &'static str,
    /// Where the agent reads it; empty if the host half makes it.
    pub source: &'static str,
}

impl Family {
    /// The name of its samples in full.
    pub fn full_name(&self) -> String {
        let total = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("{PREFIX}{}{total}", self.name)
    }

    /// The guest measures it.
    pub fn is_of_guest(&self) -> bool {
        !self.source.is_empty()
    }
}

/// A value that was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Of what.
    pub family: &'static Family,
    /// The values of its labels.
    pub labels: Vec<String>,
    /// The value.
    pub value: f64,
}

impl Sample {
    /// One with these values of its labels, as far as those may be shown.
    pub fn new(family: &'static Family, labels: &[&str], value: f64) -> Self {
        Self { family, labels: labels.iter().map(|text| check::label(text)).collect(), value }
    }
}

/// Samples as they are sent: each family once, in the order of the table.
pub fn message(samples: &[Sample]) -> CollectMetricsResponse {
    let family = |family: &&'static Family| {
        let of_it = samples.iter().filter(|sample| std::ptr::eq(sample.family, *family));
        let samples: Vec<_> =
            of_it.map(|one| MetricSample { labels: one.labels.clone(), value: one.value }).collect();
        (!samples.is_empty()).then(|| MetricFamily { name: family.name.to_owned(), samples })
    };
    CollectMetricsResponse { families: table::FAMILIES.iter().filter_map(family).collect() }
}
