//! Superblocks, which file systems write at fixed offsets of their device: the size and the identity of each.
//!
//! Pure; [`read`] reads a device.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use crate::sys::crc32;

/// As much of a device's beginning as is looked at, in bytes.
pub const LENGTH: usize = BTRFS + 4096;

const EXT: usize = 1024;
const BTRFS: usize = 64 * 1024;

/// A file system of a kind that can grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Superblock {
    /// Type of the file system.
    pub kind: Kind,
    /// UUID of the file system.
    pub uuid: [u8; 16],
    /// Bytes of the device that the file system occupies.
    pub bytes: u64,
    /// The size of its blocks in bytes.
    pub block: u32,
    /// True if the superblock shows that a check would have nothing to do. Known for ext4 only.
    pub clean: bool,
    /// True if the file system was completely made, or mounted since: it must never be made again. False if this
    /// is unknown.
    pub used: bool,
}

/// Kinds of file systems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// ext2, ext3 or ext4.
    Ext,
    /// File system XFS.
    Xfs,
    /// File system btrfs, which may span several devices.
    Btrfs {
        /// The number of this device in it.
        device: u64,
        /// Number of devices of the file system.
        devices: u64,
    },
}

/// The file system whose device begins with these bytes, if it is one of those.
pub fn parse(bytes: &[u8]) -> Option<Superblock> {
    let found = ext(bytes).or_else(|| xfs(bytes)).or_else(|| btrfs(bytes));
    // Any other block size means that the superblock is damaged.
    found.filter(|found| found.block.is_power_of_two() && (512..=65536).contains(&found.block))
}

