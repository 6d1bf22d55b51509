//! Decides which places of a disk are read before it counts as blank: all where contents leave evidence after
//! their header was lost, and blocks spread over the whole disk. Pure.
//!
//! A small disk is read completely. To add a kind of contents: add the positions of its copies to [`places`], and
//! a line to the test.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::sys::zeros::BLOCK;

/// Bytes read at the beginning and at the end. These contain partition tables, both headers of LUKS, labels and
/// metadata of LVM, every superblock of md, the backups of GPT and of NTFS, and the labels of ZFS.
pub const ENDS: u64 = 16 << 20;
/// Size in bytes up to which a device is read completely.
pub const WHOLE: u64 = 4 * ENDS;
/// Number of equal parts of the device; the first block of each is read, and one at random.
pub const PARTS: u64 = 2048;
const PAGE: u64 = BLOCK as u64;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
/// Possible starts of a file system of which only copies are left: that of the disk, that of the first partition
/// or LVM extent, and that of the data of a large md.
const BASES: [u64; 3] = [0, MIB, 128 * MIB];
/// Exponents of the powers of two into which XFS may divide itself.
const XFS_SHIFTS: std::ops::RangeInclusive<u32> = 1..=5;

/// Returns the ranges to be read of a device of `length` bytes, in order. `random` returns a number below its
/// argument.
pub fn places(length: u64, mut random: impl FnMut(u64) -> u64) -> Vec<Range<u64>> {
    if length <= WHOLE {
        return std::iter::once(0..length).collect();
    }
    let mut blocks = Blocks { length, chosen: BTreeSet::new() };
    for base in BASES {
        for (block, first) in [(KIB, KIB), (2 * KIB, 0), (4 * KIB, 0), (64 * KIB, 0)] {
            ext(&mut blocks, base + first, 8 * block * block);
        }
        for mirror in [64 * MIB, 256 * GIB] {
            blocks.add(base + 64 * KIB);
            blocks.add(base + mirror);
        }
        xfs(&mut blocks, base);
        // Default position of the master file table of NTFS.
        blocks.add(base + 3 * GIB);
    }
    // Positions where partitions often begin.
    let near = (ENDS..GIB).step_by(16 << 20);
    let far = (GIB..8 * GIB).step_by(128 << 20);
    let powers = (33..63).map(|power| 1 << power);
    for start in near.chain(far).chain(powers) {
        for at in [0, 64 * KIB, MIB, MIB + 64 * KIB] {
            blocks.add(start + at);
        }
    }
    let part = length / PARTS;
    for start in (0..PARTS).map(|number| number * part) {
        blocks.add(start);
        blocks.add(start + random(part));
    }
    blocks.ranges()
}

/// Adds the block groups that have a copy of the superblock of ext2, ext3 and ext4: the first, and those whose
/// numbers are powers of 3, 5 and 7.
fn ext(blocks: &mut Blocks, base: u64, group: u64) {
    blocks.add(base + group);
    for prime in [3_u64, 5, 7] {
        let powers = std::iter::successors(Some(prime), |power| power.checked_mul(prime));
        let copies = powers.map_while(|power| power.checked_mul(group)?.checked_add(base));
        copies
            .take_while(|at| *at < blocks.length)
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|at| blocks.add(at));
    }
}

/// Adds the allocation groups of XFS, each of which begins with a copy of the superblock, as mkfs.xfs divides a
/// disk, or a partition that extends to its end.
fn xfs(blocks: &mut Blocks, base: u64) {
    let Some(pages) = blocks.length.checked_sub(base).map(|bytes| bytes / PAGE) else { return };
    for shift in XFS_SHIFTS {
        let group = pages.div_ceil(1 << shift) * PAGE;
        for number in 1..1 << shift {
            blocks.add(base + number * group);
        }
    }
    // Groups of the maximum size. A larger file system, with more groups than are added here, has data in all
    // parts.
    for number in 1..=64 {
        blocks.add(base + number * (TIB - PAGE));
    }
}

struct Blocks {
    length: u64,
    chosen: BTreeSet<u64>,
}

impl Blocks {
    fn add(&mut self, at: u64) {
        if at < self.length {
            self.chosen.insert(at / PAGE);
        }
    }

