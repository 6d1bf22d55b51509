//! Metrics of the host half, and their rendering for Prometheus (text format 0.0.4). [`scrape`](super::scrape)
//! serves them, together with the metrics of guests.
//!
//! To add a counter: a field, where it counts, and its line in [`render`].

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub mod balancers;
pub mod exporters;
pub mod gathered;
pub mod operations;

/// Current numbers of VMs and sessions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// All VMs.
    pub vms: usize,
    /// VMs with an open session.
    pub connected: usize,
    /// VMs whose session is being established.
    pub connecting: usize,
    /// VMs whose guest is refused.
    pub refused: usize,
    /// VMs that are off.
    pub gone: usize,
    /// VMs that have no vsock, so no agent can be reached.
    pub no_vsock: usize,
    /// Open callbacks of guests.
    pub callbacks: usize,
    /// VMs that are paused because a disk could not be read or written.
    pub stopped: usize,
}

/// Space for the volumes of a class, as last determined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// The name of the class.
    pub class: String,
    /// Total and free bytes; `None` while the pool cannot be used.
    pub bytes: Option<(u64, u64)>,
}

/// Counters since the host half started. They are atomic, so counting never blocks a session.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Attempts to dial, for sessions and for streams beside them.
    pub dials: AtomicU64,
    /// Attempts to dial that failed.
    pub dial_failures: AtomicU64,
    /// Sessions opened.
    pub sessions: AtomicU64,
    /// Sessions and guests refused.
    pub refusals: AtomicU64,
    /// Events of guests, heartbeats included.
    pub events: AtomicU64,
    /// Events of guests that were lost.
    pub missed_events: AtomicU64,
    /// Calls of guests to this host half.
    pub callback_calls: AtomicU64,
    /// Calls of the admin API that were denied.
    pub denied_calls: AtomicU64,
    /// Audit records that could not be written to their file.
    pub lost_records: AtomicU64,
    /// Failed requests of the backend to its source of VMs, such as the API server.
    pub backend_failures: AtomicU64,
    /// Bytes received from guests.
    pub bytes_received: AtomicU64,
    /// Bytes sent to guests.
    pub bytes_sent: AtomicU64,
    /// Ended freezes of guests, by reason.
    pub freezes: Freezes,
    /// Receipts of these freezes, by consistency level.
    pub receipts: Receipts,
    /// I/O requests of disks that failed on the host.
    pub io_errors: IoErrors,
    /// Load balancers of clusters.
    pub balancers: balancers::Balancers,
    /// Requests for the metrics of guests, by outcome.
    pub gathered: gathered::Gathered,
    /// Requests to exporters in guests, by outcome.
    pub exporters: exporters::Exporters,
    /// Time from the dial to the open session.
    pub connect: Histogram,
    /// Operations on volumes, by outcome, and their duration.
    pub volumes: operations::Volumes,
    /// Calls to hypervisors, by outcome, and their duration.
    pub hypervisors: operations::Hypervisors,
}

/// Reasons for the end of a freeze, as guests report them. Any other reason counts as the last one.
const ENDS: [&str; 7] = ["asked", "deadline", "person", "crash", "hang", "failed", "other"];

/// Counters of ended freezes, by the reason for their end.
#[derive(Debug, Default)]
pub struct Freezes([AtomicU64; ENDS.len()]);

impl Freezes {
    /// Counts one more ended freeze.
    pub fn ended(&self, word: &str) {
        let place = ENDS.iter().position(|end| *end == word).unwrap_or(ENDS.len() - 1);
        self.0[place].fetch_add(1, Ordering::Relaxed);
    }

    fn render(&self, text: &mut String, name: &str) {
        for (end, count) in ENDS.iter().zip(&self.0) {
            let _ = writeln!(text, "{name}{{end=\"{end}\"}} {}", count.load(Ordering::Relaxed));
        }
    }
}

/// Consistency levels of snapshots, as the receipts of guests name them.
const LEVELS: [&str; 3] = ["crash", "filesystem", "application"];

/// Counters of receipts of freezes, by consistency level. A freeze without a receipt is not counted.
#[derive(Debug, Default)]
pub struct Receipts([AtomicU64; LEVELS.len()]);

