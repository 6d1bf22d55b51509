//! Bytes and requests read and written by disks; partitions and virtual devices such as LVM volumes are left out.

use crate::guest::disks::identity::{Serial, Source};
use crate::guest::metrics::{Things, put, whole};
use crate::metrics::table;
use crate::sys::diskstats;

/// Unit of /proc/diskstats in bytes, whatever the sector size of the disk.
const SECTOR: u64 = 512;
/// Maximum number of disks that are reported.
const MOST: usize = 32;

/// Returns the samples of each disk in /proc/diskstats, the busiest first, with its serial number where that is
/// known.
pub(super) fn samples(
    file: &str,
    is_disk: impl Fn(&str) -> bool,
    serial_of: impl Fn(&str) -> Option<String>,
) -> Things {
    let mut disks = diskstats::parse(file);
    disks.retain(|disk| is_disk(&disk.name));
    disks.sort_by_key(|disk| std::cmp::Reverse(disk.reads.sectors.saturating_add(disk.writes.sectors)));
    disks.truncate(MOST);
    let disk = |disk: diskstats::Statistics| {
        let mut samples = Vec::new();
        if let Some(serial) = serial_of(&disk.name) {
            put(&mut samples, &table::DISK_INFO, &[&disk.name, &serial], 1.0);
        }
        let seconds = |milliseconds| whole(milliseconds) / 1000.0;
        let bytes = |sectors: u64| whole(sectors.saturating_mul(SECTOR));
        let rows = [
            (&table::DISK_READS, Some(whole(disk.reads.count))),
            (&table::DISK_WRITES, Some(whole(disk.writes.count))),
            (&table::DISK_READ_BYTES, Some(bytes(disk.reads.sectors))),
            (&table::DISK_WRITTEN_BYTES, Some(bytes(disk.writes.sectors))),
            (&table::DISK_READ_TIME, disk.reads.milliseconds.map(seconds)),
            (&table::DISK_WRITE_TIME, disk.writes.milliseconds.map(seconds)),
            (&table::DISK_BUSY, disk.activity.map(|activity| seconds(activity.milliseconds))),
        ];
        for (family, value) in rows {
            if let Some(value) = value {
                put(&mut samples, family, &[&disk.name], value);
            }
        }
        samples
    };
    disks.into_iter().map(disk).collect()
}

/// Returns the serial number as the hypervisor knows it: QEMU's SCSI disks show the beginning of a long one in one
/// place, and all of it in another.
pub(super) fn serial(serials: &[Serial]) -> Option<String> {
    let first = serials.first()?;
    let is_whole = |other: &&Serial| other.source == Source::Page83 && other.value.starts_with(&first.value);
    let whole = serials.iter().find(is_whole).filter(|_| first.cut);
    Some(whole.unwrap_or(first).text())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::metrics::told;

    #[test]
    fn whole_disks_the_busiest_first() {
        let file = " 254 0 vda 10 1 16 20 30 2 64 40 0 1500 60\n 254 1 vda1 9 1 8 20 30 2 64 40 0 50 60\n   8 0 sda 1 0 1000 7 0 0 0 0 0 5 5\nbroken\n";
        let found =
            samples(file, |name| !name.ends_with('1'), |name| (name == "vda").then(|| "data-1".to_owned()));
        let told: Vec<_> = found.iter().map(|disk| told(disk)).collect();
        assert_eq!(told.len(), 2);
        assert_eq!(told[0][2], "disk_read_bytes sda 512000", "without a serial number");
        let expected = [
            "disk_info vda data-1 1",
            "disk_reads vda 10",
            "disk_writes vda 30",
            "disk_read_bytes vda 8192",
            "disk_written_bytes vda 32768",
            "disk_read_time_seconds vda 0.02",
            "disk_write_time_seconds vda 0.04",
            "disk_busy_seconds vda 1.5",
        ];
        assert_eq!(told[1], expected);
    }

    #[test]
    fn a_serial_number_is_the_whole_one() {
        const LONG: &[u8] = b"pvc-11111111-2222-3333-4444-555555555555";
        let serials = |all: &[(Source, &[u8])]| {
            let all: Vec<_> = all.iter().filter_map(|(source, raw)| Serial::new(*source, raw)).collect();
            serial(&all)
        };
        let page80 = (Source::Page80, &LONG[..36]);
        let whole = String::from_utf8(LONG.to_vec()).unwrap();
        assert_eq!(serials(&[page80, (Source::Page83, LONG)]), Some(whole));
        let cut = serials(&[page80, (Source::Page83, b"ua-volume")]).unwrap();
        assert_eq!(cut.as_bytes(), page80.1, "an alias is something else");
        let short = [(Source::Page80, &b"data-1"[..]), (Source::Page83, &b"data-1-alias"[..])];
        assert_eq!(serials(&short).unwrap(), "data-1");
        assert_eq!(serials(&[]), None);
    }
}
