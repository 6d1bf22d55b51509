//! Present load of a guest, calculated from two consecutive answers. Pure.

use serde::Serialize;

use super::Sort;
use crate::metrics::change::{Counters, samples, value};
use crate::metrics::{Family, table};
use crate::wire::proto::v1::{CollectMetricsResponse, MetricSample, RecentMetrics};

/// Figures shown for a guest; unknown ones are `None`.
#[derive(Debug, Clone, PartialEq, Serialize, Default)]
pub struct Figures {
    /// Name of the VM.
    pub name: String,
    /// True if the guest has answered.
    pub answers: bool,
    /// Number of online processors.
    pub cpus: Option<f64>,
    /// Share of the time of all processors in which they were busy, or taken by the host.
    pub cpu_ratio: Option<f64>,
    /// Memory that is not available to programs.
    pub memory_used_bytes: Option<f64>,
    /// Total memory.
    pub memory_total_bytes: Option<f64>,
    /// Share of the time in which a task waited for a processor.
    pub waiting_cpu_ratio: Option<f64>,
    /// Share of the time in which a task waited for memory.
    pub waiting_memory_ratio: Option<f64>,
    /// Share of the time in which a task waited for disks.
    pub waiting_io_ratio: Option<f64>,
    /// Bytes read from all disks together.
    pub disk_read_bytes_per_second: Option<f64>,
    /// Bytes written to all disks together.
    pub disk_written_bytes_per_second: Option<f64>,
    /// Bytes received on all interfaces together.
    pub network_received_bytes_per_second: Option<f64>,
    /// Bytes sent on all interfaces together.
    pub network_sent_bytes_per_second: Option<f64>,
    /// Used share of the fullest file system.
    pub fullest_ratio: Option<f64>,
    /// Mount point of the fullest file system.
    pub fullest_mount_point: Option<String>,
    /// Number of failed systemd units.
    pub units_failed: Option<f64>,
    /// Load in the last minutes.
    #[serde(skip)]
    pub recent: Option<RecentMetrics>,
}

/// Returns the increase of a counter, summed over all labels that both answers have; `None` if there are
/// none, or a counter was reset.
fn more(before: &CollectMetricsResponse, now: &CollectMetricsResponse, family: &Family) -> Option<f64> {
    let mut sum = None;
    for sample in samples(now, family) {
        let labels: Vec<_> = sample.labels.iter().map(String::as_str).collect();
        let Some(then) = value(before, family, &labels) else { continue };
        if sample.value < then {
            return None;
        }
        *sum.get_or_insert(0.0) += sample.value - then;
    }
    sum
}

impl Figures {
    /// Calculates the figures of the guest of the VM of this name, from its previous and its present answer.
    pub fn of(
        name: &str,
        before: Option<&CollectMetricsResponse>,
        now: Option<&CollectMetricsResponse>,
    ) -> Self {
        let mut figures = Self { name: name.to_owned(), answers: now.is_some(), ..Self::default() };
        let Some(now) = now else { return figures };
        figures.cpus = value(now, &table::CPUS, &[]);
        figures.memory_total_bytes = value(now, &table::MEMORY_TOTAL, &[]);
        let available = value(now, &table::MEMORY_AVAILABLE, &[]);
        figures.memory_used_bytes =
            figures.memory_total_bytes.zip(available).map(|(total, available)| (total - available).max(0.0));
        figures.units_failed = value(now, &table::UNITS_FAILED, &[]);
        if let Some((ratio, mount_point)) = fullest(now) {
            figures.fullest_ratio = Some(ratio);
            figures.fullest_mount_point = Some(mount_point);
        }
        if let Some(before) = before {
            figures.since(before, now);
        }
        figures
    }

    /// Calculates the rates since the previous answer.
    fn since(&mut self, before: &CollectMetricsResponse, now: &CollectMetricsResponse) {
        let counters = Counters::of(now).zip(Counters::of(before));
        let Some(change) = counters.and_then(|(now, before)| now.since(&before)) else { return };
        let rate = |family| more(before, now, family).map(|more| more / change.seconds);
        self.disk_read_bytes_per_second = rate(&table::DISK_READ_BYTES);
        self.disk_written_bytes_per_second = rate(&table::DISK_WRITTEN_BYTES);
        self.network_received_bytes_per_second = rate(&table::NET_RECEIVED);
        self.network_sent_bytes_per_second = rate(&table::NET_SENT);
        [self.waiting_cpu_ratio, self.waiting_memory_ratio, self.waiting_io_ratio] = change.waiting;
        self.cpu_ratio = change.cpu_ratio;
    }

    fn rank(&self, sort: Sort) -> f64 {
        let all = |figures: &[Option<f64>]| figures.iter().flatten().sum::<f64>();
        match sort {
            Sort::Name => Some(0.0),
            Sort::Cpu => self.cpu_ratio.zip(self.cpus).map(|(ratio, cpus)| ratio * cpus),
            Sort::Memory => self.memory_ratio(),
            Sort::Pressure => self.waiting_ratio(),
            Sort::Disk => Some(all(&[self.disk_read_bytes_per_second, self.disk_written_bytes_per_second])),
            Sort::Network => {
                Some(all(&[self.network_received_bytes_per_second, self.network_sent_bytes_per_second]))
            }
            Sort::Full => self.fullest_ratio,
        }
        .unwrap_or(-1.0)
    }