impl Receipts {
    /// Counts one more receipt of this level. An unknown level is not counted.
    pub fn add(&self, level: &str) {
        if let Some(place) = LEVELS.iter().position(|known| *known == level) {
            self.0[place].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn render(&self, text: &mut String) {
        let name = "guestlet_host_receipts_total";
        head(text, name, "counter", "Receipts of freezes of guests, by the consistency that they prove.");
        for (level, count) in LEVELS.iter().zip(&self.0) {
            let _ = writeln!(text, "{name}{{level=\"{level}\"}} {}", count.load(Ordering::Relaxed));
        }
    }
}

/// Counters of disk requests that failed on the host: for lack of space, and for other reasons.
#[derive(Debug, Default)]
pub struct IoErrors([AtomicU64; 2]);

impl IoErrors {
    /// Counts `count` more failed requests; `no_space` says whether for want of space on the host.
    pub fn add(&self, no_space: bool, count: u64) {
        self.0[usize::from(!no_space)].fetch_add(count, Ordering::Relaxed);
    }

    fn render(&self, text: &mut String) {
        let name = "guestlet_host_disk_errors_total";
        head(text, name, "counter", "Failed I/O requests of VMs' disks on the host, by reason.");
        for (reason, count) in ["no-space", "other"].iter().zip(&self.0) {
            let _ = writeln!(text, "{name}{{reason=\"{reason}\"}} {}", count.load(Ordering::Relaxed));
        }
    }
}

/// Upper bounds of all buckets but the last, in seconds.
const BUCKETS: [f64; 10] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0];

/// Histogram of durations.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS.len() + 1],
    microseconds: AtomicU64,
}

impl Histogram {
    /// Counts one more duration.
    pub fn observe(&self, time: Duration) {
        let seconds = time.as_secs_f64();
        let place = BUCKETS.iter().position(|bound| seconds <= *bound).unwrap_or(BUCKETS.len());
        self.buckets[place].fetch_add(1, Ordering::Relaxed);
        let microseconds = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.microseconds.fetch_add(microseconds, Ordering::Relaxed);
    }

    fn render(&self, text: &mut String, name: &str) {
        self.render_with(text, name, "");
    }

    /// Renders the histogram with a label, given as `name="value"`.
    fn render_with(&self, text: &mut String, name: &str, label: &str) {
        let mut sum = 0;
        let comma = if label.is_empty() { "" } else { "," };
        for (place, bucket) in self.buckets.iter().enumerate() {
            sum += bucket.load(Ordering::Relaxed);
            let bound = BUCKETS.get(place).map_or("+Inf".to_owned(), f64::to_string);
            let _ = writeln!(text, "{name}_bucket{{{label}{comma}le=\"{bound}\"}} {sum}");
        }
        let seconds = Duration::from_micros(self.microseconds.load(Ordering::Relaxed)).as_secs_f64();
        let labels = if label.is_empty() { String::new() } else { format!("{{{label}}}") };
        let _ = writeln!(text, "{name}_sum{labels} {seconds}\n{name}_count{labels} {sum}");
    }
}

