//! What disks have read and written; partitions and what is made of disks are left out.

use crate::guest::metrics::{Things, put, whole};
use crate::metrics::table;
use crate::sys::diskstats;

/// Bytes of a sector, whatever the disk's are.
const SECTOR: u64 = 512;
/// Most disks that are looked at.
const MOST: usize = 32;

/// Of each disk of /proc/diskstats, those first that have done most.
pub(super) fn samples(file: &str, is_disk: impl Fn(&str) -> bool) -> Things {
    let mut disks = diskstats::parse(file);
    disks.retain(|disk| is_disk(&disk.name));
    disks.sort_by_key(|disk| std::cmp::Reverse(disk.reads.sectors.saturating_add(disk.writes.sectors)));
    disks.truncate(MOST);
    let disk = |disk: diskstats::Statistics| {
        let mut samples = Vec::new();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::metrics::told;

    #[test]
    fn whole_disks_the_busiest_first() {
        let file = " 254 0 vda 10 1 16 20 30 2 64 40 0 1500 60\n 254 1 vda1 9 1 8 20 30 2 64 40 0 50 60\n   8 0 sda 1 0 1000 7 0 0 0 0 0 5 5\nbroken\n";
        let found = samples(file, |name| !name.ends_with('1'));
        let told: Vec<_> = found.iter().map(|disk| told(disk)).collect();
        assert_eq!(told.len(), 2);
        assert_eq!(told[0][2], "disk_read_bytes sda 512000");
        let expected = [
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
}
