//! The table in the first sector of a disk: four entries of 16 bytes.

use super::{Disk, Growth, Partition, Refusal, Write, aligned_end};

const ENTRIES: usize = 446;
const ENTRY: usize = 16;
const SIGNATURE: [u8; 2] = [0x55, 0xaa];
const PROTECTIVE: u8 = 0xee;
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
/// As cylinder, head and sector: more than these can say.
const BEYOND: [u8; 3] = [0xfe, 0xff, 0xff];

/// Master boot record: the first sector of the disk.
pub(super) struct Mbr(Vec<u8>);

impl Mbr {
    pub(super) fn parse(sector: Vec<u8>) -> Option<Self> {
        if sector.get(510..512)? != SIGNATURE {
            return None;
        }
        let table = Self(sector);
        // A file system's own first sector ends in the same way; it has no such entries.
        let sound = (0..4).all(|at| matches!(table.entry(at)[0], 0 | 0x80));
        let used = (0..4).any(|at| table.entry(at)[4] != 0);
        (sound && used).then_some(table)
    }

    fn entry(&self, at: usize) -> &[u8] {
        &self.0[ENTRIES + at * ENTRY..][..ENTRY]
    }

    fn numbers(&self, at: usize) -> (u64, u64) {
        let number = |at: &[u8]| {
            u64::from(at[0]) | u64::from(at[1]) << 8 | u64::from(at[2]) << 16 | u64::from(at[3]) << 24
        };
        let entry = self.entry(at);
        (number(&entry[8..]), number(&entry[12..]))
    }

    /// Returns whether it is a protective MBR, which marks a disk with a GPT.
    pub(super) fn is_protective(&self) -> bool {
        (0..4).any(|at| self.entry(at)[4] == PROTECTIVE)
    }

    pub(super) fn partitions(&self) -> Vec<Partition> {
        let partition = |(at, number)| {
            let (start, sectors) = self.numbers(at);
            let kind = self.entry(at)[4];
            (kind != 0 && sectors > 0).then(|| Partition {
                number,
                start,
                sectors,
                is_container: EXTENDED.contains(&kind),
            })
        };
        (0..4).zip(1..).filter_map(partition).collect()
    }

    pub(super) fn grow<D: Disk>(mut self, disk: &D, last: Partition) -> Result<Growth, Refusal<D::Error>> {
        if last.is_container {
            return Err(Refusal::Extended);
        }
        if self.partitions().iter().any(|other| *other != last && overlap(other, &last)) {
            return Err(Refusal::Damaged("partitions overlap"));
        }
        let end = last.start + last.sectors;
        if end > disk.sectors() {
            return Err(Refusal::Smaller);
        }
        // The size is limited to 32 bits.
        let most = disk.sectors().min(last.start + u64::from(u32::MAX));
        let sectors = aligned_end(most, last.start, disk.sector()) - last.start;
        let Ok(number) = u32::try_from(sectors) else {
            return Err(Refusal::Damaged("a partition is too large"));
        };
        if sectors <= last.sectors {
            return Ok(Growth { partition: last, writes: Vec::new() });
        }
        let at = ENTRIES + (last.number as usize - 1) * ENTRY;
        self.0[at + 5..at + 8].copy_from_slice(&BEYOND);
        self.0[at + 12..at + 16].copy_from_slice(&number.to_le_bytes());
        let writes = vec![vec![Write { sector: 0, bytes: self.0 }]];
        Ok(Growth { partition: Partition { sectors, ..last }, writes })
    }

    /// Returns the sector with a protective entry that covers a disk of this many sectors; `None` if the sector
    /// has no protective entry, or its entry need not be changed.
    pub(super) fn protecting(mut self, sectors: u64) -> Option<Vec<u8>> {
        let at = (0..4).find(|at| self.entry(*at)[4] == PROTECTIVE)?;
        let (start, old) = self.numbers(at);
        let new = u32::try_from(sectors.saturating_sub(start)).unwrap_or(u32::MAX);
        // One that covers less on purpose, beside others, stays.
        let others = (0..4).any(|other| other != at && self.entry(other)[4] != 0);
        if others || old >= u64::from(new) {
            return None;
        }
        let at = ENTRIES + at * ENTRY + 12;
        self.0[at..at + 4].copy_from_slice(&new.to_le_bytes());
        Some(self.0)
    }
}

fn overlap(one: &Partition, other: &Partition) -> bool {
    one.start < other.start + other.sectors && other.start < one.start + one.sectors
}
