//! The table that UEFI defines: a header and an array of entries at the beginning of the disk, and again at its end.

use super::mbr::Mbr;
use super::{Disk, Growth, Partition, Refusal, Write, aligned_end};
use crate::sys::crc32;

const SIGNATURE: &[u8; 8] = b"EFI PART";
/// More entries than anybody has, in bytes: the array is read whole.
const MOST: u64 = 1 << 20;

/// A header whose checksum and whose array's is right.
pub(super) struct Gpt {
    mbr: Mbr,
    header: Vec<u8>,
    array: Vec<u8>,
    entry: usize,
    /// The header at the beginning is the one that was read, and the one at the end is where it belongs and says the
    /// same.
    whole: bool,
}

impl Gpt {
    pub(super) fn read<D: Disk>(disk: &D, mbr: Mbr) -> Result<Self, Refusal<D::Error>> {
        let end = disk.sectors().saturating_sub(1);
        let (first, last) = (half(disk, 1)?, half(disk, end)?);
        let agree = match (&first, &last) {
            (Some((one, entries)), Some((other, others))) => {
                entries == others && alternate(one) == end && one.get(40..72) == other.get(40..72)
            }
            _ => false,
        };
        let (header, array) = match (first, last) {
            (Some(first), _) => first,
            (None, Some((mut header, array))) => {
                // The beginning was being written when power was lost.
                set(&mut header, 24, 1);
                set(&mut header, 32, end);
                set(&mut header, 72, 2);
                (header, array)
            }
            (None, None) => {
                return Err(Refusal::Damaged("neither its primary nor its backup header is valid"));
            }
        };
        let entry = number(&header, 84, 4).try_into().unwrap_or(usize::MAX);
        Ok(Self { mbr, header, array, entry, whole: agree })
    }

    pub(super) fn partitions(&self) -> Vec<Partition> {
        let partition = |(number, entry): (u32, &[u8])| {
            let (start, end) = (self::number(entry, 32, 8), self::number(entry, 40, 8));
            let used = entry[..16].iter().any(|byte| *byte != 0);
            (used && end >= start).then(|| Partition {
                number,
                start,
                sectors: (end - start).saturating_add(1),
                is_container: false,
            })
        };
        (1..).zip(self.array.chunks_exact(self.entry)).filter_map(partition).collect()
    }

    pub(super) fn grow<D: Disk>(mut self, disk: &D, last: Partition) -> Result<Growth, Refusal<D::Error>> {
        let sector = u64::from(disk.sector());
        let taken = (self.array.len() as u64).div_ceil(sector);
        let disk_end = disk.sectors().saturating_sub(1);
        // The last sector is the header's, those before it the array's.
        let free_end = disk_end.saturating_sub(taken);
        let end = last.start.saturating_add(last.sectors);
        if end > free_end {
            return Err(Refusal::Smaller);
        }
        let others = self.partitions();
        if others.iter().any(|other| *other != last && other.start.saturating_add(other.sectors) > last.start)
        {
            return Err(Refusal::Damaged("partitions overlap"));
        }
        let sectors = (aligned_end(free_end, last.start, disk.sector()) - last.start).max(last.sectors);
        let partition = Partition { sectors, ..last };
        if self.whole && sectors == last.sectors {
            return Ok(Growth { partition, writes: Vec::new() });
        }
        let at = (last.number as usize - 1) * self.entry;
        set(&mut self.array[at..], 40, last.start + sectors - 1);
        set(&mut self.header, 48, free_end - 1);
        put(&mut self.header, 88, crc32(&self.array));
        let mut beginning = self.header.clone();
        set(&mut beginning, 24, 1);
        set(&mut beginning, 32, disk_end);
        let array_at = number(&beginning, 72, 8);
        seal(&mut beginning);
        let mut ending = self.header;
        set(&mut ending, 24, disk_end);
        set(&mut ending, 32, 1);
        set(&mut ending, 72, free_end);
        seal(&mut ending);
        let mut padded = self.array;
        padded.resize(usize::try_from(taken * sector).unwrap_or(padded.len()), 0);
        let mut writes = vec![
            vec![Write { sector: free_end, bytes: padded.clone() }],
            vec![Write { sector: disk_end, bytes: ending }],
            vec![Write { sector: array_at, bytes: padded }, Write { sector: 1, bytes: beginning }],
        ];
        // The protective MBR matters only to programs that do not support GPT, so it is written last.
        writes.extend(self.mbr.protecting(disk.sectors()).map(|bytes| vec![Write { sector: 0, bytes }]));
        Ok(Growth { partition, writes })
    }
}

/// Reads the header at sector `at` and its array; `None` if their checksums do not match.
type Half = Option<(Vec<u8>, Vec<u8>)>;

fn half<D: Disk>(disk: &D, at: u64) -> Result<Half, Refusal<D::Error>> {
    let header = disk.read(at, 1).map_err(Refusal::Disk)?;
    let Some(size) = sound(&header, at) else { return Ok(None) };
    let array_at = number(&header, 72, 8);
    let sectors = size.div_ceil(u64::from(disk.sector()));
    let after = array_at.checked_add(sectors);
    if array_at < 2 || after.is_none_or(|after| after > disk.sectors()) {
        return Ok(None);
    }
    let mut array = disk.read(array_at, sectors).map_err(Refusal::Disk)?;
    array.truncate(usize::try_from(size).unwrap_or(usize::MAX));
    let right = u64::from(crc32(&array)) == number(&header, 88, 4);
    Ok(right.then_some((header, array)))
}

/// The size of the array in bytes, if this is a header of sector `at`.
fn sound(header: &[u8], at: u64) -> Option<u64> {
    if header.get(..8)? != SIGNATURE || header.len() < 512 {
        return None;
    }
    let length = usize::try_from(number(header, 12, 4)).ok()?;
    if !(92..=header.len()).contains(&length) || number(header, 24, 8) != at {
        return None;
    }
    let mut copy = header[..length].to_vec();
    put(&mut copy, 16, 0);
    if u64::from(crc32(&copy)) != number(header, 16, 4) {
        return None;
    }
    let entry = number(header, 84, 4);
    if !(128..=4096).contains(&entry) || !entry.is_multiple_of(8) {
        return None;
    }
    let size = number(header, 80, 4) * entry;
    (size > 0 && size <= MOST).then_some(size)
}

fn alternate(header: &[u8]) -> u64 {
    number(header, 32, 8)
}

/// Writes the checksum of the header itself.
fn seal(header: &mut [u8]) {
    let length = usize::try_from(number(header, 12, 4)).unwrap_or(usize::MAX).min(header.len());
    put(header, 16, 0);
    let checksum = crc32(&header[..length]);
    put(header, 16, checksum);
}

fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    bytes[at..at + length].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn set(bytes: &mut [u8], at: usize, number: u64) {
    bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
}

fn put(bytes: &mut [u8], at: usize, number: u32) {
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
}

/// The checksum that UEFI uses.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    !crc32::update(crc32::ISO, u32::MAX, bytes)
}
