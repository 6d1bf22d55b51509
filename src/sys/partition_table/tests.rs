#![allow(clippy::cast_possible_truncation, reason = "these disks are small")]

use std::cell::RefCell;
use std::convert::Infallible;

use proptest::prelude::*;

use super::gpt::crc32;
use super::*;

/// A disk in memory that takes a number of writes and then loses power.
struct Memory {
    sector: u32,
    bytes: RefCell<Vec<u8>>,
}

impl Disk for Memory {
    type Error = Infallible;

    fn sector(&self) -> u32 {
        self.sector
    }

    fn sectors(&self) -> u64 {
        self.bytes.borrow().len() as u64 / u64::from(self.sector)
    }

    fn read(&self, first: u64, count: u64) -> Result<Vec<u8>, Infallible> {
        let (first, count) = (first as usize * self.sector as usize, count as usize * self.sector as usize);
        let bytes = self.bytes.borrow();
        let mut read = bytes.get(first..(first + count).min(bytes.len())).unwrap_or_default().to_vec();
        read.resize(count, 0);
        Ok(read)
    }
}

impl Memory {
    fn of(sector: u32, mebibytes: usize) -> Self {
        Self { sector, bytes: RefCell::new(vec![0; mebibytes << 20]) }
    }

    fn write(&self, write: &Write) {
        let at = write.sector as usize * self.sector as usize;
        self.bytes.borrow_mut()[at..at + write.bytes.len()].copy_from_slice(&write.bytes);
    }

