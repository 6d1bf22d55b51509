//! Metrics of this machine, measured on request and at no other time ([`crate::metrics`] lists them).
//!
//! ```text
//! collect ─┬─ files of /proc and /sys, off the event loop ─────────────┐
//!          ├─ statvfs(3), each file system by itself, with a deadline ─├──▶ limit on series ──▶ samples
//!          └─ systemd, over D-Bus, with a deadline ────────────────────┘
//! ```
//!
//! A value that is missing, truncated or implausible is left out, and never reported as zero. To add a metric: its
//! row in [`crate::metrics::table`], its parser in the file of its subject, and the call of that below.

mod disks;
pub(in crate::guest) mod file_systems;
mod gpus;
mod machine;
mod network;
mod room;
mod sensors;
mod systemd;
mod units;

use std::sync::Arc;
use std::time::Duration;

use nix::unistd::{SysconfVar, sysconf};
use tokio::sync::Mutex;

use crate::guest::Guest;
use crate::guest::disks::identity::KnownDisk;
use crate::metrics::{Family, Sample, table};
use crate::sys::clock;
use crate::sys::root::Root;

/// Deadline for reading files of /proc and /sys: some sensors and disks answer slowly.
const DEADLINE: Duration = Duration::from_secs(3);
/// Maximum number of bytes read from a file.
const MOST_BYTES: u64 = 1 << 20;

/// Error: the kernel does not answer. What an earlier call has begun is still under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the kernel has not answered within {} s", DEADLINE.as_secs())]
pub struct Silent;

/// Collector of metrics; the state that it keeps between measurements is bounded.
#[derive(Debug, Default)]
pub struct Collector {
    /// Locked while files are read: if a read hangs, later calls wait for it instead of beginning another one.
    units: Arc<Mutex<units::Before>>,
    file_systems: file_systems::Prober,
    systemd: systemd::Systemd,
}

/// Things of one kind with the series of each, the most important things first.
type Things = Vec<Vec<Sample>>;

/// Results of reading the files.
struct Read {
    samples: Vec<Sample>,
    disks: Things,
    interfaces: Things,
    units: Things,
    sensors: Things,
    gpus: Things,
    mounts: Vec<file_systems::Probed>,
}

impl Collector {
    /// Measures this machine now, and returns at most `most` samples.
    ///
    /// # Errors
    /// If files of /proc and /sys cannot be read before the deadline.
    pub async fn collect(&self, guest: &Guest, most: usize) -> Result<Vec<Sample>, Silent> {
        let (files, failed) = tokio::join!(self.files(guest), self.systemd.failed(&guest.root));
        let Read { mut samples, disks, interfaces, units, sensors, gpus, mounts } = files?;
        put(&mut samples, &table::FROZEN, &[], flag(guest.freezer.restricts()));
        let (file_systems, unresponsive) = self.file_systems.measure(&guest.root, mounts).await;
        put(&mut samples, &table::UNRESPONSIVE, &[], whole(unresponsive));
        let failed = failed.map(|failed| failed.samples(&mut samples)).unwrap_or_default();
        Ok(room::fit(
            samples,
            most,
            [
                ("failed-unit", failed),
                ("filesystem", file_systems),
                ("disk", disks),
                ("interface", interfaces),
                ("unit", units),
                ("sensor", sensors),
                ("gpu", gpus),
            ],
        ))
    }

    async fn files(&self, guest: &Guest) -> Result<Read, Silent> {
        let (root, known) = (guest.root.clone(), guest.disks.all());
        let read = async {
            let mut before = Arc::clone(&self.units).lock_owned().await;
            crate::sys::blocking::attempt(move || read(&root, &known, &mut before)).await
        };
        tokio::time::timeout(DEADLINE, read).await.map_err(|_| Silent)?.map_err(|_| Silent)
    }
}

/// Reads all files. Blocks.
fn read(root: &Root, known: &[Arc<KnownDisk>], before: &mut units::Before) -> Read {
    let mut samples = Vec::new();
    machine::info(root, &mut samples);
    let file = |path: &str| text(root, path);
    let page = system_number(SysconfVar::PAGE_SIZE);
    let tick = system_number(SysconfVar::CLK_TCK);
    if let Some(file) = file("/proc/uptime") {
        machine::uptime(&file, &mut samples);
    }
    if let (Some(file), Some(page)) = (file("/proc/vmstat"), page) {
        machine::vmstat(&file, page, &mut samples);
    }
    if let Some(file) = file("/proc/meminfo") {
        machine::meminfo(&file, &mut samples);
    }
    for resource in machine::RESOURCES {
        if let Some(file) = file(&format!("/proc/pressure/{resource}")) {
            machine::pressure(&file, resource, &mut samples);
        }
    }
    if let Some(file) = file("/proc/loadavg") {
        machine::load(&file, &mut samples);
    }
    if let (Some(file), Some(tick)) = (file("/proc/stat"), tick) {
        machine::stat(&file, tick, &mut samples);
    }
    if let Some(file) = file("/proc/sys/fs/file-nr") {
        machine::files(&file, &mut samples);
    }
    for (name, family) in [("count", &table::CONNTRACK), ("max", &table::CONNTRACK_MAX)] {
        let number = file(&format!("/proc/sys/net/netfilter/nf_conntrack_{name}"));
        if let Some(number) = number.and_then(|number| number.trim().parse::<u64>().ok()) {
            put(&mut samples, family, &[], whole(number));
        }
    }
    if root.is_the_machine() {
        clock(&mut samples);
    }
    let has_device = |directory: &str, name: &str| {
        let name = name.replace('/', "!");
        !name.starts_with('.') && root.path(&format!("{directory}/{name}/device")).exists()
    };
    let statistics = file("/proc/diskstats").unwrap_or_default();
    let interfaces = file("/proc/net/dev").unwrap_or_default();
    let serial_of = |name: &str| {
        let disk = known.iter().find(|disk| disk.name == name)?;
        disks::serial(&disk.serials)
    };
    Read {
        samples,
        disks: disks::samples(&statistics, |name| has_device("/sys/block", name), serial_of),
        interfaces: network::samples(&interfaces, |name| has_device("/sys/class/net", name)),
        units: units::samples(root, before),
        sensors: sensors::samples(root),
        gpus: gpus::samples(root),
        mounts: file_systems::mounts(root).unwrap_or_default(),
    }
}