/// Reads the superblock from a device.
///
/// # Errors
/// The errors of read(2); `UnexpectedEof` if the device is too small for any of them.
pub fn read(device: &File) -> io::Result<Option<Superblock>> {
    let mut bytes = vec![0; LENGTH];
    let mut length = 0;
    while length < LENGTH {
        match device.read_at(&mut bytes[length..], length as u64) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(parse(&bytes[..length]))
}

/// The kernel's documentation, filesystems/ext4/super.rst
fn ext(bytes: &[u8]) -> Option<Superblock> {
    const HAS_64_BITS: u32 = 0x80;
    const LAST_MOUNTED: usize = 0x2c;
    const JOURNAL_TO_REPLAY: u32 = 0x4;
    let bytes = bytes.get(EXT..)?;
    if u16::from_le_bytes(field(bytes, 0x38)?) != 0xef53 {
        return None;
    }
    let low = u32::from_le_bytes(field(bytes, 0x04)?);
    let features = u32::from_le_bytes(field(bytes, 0x60)?);
    let high = if features & HAS_64_BITS == 0 { 0 } else { u32::from_le_bytes(field(bytes, 0x150)?) };
    let block =
        1024_u32.checked_shl(u32::from_le_bytes(field(bytes, 0x18)?)).filter(|block| *block <= 65536)?;
    let blocks = u64::from(high) << 32 | u64::from(low);
    let bytes_in_all = blocks.checked_mul(block.into()).filter(|_| block >= 1024)?;
    Some(Superblock {
        kind: Kind::Ext,
        uuid: field(bytes, 0x68)?,
        bytes: bytes_in_all,
        block,
        clean: ext_is_clean(bytes).unwrap_or(false),
        used: u32::from_le_bytes(field(bytes, LAST_MOUNTED)?) != 0 || features & JOURNAL_TO_REPLAY != 0,
    })
}

/// Returns whether e2fsck(8) would find nothing to do, judging by the superblock alone: it was unmounted, no
/// error was ever recorded, and no check is due. False also for a file system without checksums, and for one
/// that is to be checked at intervals of days; `None` if the bytes are too few.
fn ext_is_clean(bytes: &[u8]) -> Option<bool> {
    const UNMOUNTED_WITHOUT_ERRORS: u16 = 1;
    const JOURNAL_TO_REPLAY: u32 = 0x4;
    const HAS_CHECKSUMS: u32 = 0x400;
    const ORPHANS_TO_REMOVE: u32 = 0x1_0000;
    const CHECKSUM: usize = 0x3fc;
    let short = |at| Some(u16::from_le_bytes(field(bytes, at)?));
    let long = |at| Some(u32::from_le_bytes(field(bytes, at)?));

    let features = long(0x64)?;
    let sum = crc32::update(crc32::CASTAGNOLI, u32::MAX, bytes.get(..CHECKSUM)?);
    let whole = features & HAS_CHECKSUMS != 0 && long(CHECKSUM)? == sum;
    let (mounts, most) = (short(0x34)?, short(0x36)?.cast_signed());
    let (check_interval, first_orphan, errors) = (long(0x44)?, long(0xe8)?, long(0x194)?);
    Some(
        whole
            && short(0x3a)? == UNMOUNTED_WITHOUT_ERRORS
            && long(0x60)? & JOURNAL_TO_REPLAY == 0
            && features & ORPHANS_TO_REMOVE == 0
            && (first_orphan, errors, check_interval) == (0, 0, 0)
            && (most <= 0 || mounts < most.unsigned_abs()),
    )
}

/// XFS writes its numbers with the highest byte first.
fn xfs(bytes: &[u8]) -> Option<Superblock> {
    /// mkfs.xfs takes this away in the end.
    const IN_PROGRESS: usize = 126;
    if bytes.get(..4)? != b"XFSB" {
        return None;
    }
    let block = u32::from_be_bytes(field(bytes, 4)?);
    let bytes_in_all = u64::from_be_bytes(field(bytes, 8)?).checked_mul(block.into())?;
    let used = *bytes.get(IN_PROGRESS)? == 0;
    Some(Superblock {
        kind: Kind::Xfs,
        uuid: field(bytes, 32)?,
        bytes: bytes_in_all,
        block,
        clean: false,
        used,
    })
}

fn btrfs(bytes: &[u8]) -> Option<Superblock> {
    /// Offset of the item that describes this device.
    const ITEM: usize = 0xc9;
    let bytes = bytes.get(BTRFS..)?;
    if bytes.get(0x40..0x48)? != b"_BHRfS_M" {
        return None;
    }
    Some(Superblock {
        kind: Kind::Btrfs {
            device: u64::from_le_bytes(field(bytes, ITEM)?),
            devices: u64::from_le_bytes(field(bytes, 0x88)?),
        },
        uuid: field(bytes, 0x20)?,
        bytes: u64::from_le_bytes(field(bytes, ITEM + 8)?),
        block: u32::from_le_bytes(field(bytes, 0x90)?),
        clean: false,
        // mkfs.btrfs writes what it is known by in the end.
        used: true,
    })
}

fn field<const LENGTH: usize>(bytes: &[u8], at: usize) -> Option<[u8; LENGTH]> {
    bytes.get(at..at + LENGTH)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
        bytes[at..at + what.len()].copy_from_slice(what);
    }

    fn blank() -> Vec<u8> {
        vec![0; LENGTH]
    }

    /// An ext4 of so many blocks of 4 KiB.
    fn ext4(blocks: u64) -> Vec<u8> {
        let mut bytes = blank();
        let number = blocks.to_le_bytes();
        put(&mut bytes, EXT + 0x38, &[0x53, 0xef]);
        put(&mut bytes, EXT + 0x04, &number[..4]);
        put(&mut bytes, EXT + 0x150, &number[4..]);
        put(&mut bytes, EXT + 0x60, &0x2c2_u32.to_le_bytes());
        put(&mut bytes, EXT + 0x18, &[2]);
        put(&mut bytes, EXT + 0x68, &[7; 16]);
        bytes
    }

    #[test]
    fn each_kind() {
        assert_eq!(parse(&blank()), None);
        let mut xfs = blank();
        put(&mut xfs, 0, b"XFSB\0\0\x10\0\0\0\0\0\0\0\x20\0");
        put(&mut xfs, 32, &[8; 16]);
        let expected = Superblock {
            kind: Kind::Xfs,
            uuid: [8; 16],
            bytes: 0x2000 * 4096,
            block: 4096,
            clean: false,
            used: true,
        };
        assert_eq!(parse(&xfs), Some(expected));
        let mut btrfs = blank();
        put(&mut btrfs, BTRFS + 0x40, b"_BHRfS_M");
        put(&mut btrfs, BTRFS + 0x20, &[9; 16]);
        put(&mut btrfs, BTRFS + 0x88, &[2]);
        put(&mut btrfs, BTRFS + 0x90, &4096_u32.to_le_bytes());
        put(&mut btrfs, BTRFS + 0xc9, &[1]);
        put(&mut btrfs, BTRFS + 0xd1, &(5_u64 << 30).to_le_bytes());
        let kind = Kind::Btrfs { device: 1, devices: 2 };
        assert_eq!(
            parse(&btrfs),
            Some(Superblock { kind, uuid: [9; 16], bytes: 5 << 30, block: 4096, clean: false, used: true })
        );
        // Blocks of more than 64 KiB there are not.
        let mut wrong = ext4(1);
        put(&mut wrong, EXT + 0x18, &[40]);
        assert_eq!(parse(&wrong), None);
    }

    #[test]
    fn an_ext4_that_needs_no_check() {
        let clean = |changes: &[(usize, &[u8])], summed: bool| {
            let mut bytes = ext4(1);
            put(&mut bytes, EXT + 0x60, &0x2c2_u32.to_le_bytes());
            put(&mut bytes, EXT + 0x64, &0x46b_u32.to_le_bytes());
            put(&mut bytes, EXT + 0x36, &[0xff, 0xff]);
            put(&mut bytes, EXT + 0x3a, &[1]);
            for (at, what) in changes {
                put(&mut bytes, EXT + at, what);
            }
            let sum = crc32::update(crc32::CASTAGNOLI, u32::MAX, &bytes[EXT..EXT + 0x3fc]);
            put(&mut bytes, EXT + 0x3fc, &(sum ^ u32::from(!summed)).to_le_bytes());
            parse(&bytes).unwrap().clean
        };
        assert!(clean(&[], true));
        assert!(!clean(&[], false), "the checksum is wrong");
        assert!(clean(&[(0x34, &[19]), (0x36, &[20, 0])], true));
        let wrong: [(&str, usize, &[u8]); 9] = [
            ("in use", 0x3a, &[0]),
            ("an error", 0x3a, &[3]),
            ("orphans", 0x3a, &[5]),
            ("a journal", 0x60, &[0xc6]),
            ("no checksums", 0x65, &[0]),
            ("a file of orphans", 0x66, &[1]),
            ("mounted often", 0x34, &[20, 0, 20, 0]),
            ("a date", 0x44, &[1]),
            ("a list of orphans", 0xe8, &[12]),
        ];
        for (why, at, what) in wrong {
            assert!(!clean(&[(at, what)], true), "{why}");
        }
        assert!(!clean(&[(0x194, &[1])], true), "an error that was counted");
    }

    #[test]
    fn what_was_mounted_or_finished_was_used() {
        let used = |bytes: &[u8]| parse(bytes).unwrap().used;
        let mut bytes = ext4(9);
        assert!(!used(&bytes));
        put(&mut bytes, EXT + 0x60, &0x2c6_u32.to_le_bytes());
        assert!(used(&bytes), "a journal to replay");
        let mut bytes = ext4(9);
        put(&mut bytes, EXT + 0x2c, &1_u32.to_le_bytes());
        assert!(used(&bytes), "it was mounted");
        let mut xfs = blank();
        put(&mut xfs, 0, b"XFSB\0\0\x10\0\0\0\0\0\0\0\x20\0");
        put(&mut xfs, 126, &[1]);
        assert!(!used(&xfs), "in progress");
    }

    proptest! {
        #[test]
        fn sizes_of_ext4(blocks in 0_u64..1 << 48) {
            let found = parse(&ext4(blocks));
            let expected =
                Superblock { kind: Kind::Ext, uuid: [7; 16], bytes: blocks * 4096, block: 4096, clean: false, used: false };
            prop_assert_eq!(found, Some(expected));
        }

        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>, kind in 0..4) {
            let mut device = ext4(1);
            match kind {
                1 => put(&mut device, 0, b"XFSB"),
                2 => put(&mut device, BTRFS + 0x40, b"_BHRfS_M"),
                _ => device.truncate(bytes.len() * 16),
            }
            let end = bytes.len().min(device.len());
            put(&mut device, 0, &bytes[..end]);
            let _ = parse(&device);
            let _ = parse(&bytes);
        }
    }
}