/// Renders all metrics of the host half for Prometheus.
pub fn render(metrics: &Metrics, tally: Tally, rooms: &[Room], uptime: Duration) -> String {
    let mut text = String::new();
    head(&mut text, "guestlet_host_info", "gauge", "The running version.");
    let _ = writeln!(text, "guestlet_host_info{{version=\"{}\"}} 1", crate::VERSION);
    head(&mut text, "guestlet_host_uptime_seconds", "gauge", "Time since the host half started.");
    let _ = writeln!(text, "guestlet_host_uptime_seconds {}", uptime.as_secs_f64());
    head(&mut text, "guestlet_host_virtual_machines", "gauge", "VMs by the state of their sessions.");
    let states = [
        ("connected", tally.connected),
        ("connecting", tally.connecting),
        ("refused", tally.refused),
        ("gone", tally.gone),
        ("no-vsock", tally.no_vsock),
    ];
    for (state, count) in states {
        let _ = writeln!(text, "guestlet_host_virtual_machines{{session=\"{state}\"}} {count}");
    }
    head(&mut text, "guestlet_host_callbacks_open", "gauge", "Callbacks that guests use.");
    let _ = writeln!(text, "guestlet_host_callbacks_open {}", tally.callbacks);
    let name = "guestlet_host_virtual_machines_stopped";
    head(&mut text, name, "gauge", "VMs that are paused because a disk could not be read or written.");
    let _ = writeln!(text, "{name} {}", tally.stopped);
    metrics.io_errors.render(&mut text);
    metrics.balancers.render(&mut text);
    let counters = [
        ("dials", "Attempts to connect to guests.", &metrics.dials),
        ("dial_failures", "Failed attempts to connect to guests.", &metrics.dial_failures),
        ("sessions", "Sessions opened.", &metrics.sessions),
        ("refusals", "Guests refused, and sessions ended by the guest or by its limits.", &metrics.refusals),
        ("events", "Events of guests, heartbeats included.", &metrics.events),
        ("missed_events", "Events of guests that were lost.", &metrics.missed_events),
        ("callback_calls", "Calls of guests.", &metrics.callback_calls),
        ("denied_calls", "Denied calls of the admin API.", &metrics.denied_calls),
        (
            "lost_audit_records",
            "Audit records that could not be written to their file.",
            &metrics.lost_records,
        ),
        ("backend_failures", "Failed requests to a cluster's API server.", &metrics.backend_failures),
        ("received_bytes", "Bytes from guests.", &metrics.bytes_received),
        ("sent_bytes", "Bytes to guests.", &metrics.bytes_sent),
    ];
    for (name, help, counter) in counters {
        let name = format!("guestlet_host_{name}_total");
        head(&mut text, &name, "counter", help);
        let _ = writeln!(text, "{name} {}", counter.load(Ordering::Relaxed));
    }
    let name = "guestlet_host_freezes_ended_total";
    let help = "Ended freezes of guests, by what ended them; any other than asked means that the snapshot is \
                not consistent.";
    head(&mut text, name, "counter", help);
    metrics.freezes.render(&mut text, name);
    metrics.receipts.render(&mut text);
    metrics.gathered.render(&mut text);
    metrics.exporters.render(&mut text);
    let name = "guestlet_host_connect_seconds";
    head(&mut text, name, "histogram", "Time from the attempt to connect to the open session.");
    metrics.connect.render(&mut text, name);
    metrics.volumes.render(&mut text);
    metrics.hypervisors.render(&mut text);
    let name = "guestlet_host_pool_bytes";
    head(&mut text, name, "gauge", "Bytes of pools' file systems; absent for a pool that does not answer.");
    for Room { class, bytes } in rooms {
        let Some((size, free)) = bytes else { continue };
        for (kind, bytes) in [("size", size), ("free", free)] {
            let _ = writeln!(text, "{name}{{class=\"{class}\",kind=\"{kind}\"}} {bytes}");
        }
    }
    let name = "guestlet_host_pool_usable";
    head(
        &mut text,
        name,
        "gauge",
        "Whether a pool can be used: 0 while it does not answer, or was not opened.",
    );
    for Room { class, bytes } in rooms {
        let _ = writeln!(text, "{name}{{class=\"{class}\"}} {}", u8::from(bytes.is_some()));
    }
    text
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_what_prometheus_reads() {
        let metrics = Metrics::default();
        metrics.dials.store(7, Ordering::Relaxed);
        for milliseconds in [1, 3, 30_000] {
            metrics.connect.observe(Duration::from_millis(milliseconds));
        }
        for end in ["deadline", "asked", "deadline", "later"] {
            metrics.freezes.ended(end);
        }
        for level in ["filesystem", "crash", "filesystem", "later", ""] {
            metrics.receipts.add(level);
        }
        let tally = Tally { vms: 4, connected: 2, refused: 1, no_vsock: 1, ..Tally::default() };
        let room = |class: &str, bytes| Room { class: class.into(), bytes };
        let rooms = [room("fast", Some((1 << 40, 7))), room("hung", None)];
        let text = render(&metrics, tally, &rooms, Duration::from_millis(1500));
        for line in [
            "guestlet_host_uptime_seconds 1.5",
            "guestlet_host_virtual_machines{session=\"connected\"} 2",
            "guestlet_host_virtual_machines{session=\"refused\"} 1",
            "# TYPE guestlet_host_dials_total counter",
            "guestlet_host_dials_total 7",
            "guestlet_host_freezes_ended_total{end=\"asked\"} 1",
            "guestlet_host_freezes_ended_total{end=\"deadline\"} 2",
            "guestlet_host_freezes_ended_total{end=\"crash\"} 0",
            "guestlet_host_freezes_ended_total{end=\"other\"} 1",
            "guestlet_host_receipts_total{level=\"crash\"} 1",
            "guestlet_host_receipts_total{level=\"filesystem\"} 2",
            "guestlet_host_receipts_total{level=\"application\"} 0",
            "guestlet_host_connect_seconds_bucket{le=\"0.001\"} 1",
            "guestlet_host_connect_seconds_bucket{le=\"0.005\"} 2",
            "guestlet_host_connect_seconds_bucket{le=\"5\"} 2",
            "guestlet_host_connect_seconds_bucket{le=\"+Inf\"} 3",
            "guestlet_host_connect_seconds_sum 30.004",
            "guestlet_host_connect_seconds_count 3",
            "guestlet_host_pool_bytes{class=\"fast\",kind=\"size\"} 1099511627776",
            "guestlet_host_pool_bytes{class=\"fast\",kind=\"free\"} 7",
            "guestlet_host_pool_usable{class=\"fast\"} 1",
            "guestlet_host_pool_usable{class=\"hung\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let name = name.split('{').next().unwrap();
            assert!(name.starts_with("guestlet_host_") && value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