fn clock(samples: &mut Vec<Sample>) {
    let Ok(state) = clock::discipline() else { return };
    put(samples, &table::CLOCK_SYNCHRONIZED, &[], flag(state.is_synchronized));
    put(samples, &table::CLOCK_OFFSET, &[], state.offset);
    put(samples, &table::CLOCK_MAX_ERROR, &[], state.max_error);
}

/// Returns the text of a file, or `None` if it cannot be read or is too long: a value missing from a truncated
/// text would seem not to exist.
fn text(root: &Root, path: &str) -> Option<String> {
    root.read_at_most(path, MOST_BYTES).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the entries of a directory whose names are this prefix and a number, such as `hwmon3`: at most `most` of
/// them, those with the lowest numbers.
fn numbered(root: &Root, directory: &str, prefix: &str, most: usize) -> Vec<String> {
    let all = std::fs::read_dir(root.path(directory)).into_iter().flatten().flatten();
    let number =
        |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_prefix(prefix)?.parse::<u32>().ok();
    let mut numbers: Vec<_> = all.filter_map(number).collect();
    numbers.sort_unstable();
    numbers.truncate(most);
    numbers.into_iter().map(|number| format!("{prefix}{number}")).collect()
}

fn system_number(name: SysconfVar) -> Option<u64> {
    sysconf(name).ok().flatten().and_then(|number| u64::try_from(number).ok()).filter(|number| *number > 0)
}

fn put(samples: &mut Vec<Sample>, family: &'static Family, labels: &[&str], value: f64) {
    samples.push(Sample::new(family, labels, value));
}

/// Converts a whole number to the type of samples; from 2^53 on it is rounded.
#[allow(clippy::cast_precision_loss, reason = "nothing that is measured is known that exactly")]
fn whole(number: u64) -> f64 {
    number as f64
}

fn flag(is_so: bool) -> f64 {
    f64::from(u8::from(is_so))
}

#[cfg(test)]
use tests::told;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{MOST_OF_GUEST, check};

    /// Formats samples as `name labels value`, for tests of parsers.
    pub fn told(samples: &[Sample]) -> Vec<String> {
        let one = |sample: &Sample| {
            let labels = sample.labels.iter().map(String::as_str);
            let words: Vec<_> = std::iter::once(sample.family.name).chain(labels).collect();
            format!("{} {}", words.join(" "), sample.value)
        };
        samples.iter().map(one).collect()
    }

    #[tokio::test]
    async fn an_empty_tree_says_next_to_nothing_and_no_zeros() {
        let folder = tempfile::tempdir().unwrap();
        let guest = Guest { root: Root::at(folder.path()), ..Guest::default() };
        let samples = Collector::default().collect(&guest, MOST_OF_GUEST).await.unwrap();
        let names: Vec<_> = samples.iter().map(|sample| sample.family.name).collect();
        assert!(
            names
                .iter()
                .all(|name| ["info", "filesystems_frozen", "filesystems_unresponsive", "left_out"]
                    .contains(name)),
            "{names:?}"
        );
    }

    #[tokio::test]
    async fn this_machine_has_what_every_machine_has_within_the_room_that_there_is() {
        let guest = Guest::default();
        let collector = Collector::default();
        let first = collector.collect(&guest, MOST_OF_GUEST).await.unwrap();
        let second = collector.collect(&guest, MOST_OF_GUEST).await.unwrap();
        for samples in [&first, &second] {
            assert!(samples.len() <= MOST_OF_GUEST, "{}", samples.len());
            for family in [&table::MEMORY_TOTAL, &table::UPTIME, &table::LOAD_1, &table::CPU, &table::CPUS] {
                assert!(
                    samples.iter().any(|sample| sample.family == family && sample.value >= 0.0),
                    "{}",
                    family.name
                );
            }
            let message = crate::metrics::message(samples);
            assert_eq!(check::clean(message.clone()), message, "a host half believes all of it");
        }
    }
}
