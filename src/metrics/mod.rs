//! Metrics of guests: the [`table`] of them, the [`check`] of a guest's answer, the [`exposition`] for Prometheus,
//! the [`change`] between two answers, the [`recent`] history, and [`relabel`] for answers from exporters in
//! guests. Pure, and used on both ends: agents measure, host halves and guestctl display.
//!
//! To add a metric: its row in the table, its measurement in the agent (`guest::metrics`), and docs/metrics.md,
//! which a test writes.

pub mod change;
pub mod check;
pub mod exposition;
pub mod recent;
pub mod relabel;
pub mod table;

use crate::wire::proto::v1::{CollectMetricsResponse, MetricFamily, MetricSample};

/// Prefix of the names of all metrics.
pub const PREFIX: &str = "guestlet_guest_";
/// Maximum number of series of one guest, including those that the host half adds.
pub const MOST_SERIES: usize = 150;
/// Maximum number of series from the guest itself.
pub const MOST_OF_GUEST: usize = 148;
/// Series of the guest that are reserved for values from the VM's hypervisor, where the host half queries it. Only
/// the values of its disks are not included: they get what the guest leaves. The reservation keeps values that a
/// guest reports of itself from being dropped in favour of those that others report of it.
pub const ROOM_OF_HYPERVISOR: usize = 7;
/// Maximum length of a label's value, in bytes.
pub const MAX_LABEL: usize = 128;

/// Type of a metric in Prometheus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Value that goes up and down.
    Gauge,
    /// Value that only increases, and starts again from 0 when the guest boots.
    Counter,
}

impl Kind {
    /// Returns the type's name in Prometheus.
    pub fn word(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
        }
    }
}

/// Metric family: a row of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Family {
    /// Name without [`PREFIX`], and without the `_total` of counters.
    pub name: &'static str,
    /// Gauge or counter.
    pub kind: Kind,
    /// Unit, which is also the suffix of the name; empty if there is none.
    pub unit: &'static str,
    /// Names of the labels, without `vm`.
    pub labels: &'static [&'static str],
    /// Help text.
    pub help: &'static str,
    /// Files or system calls that the agent reads it from; empty if the host half provides it.
    pub source: &'static str,
}

impl Family {
    /// Returns the full name of its samples.
    pub fn full_name(&self) -> String {
        let total = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("{PREFIX}{}{total}", self.name)
    }

    /// Returns whether the guest measures it.
    pub fn is_of_guest(&self) -> bool {
        !self.source.is_empty()
    }
}

/// Measured value of a family.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Family that the value belongs to.
    pub family: &'static Family,
    /// Values of its labels, in the order of the family's labels.
    pub labels: Vec<String>,
    /// Measured value, in the unit of the family.
    pub value: f64,
}

impl Sample {
    /// Creates a sample with these values of its labels, which are cleaned for display.
    pub fn new(family: &'static Family, labels: &[&str], value: f64) -> Self {
        Self { family, labels: labels.iter().map(|text| check::label(text)).collect(), value }
    }
}

/// Groups samples for sending: each family once, in the order of the table.
pub fn message(samples: &[Sample]) -> CollectMetricsResponse {
    let family = |family: &&'static Family| {
        let of_it = samples.iter().filter(|sample| std::ptr::eq(sample.family, *family));
        let samples: Vec<_> =
            of_it.map(|one| MetricSample { labels: one.labels.clone(), value: one.value }).collect();
        (!samples.is_empty()).then(|| MetricFamily { name: family.name.to_owned(), samples })
    };
    CollectMetricsResponse { families: table::FAMILIES.iter().filter_map(family).collect() }
}