    /// Returns the largest of the shares of time in which tasks waited.
    pub fn waiting_ratio(&self) -> Option<f64> {
        let all = [self.waiting_cpu_ratio, self.waiting_memory_ratio, self.waiting_io_ratio];
        all.into_iter().flatten().reduce(f64::max)
    }

    /// Returns the used share of the memory.
    pub fn memory_ratio(&self) -> Option<f64> {
        let total = self.memory_total_bytes.filter(|total| *total > 0.0)?;
        self.memory_used_bytes.map(|used| used / total)
    }
}

/// Returns the fullest file system that is writable.
fn fullest(answer: &CollectMetricsResponse) -> Option<(f64, String)> {
    let used = |size: &MetricSample| {
        let labels: Vec<_> = size.labels.iter().map(String::as_str).collect();
        let available = value(answer, &table::FS_AVAILABLE, &labels)?;
        let can_be_written = value(answer, &table::FS_READ_ONLY, &labels).is_none_or(|flag| flag < 0.5);
        let ratio =
            (can_be_written && size.value > 0.0).then(|| (1.0 - available / size.value).clamp(0.0, 1.0))?;
        Some((ratio, size.labels.first()?.clone()))
    };
    let all = samples(answer, &table::FS_SIZE).iter().filter_map(used);
    all.reduce(|one, other| if other.0 > one.0 { other } else { one })
}

/// Sorts guests in descending order of a figure, and by name where it is equal.
pub fn sort(all: &mut [Figures], by: Sort) {
    all.sort_by(|one, other| other.rank(by).total_cmp(&one.rank(by)).then_with(|| one.name.cmp(&other.name)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Sample, message};

    fn answer(rows: &[(&'static Family, &[&str], f64)]) -> CollectMetricsResponse {
        let all = rows.iter().map(|&(family, labels, value)| Sample::new(family, labels, value));
        message(&all.collect::<Vec<_>>())
    }

    #[test]
    fn rates_are_of_the_time_that_has_passed_in_the_guest() {
        let at = |time: f64, boot| {
            answer(&[
                (&table::INFO, &[boot, "6.1"], 1.0),
                (&table::UPTIME, &[], 100.0 + time),
                (&table::CPUS, &[], 2.0),
                (&table::CPU, &["user"], time),
                (&table::CPU, &["idle"], 50.0 + time * 0.75),
                (&table::CPU, &["iowait"], time * 0.25),
                (&table::PRESSURE_WAITING, &["io"], time / 2.0),
                (&table::DISK_READ_BYTES, &["vda"], 1000.0 * time),
                (&table::DISK_READ_BYTES, &["vdb"], 500.0 * time),
                (&table::MEMORY_TOTAL, &[], 100.0),
                (&table::MEMORY_AVAILABLE, &[], 40.0),
                (&table::FS_SIZE, &["/", "ext4"], 10.0),
                (&table::FS_AVAILABLE, &["/", "ext4"], 9.0),
                (&table::FS_SIZE, &["/data", "xfs"], 10.0),
                (&table::FS_AVAILABLE, &["/data", "xfs"], 1.0),
                (&table::FS_SIZE, &["/iso", "xfs"], 10.0),
                (&table::FS_AVAILABLE, &["/iso", "xfs"], 0.0),
                (&table::FS_READ_ONLY, &["/iso", "xfs"], 1.0),
            ])
        };
        let (then, now) = (at(0.0, "a"), at(4.0, "a"));
        let figures = Figures::of("web", Some(&then), Some(&now));
        let expected = Figures {
            name: "web".into(),
            answers: true,
            cpus: Some(2.0),
            cpu_ratio: Some(0.5),
            memory_used_bytes: Some(60.0),
            memory_total_bytes: Some(100.0),
            waiting_io_ratio: Some(0.5),
            disk_read_bytes_per_second: Some(1500.0),
            fullest_ratio: Some(0.9),
            fullest_mount_point: Some("/data".into()),
            ..Figures::default()
        };
        assert_eq!(figures, expected);
        // Counters of another boot, or counters that went back, are not comparable.
        for before in [at(0.0, "b"), at(8.0, "a")] {
            let figures = Figures::of("web", Some(&before), Some(&now));
            assert_eq!((figures.cpu_ratio, figures.disk_read_bytes_per_second), (None, None));
        }
        assert_eq!(Figures::of("x", Some(&then), None), Figures { name: "x".into(), ..Figures::default() });
    }

    #[test]
    fn those_that_say_nothing_come_last() {
        let one = |name: &str, cpu_ratio| Figures {
            name: name.into(),
            cpu_ratio,
            cpus: Some(1.0),
            ..Figures::default()
        };
        let mut all = [one("a", None), one("c", Some(0.2)), one("b", Some(0.2)), one("d", Some(0.9))];
        sort(&mut all, Sort::Cpu);
        assert_eq!(all.each_ref().map(|one| one.name.as_str()), ["d", "b", "c", "a"]);
        sort(&mut all, Sort::Name);
        assert_eq!(all.each_ref().map(|one| one.name.as_str()), ["a", "b", "c", "d"]);
    }
}
