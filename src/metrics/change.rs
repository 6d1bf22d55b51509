//! Change between two successive answers of a guest: what they say about the time between them. Pure.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::{Family, table};
use crate::wire::proto::v1::{CollectMetricsResponse, MetricSample};

/// Resources that tasks may wait for, in the order of [`Counters`] and [`Change`].
const RESOURCES: [&str; 3] = ["cpu", "memory", "io"];

/// Returns the samples of a family.
pub fn samples<'a>(answer: &'a CollectMetricsResponse, family: &Family) -> &'a [MetricSample] {
    let found = answer.families.iter().find(|found| found.name == family.name);
    found.map_or(&[], |found| &found.samples)
}

/// Returns the value of the sample with these labels.
pub fn value(answer: &CollectMetricsResponse, family: &Family, labels: &[&str]) -> Option<f64> {
    samples(answer, family).iter().find(|sample| sample.labels == labels).map(|sample| sample.value)
}

/// Returns the fraction of the memory that is not available to programs.
pub fn memory_used_ratio(answer: &CollectMetricsResponse) -> Option<f64> {
    let total = value(answer, &table::MEMORY_TOTAL, &[]).filter(|total| *total > 0.0)?;
    let available = value(answer, &table::MEMORY_AVAILABLE, &[])?;
    Some((1.0 - available / total).clamp(0.0, 1.0))
}

/// Values of an answer that are compared with those of another one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Counters {
    /// Hash that identifies the boot: counters of different boots are not compared.
    boot: u64,
    uptime: f64,
    /// Time of all processors, and the part of it in which they were idle.
    cpu: Option<(f64, f64)>,
    waiting: [Option<f64>; RESOURCES.len()],
}

/// Difference between the counters of two answers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    /// Time between the two answers, by the guest's clock.
    pub seconds: f64,
    /// Fraction of the time of all processors in which they were busy, or were stolen by the host.
    pub cpu_ratio: Option<f64>,
    /// Fraction of the time in which a task waited for a processor, for memory or for a disk.
    pub waiting: [Option<f64>; RESOURCES.len()],
}

impl Counters {
    /// Reads the counters of an answer; none if it has no uptime.
    pub fn of(answer: &CollectMetricsResponse) -> Option<Self> {
        let uptime = value(answer, &table::UPTIME, &[])?;
        let mut boot = DefaultHasher::new();
        samples(answer, &table::INFO).first().map(|sample| &sample.labels).hash(&mut boot);
        let cpu = samples(answer, &table::CPU);
        let is_idle = |sample: &&MetricSample| sample.labels == ["idle"] || sample.labels == ["iowait"];
        let all = cpu.iter().map(|sample| sample.value).sum::<f64>();
        let idle = cpu.iter().filter(is_idle).map(|sample| sample.value).sum::<f64>();
        let cpu = (!cpu.is_empty()).then_some((all, idle));
        let waiting = RESOURCES.map(|resource| value(answer, &table::PRESSURE_WAITING, &[resource]));
        Some(Self { boot: boot.finish(), uptime, cpu, waiting })
    }

    /// Returns whether both are from the same boot.
    pub fn is_same_boot(&self, other: &Self) -> bool {
        self.boot == other.boot
    }

    /// Returns the change since `before`; none if the guest was booted in between, or no time has passed.
    pub fn since(&self, before: &Self) -> Option<Change> {
        let seconds = self.uptime - before.uptime;
        if !self.is_same_boot(before) || seconds <= 0.0 {
            return None;
        }
        let more = |now: f64, then: f64| (now >= then).then_some(now - then);
        let cpu_ratio = self.cpu.zip(before.cpu).and_then(|((all, idle), (all_then, idle_then))| {
            let all = more(all, all_then).filter(|all| *all > 0.0)?;
            Some((1.0 - more(idle, idle_then)? / all).clamp(0.0, 1.0))
        });
        let mut waiting = [None; RESOURCES.len()];
        for ((ratio, now), then) in waiting.iter_mut().zip(self.waiting).zip(before.waiting) {
            *ratio = now.zip(then).and_then(|(now, then)| Some((more(now, then)? / seconds).min(1.0)));
        }
        Some(Change { seconds, cpu_ratio, waiting })
    }
}

impl Change {
    /// Returns the fraction of the time spent waiting for the resource that was waited for most.
    pub fn waiting_most(&self) -> Option<f64> {
        self.waiting.into_iter().flatten().reduce(f64::max)
    }
}