    fn enlarge(&self, mebibytes: usize) {
        self.bytes.borrow_mut().resize(mebibytes << 20, 0);
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        self.bytes.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// The places of partitions, in MiB.
type Places<'a> = &'a [(u64, u64)];

fn mbr(disk: &Memory, kind: u8, entries: Places<'_>) {
    let unit = (1 << 20) / u64::from(disk.sector);
    for (at, (start, length)) in entries.iter().enumerate() {
        let at = 446 + at * 16;
        disk.put(at + 4, &[kind]);
        disk.put(at + 8, &((start * unit) as u32).to_le_bytes());
        disk.put(at + 12, &((length * unit) as u32).to_le_bytes());
    }
    disk.put(510, &[0x55, 0xaa]);
}

/// A disk of `mebibytes` with a GPT of 128 entries.
fn gpt(sector: u32, mebibytes: usize, entries: Places<'_>) -> Memory {
    let disk = Memory::of(sector, mebibytes);
    let last = disk.sectors() - 1;
    disk.put(446 + 4, &[0xee]);
    disk.put(446 + 8, &1_u32.to_le_bytes());
    disk.put(446 + 12, &(last as u32).to_le_bytes());
    disk.put(510, &[0x55, 0xaa]);
    let unit = (1 << 20) / u64::from(sector);
    let mut array = vec![0; 128 * 128];
    for (at, (start, length)) in entries.iter().enumerate() {
        let entry = &mut array[at * 128..][..128];
        entry[..32].fill(at as u8 + 1);
        entry[32..40].copy_from_slice(&(start * unit).to_le_bytes());
        entry[40..48].copy_from_slice(&((start + length) * unit - 1).to_le_bytes());
    }
    let taken = array.len() as u64 / u64::from(sector);
    for (own, other, array_at) in [(1, last, 2), (last, 1, last - taken)] {
        let mut header = vec![0; sector as usize];
        header[..8].copy_from_slice(b"EFI PART");
        header[8..16].copy_from_slice(&[0, 0, 1, 0, 92, 0, 0, 0]);
        for (at, number) in [(24, own), (32, other), (40, 2 + taken), (48, last - taken - 1), (72, array_at)]
        {
            header[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        header[56..72].fill(0xab);
        header[80..84].copy_from_slice(&128_u32.to_le_bytes());
        header[84..88].copy_from_slice(&128_u32.to_le_bytes());
        header[88..92].copy_from_slice(&crc32(&array).to_le_bytes());
        let sum = crc32(&header[..92]);
        header[16..20].copy_from_slice(&sum.to_le_bytes());
        disk.write(&Write { sector: array_at, bytes: array.clone() });
        disk.write(&Write { sector: own, bytes: header });
    }
    disk
}

fn perform(disk: &Memory, growth: &Growth) {
    growth.writes.iter().flatten().for_each(|write| disk.write(write));
}

#[test]
fn what_is_no_table_is_left_alone() {
    assert_eq!(partitions(&Memory::of(512, 4)), Err(Refusal::NoTable));
    // The first sector of a FAT file system ends as a table does.
    let fat = Memory::of(512, 4);
    fat.put(446, b"Non-system disk or disk error");
    fat.put(510, &[0x55, 0xaa]);
    assert_eq!(grow(&fat, None), Err(Refusal::NoTable));
    let empty = gpt(512, 16, &[]);
    assert_eq!(grow(&empty, None), Err(Refusal::Empty));
    let damaged = gpt(512, 16, &[(1, 2)]);
    damaged.put(512 + 40, &[9]);
    damaged.put((16 << 20) - 512 + 40, &[9]);
    assert!(matches!(grow(&damaged, None), Err(Refusal::Damaged(_))));
}

#[test]
fn only_the_last_partition_grows() {
    for sector in [512, 4096] {
        let disk = gpt(sector, 16, &[(4, 8), (1, 3)]);
        disk.enlarge(32);
        assert_eq!(grow(&disk, Some(2)), Err(Refusal::NotLast { wanted: 2, last: 1 }));
        let growth = grow(&disk, Some(1)).unwrap();
        perform(&disk, &growth);
        let unit = (1 << 20) / u64::from(sector);
        // The last MiB holds the table.
        assert_eq!(partitions(&disk).unwrap()[0], growth.partition);
        assert_eq!((growth.partition.start, growth.partition.sectors), (4 * unit, 27 * unit));
        assert_eq!(partitions(&disk).unwrap()[1].sectors, 3 * unit);
        assert_eq!(grow(&disk, None).unwrap(), Growth { partition: growth.partition, writes: Vec::new() });
        // The end of the disk is a table of its own, and the protective entry covers all.
        disk.put(sector as usize, &[0; 512]);
        assert_eq!(partitions(&disk).unwrap()[0], growth.partition);
        let covered = disk.read(0, 1).unwrap()[446 + 12..446 + 16].to_vec();
        assert_eq!(covered, (disk.sectors() as u32 - 1).to_le_bytes());
    }
    let disk = Memory::of(512, 16);
    mbr(&disk, 0x83, &[(1, 2), (3, 4)]);
    let growth = grow(&disk, None).unwrap();
    assert_eq!((growth.partition.number, growth.partition.sectors), (2, 13 * 2048));
    perform(&disk, &growth);
    assert_eq!(partitions(&disk).unwrap()[1], growth.partition);
    assert!(grow(&disk, None).unwrap().writes.is_empty());
    let extended = Memory::of(512, 16);
    mbr(&extended, 0x05, &[(1, 2)]);
    assert_eq!(grow(&extended, Some(5)), Err(Refusal::Extended));
    assert_eq!(grow(&extended, None), Err(Refusal::Extended));
}

#[test]
fn nothing_shrinks() {
    let disk = gpt(512, 16, &[(1, 14)]);
    // The last MiB is cut off, and the backup table with it.
    disk.bytes.borrow_mut().truncate(15 << 20);
    assert_eq!(grow(&disk, None), Err(Refusal::Smaller));
    let disk = Memory::of(512, 16);
    mbr(&disk, 0x83, &[(1, 20)]);
    assert_eq!(grow(&disk, None), Err(Refusal::Smaller));
}

#[test]
fn an_mbr_says_no_more_than_32_bits() {
    struct Huge(Vec<u8>);
    impl Disk for Huge {
        type Error = Infallible;
        fn sector(&self) -> u32 {
            512
        }
        fn sectors(&self) -> u64 {
            1 << 34
        }
        fn read(&self, _: u64, _: u64) -> Result<Vec<u8>, Infallible> {
            Ok(self.0.clone())
        }
    }
    let small = Memory::of(512, 1);
    mbr(&small, 0x83, &[(1, 2)]);
    let growth = grow(&Huge(small.read(0, 1).unwrap()), None).unwrap();
    assert_eq!(growth.partition.start + growth.partition.sectors, 1 << 32);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]

    #[test]
    fn power_may_be_lost_at_any_write(
        old in 8_usize..16, more in 1_usize..16, lengths in prop::collection::vec(1_u64..3, 1..3), lost: prop::sample::Index,
        torn: prop::sample::Index,
    ) {
        let mut start = 1;
        let places: Vec<_> = lengths.iter().map(|length| { start += length; (start - length, *length) }).collect();
        let disk = gpt(512, old, &places);
        let before = partitions(&disk).unwrap();
        disk.enlarge(old + more);
        let growth = grow(&disk, None).unwrap();
        let mut after = before.clone();
        *after.last_mut().unwrap() = growth.partition;
        let writes: Vec<_> = growth.writes.iter().flatten().collect();
        let (done, rest) = writes.split_at(lost.index(writes.len() + 1));
        for write in done {
            disk.write(write);
        }
        if let Some(next) = rest.first() {
            // A sector is written whole, several are not.
            let sectors = torn.index(next.bytes.len() / 512);
            disk.write(&Write { sector: next.sector, bytes: next.bytes[..sectors * 512].to_vec() });
        }
        let found = partitions(&disk).unwrap();
        prop_assert!(found == before || found == after, "{:?}", found);
        perform(&disk, &grow(&disk, None).unwrap());
        prop_assert_eq!(partitions(&disk).unwrap(), after);
        prop_assert!(grow(&disk, None).unwrap().writes.is_empty());
    }

    #[test]
    fn any_bytes_will_do(bytes: Vec<u8>, at in 0_usize..3) {
        let disk = gpt(512, 4, &[(1, 2)]);
        disk.put([440, 512, 1024][at], &bytes[..bytes.len().min(512)]);
        let _ = grow(&disk, None);
    }
}