    /// Returns the two ends, and the blocks between them.
    fn ranges(self) -> Vec<Range<u64>> {
        let last = (self.length - ENDS) / PAGE * PAGE;
        let mut ranges: Vec<Range<u64>> = std::iter::once(0..ENDS).collect();
        for start in self.chosen.range(ENDS / PAGE..last / PAGE).map(|block| block * PAGE) {
            match ranges.last_mut() {
                Some(before) if before.end == start => before.end = start + PAGE,
                _ => ranges.push(start..start + PAGE),
            }
        }
        match ranges.last_mut() {
            Some(before) if before.end == last => before.end = self.length,
            _ => ranges.push(last..self.length),
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn is_looked_at(length: u64, at: u64) -> bool {
        places(length, |below| below / 2).iter().any(|range| range.contains(&at))
    }

    /// Uses positions taken from the output of the programs, and not computed as in this module.
    #[test]
    fn what_is_left_of_a_lost_header_is_looked_at() {
        let tib = 1 << 40;
        for (what, length, at) in [
            ("a partition at 1 MiB", tib, 1 << 20),
            ("one that begins as those of old", tib, 63 * 512),
            ("data at 2 MiB", tib, 2 << 20),
            ("the second header of LUKS", tib, 0x40_0000),
            ("a partition after 512 MiB of another", tib, 513 << 20),
            ("btrfs in it", tib, (513 << 20) + 65536),
            ("a partition after 1 GiB of another", tib, 1025 << 20),
            ("btrfs' first mirror", 1 << 30, 64 << 20),
            ("btrfs' second mirror", tib, 256 << 30),
            ("the mirror of one in a partition", tib, (256 << 30) + (1 << 20)),
            // Printed by mkfs.ext4: 32768, 98304, 163840, 229376, 294912, 819200, …
            ("ext4", 1 << 30, 32768 * 4096),
            ("ext4", tib, 294_912 * 4096),
            ("ext4", tib, 819_200 * 4096),
            ("ext4 in a partition", tib, 819_200 * 4096 + (1 << 20)),
            // With blocks of 1 KiB: 8193, 24577, 40961, 57345, …
            ("ext4 of small blocks", 100 << 20, 8193 * 1024),
            ("ext4 of small blocks", 100 << 20, 57345 * 1024),
            // 4 groups of 65536 blocks each.
            ("XFS of 1 GiB", 1 << 30, 65536 * 4096),
            // Printed by mkfs.xfs: agsize=655360
            ("XFS of 10 GiB", 10 << 30, 655_360 * 4096),
            ("XFS in a partition", 10 << 30, ((10 << 30) - (1 << 20)) / 4 + (1 << 20)),
            // Printed by mkfs.xfs: agsize=268435455
            ("XFS of 8 TiB", 8 * tib, 268_435_455 * 4096),
            ("NTFS", tib, 786_432 * 4096),
            ("md of old", tib, tib - 65536),
            ("md", tib, tib - 8192),
            ("the backup of GPT", tib, tib - 512),
            ("a byte", tib, tib - 1),
            ("an odd end", tib + 512, tib + 511),
            ("any byte of a small disk", 64 << 20, 33_333_333),
        ] {
            assert!(is_looked_at(length, at), "{what}: {at} of {length}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn all_of_a_disk_is_sampled_and_not_too_much_of_it(
            sectors in 1_u64..1 << 40,
            seed: u64,
        ) {
            let length = sectors * 512;
            let mut state = seed;
            let ranges = places(length, |below| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 16) % below
            });
            prop_assert_eq!(ranges.first().unwrap().start, 0);
            prop_assert_eq!(ranges.last().unwrap().end, length);
            for pair in ranges.windows(2) {
                prop_assert!(pair[0].start < pair[0].end && pair[0].end < pair[1].start);
            }
            prop_assert!(ranges.iter().all(|range| range.start % PAGE == 0));
            let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            prop_assert!(bytes <= WHOLE && ranges.len() < 6500, "{bytes} in {}", ranges.len());
            // No gap is larger than a part.
            if length > WHOLE {
                for pair in ranges.windows(2) {
                    prop_assert!(pair[1].start - pair[0].end <= length / PARTS + PAGE);
                }
            }
        }
    }
}
