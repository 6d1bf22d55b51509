//! Metrics of VMs from their hypervisors, collected in parallel with those of the guests, by the same rules and
//! within the same timeout.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::{FRESH, LITTLE_PATIENCE, PATIENCE};
use crate::host::backends::meters::{Disk, Measured, Meters, Unmeasured};
use crate::metrics::{Sample, check, table};
use crate::wire::proto::v1::PowerState;

/// Number of series of one disk.
const OF_DISK: usize = 6;
const STATES: [(PowerState, &str); 3] =
    [(PowerState::Running, "running"), (PowerState::Paused, "paused"), (PowerState::Off, "off")];

/// Result of the last request.
#[derive(Debug, Default)]
pub(super) struct Last {
    asked: Option<Instant>,
    measured: Option<Arc<Measured>>,
    is_late: bool,
}

/// Returns the hypervisor's current metrics of a VM; `None` if it does not answer or refuses.
pub(super) async fn measured(meters: &dyn Meters, vm: &str, last: &Mutex<Last>) -> Option<Arc<Measured>> {
    let mut last = timeout(PATIENCE, last.lock()).await.ok()?;
    if last.asked.is_some_and(|asked| asked.elapsed() < FRESH) {
        return last.measured.clone();
    }
    let answer = meters.measure(vm, if last.is_late { LITTLE_PATIENCE } else { PATIENCE }).await;
    last.is_late = matches!(answer, Err(Unmeasured::Late));
    last.asked = Some(Instant::now());
    last.measured = match answer {
        Ok(measured) => Some(Arc::new(measured)),
        Err(why) => {
            tracing::debug!(vm, %why, "a hypervisor does not measure a VM");
            None
        }
    };
    last.measured.clone()
}

/// Returns the series of a measurement, at most `room` of them. Without a measurement there are none, except that
/// a VM known to be off is reported as off.
pub(super) fn samples(measured: Option<&Measured>, known: PowerState, room: usize) -> Vec<Sample> {
    let mut samples = Vec::new();
    let mut put = |family, labels: &[&str], value| samples.push(Sample::new(family, labels, value));
    // Values measured just before the VM was switched off are stale.
    let measured = measured.filter(|_| known != PowerState::Off);
    let power = measured.map_or(known, |measured| measured.power);
    if power == PowerState::Unspecified || measured.is_none() && power != PowerState::Off {
        return samples;
    }
    for (state, word) in STATES {
        put(&table::VM_POWER, &[word], f64::from(u8::from(state == power)));
    }
    let Some(measured) = measured else { return samples };
    let values = [
        (&table::VM_CPUS, measured.processors),
        (&table::VM_MEMORY, measured.memory),
        (&table::VM_BALLOON, measured.balloon),
    ];
    for (family, value) in values {
        if let Some(value) = value {
            put(family, &[], number(value));
        }
    }
    // Different names may look the same once they are cleaned, and no series may occur twice.
    let mut names = BTreeSet::new();
    let mut disks: Vec<_> =
        measured.disks.iter().filter(|disk| names.insert(check::label(&disk.name))).collect();
    let with = disks.len();
    disks.truncate(room.saturating_sub(samples.len() + 1) / OF_DISK);
    let left_out = (with - disks.len()).saturating_add(measured.more_disks);
    samples.push(Sample::new(&table::VM_DISKS_LEFT_OUT, &[], number(left_out as u64)));
    samples.extend(disks.into_iter().flat_map(disk));
    samples
}

fn disk(disk: &Disk) -> [Sample; OF_DISK] {
    let Disk { reads, writes, .. } = disk;
    let seconds = |nanoseconds| number(nanoseconds) / 1e9;
    [
        (&table::VM_DISK_READS, number(reads.count)),
        (&table::VM_DISK_WRITES, number(writes.count)),
        (&table::VM_DISK_READ_BYTES, number(reads.bytes)),
        (&table::VM_DISK_WRITTEN_BYTES, number(writes.bytes)),
        (&table::VM_DISK_READ_TIME, seconds(reads.nanoseconds)),
        (&table::VM_DISK_WRITE_TIME, seconds(writes.nanoseconds)),
    ]
    .map(|(family, value)| Sample::new(family, &[&disk.name, &disk.serial], value))
}

#[allow(clippy::cast_precision_loss, reason = "from 2^53 on it is rounded")]
fn number(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::backends::meters::Requests;

    fn told(samples: &[Sample]) -> Vec<String> {
        let one =
            |sample: &Sample| format!("{} {} {}", sample.family.name, sample.labels.join(","), sample.value);
        samples.iter().map(one).collect()
    }

    fn disk(name: &str) -> Disk {
        let requests = |count| Requests { count, bytes: count * 512, nanoseconds: count * 500_000_000 };
        Disk { name: name.into(), serial: "data-1".into(), reads: requests(1), writes: requests(2) }
    }

    #[test]
    fn what_was_measured_is_told_and_what_was_not_is_absent() {
        let measured = Measured {
            power: PowerState::Paused,
            processors: Some(4),
            memory: Some(1 << 30),
            balloon: None,
            disks: vec![disk("a"), disk("a\u{200b}"), disk("a\u{200c}")],
            more_disks: 2,
        };
        let expected = [
            "vm_power_state running 0",
            "vm_power_state paused 1",
            "vm_power_state off 0",
            "vm_cpus  4",
            "vm_memory_bytes  1073741824",
            "vm_disks_left_out  2",
            "vm_disk_reads a,data-1 1",
            "vm_disk_writes a,data-1 2",
            "vm_disk_read_bytes a,data-1 512",
            "vm_disk_written_bytes a,data-1 1024",
            "vm_disk_read_time_seconds a,data-1 0.5",
            "vm_disk_write_time_seconds a,data-1 1",
        ];
        let found = told(&samples(Some(&measured), PowerState::Running, 150));
        assert_eq!(found[..12], expected);
        assert_eq!(found.len(), 18, "two that look alike are one: {found:?}");
    }

    #[test]
    fn disks_have_the_room_that_is_left() {
        let disks = (0..16).map(|at| disk(&format!("d{at}"))).collect();
        let measured = Measured { power: PowerState::Running, disks, more_disks: 984, ..Measured::default() };
        for (room, shown) in [(150, 16), (37, 5), (10, 1), (9, 0), (0, 0)] {
            let found = samples(Some(&measured), PowerState::Running, room);
            assert_eq!(found.len(), 4 + shown * OF_DISK, "{room}");
            let left = found.iter().find(|sample| sample.family == &table::VM_DISKS_LEFT_OUT).unwrap();
            assert!((left.value - number(1000 - shown as u64)).abs() < 0.5, "{left:?}");
        }
    }

    #[test]
    fn of_a_vm_that_says_nothing_only_its_end_is_known() {
        assert!(samples(None, PowerState::Running, 150).is_empty());
        assert!(samples(None, PowerState::Unspecified, 150).is_empty());
        let off = ["vm_power_state running 0", "vm_power_state paused 0", "vm_power_state off 1"];
        assert_eq!(told(&samples(None, PowerState::Off, 150)), off);
        let before = Measured { power: PowerState::Running, ..Measured::default() };
        assert_eq!(told(&samples(Some(&before), PowerState::Off, 150)), off);
    }
}
