//! Detects the contents of a device: by blkid(8), which knows every signature, and by reading its bytes. No
//! program is needed for a file system that udev has found before, with the same code, and whose own superblock
//! still says the same.
//!
//! An empty result is reported as [`Contents::Blank`] only if the device could be read in time, and holds zeros at
//! all places where contents leave evidence after their header was lost: a damaged file system is not blank. A
//! caller that only needs the signature uses [`signed`], which is quick.

use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::guest::volumes::{Error, at_once, evidence, programs};
use crate::sys::superblock::{self, Kind, Superblock};
use crate::sys::{block_device, udev, zeros};

/// Time limit for a response of the device.
const DEADLINE: Duration = Duration::from_secs(30);
/// Time limit for reading the bytes of a device without a signature. If they have not all been read by then, the
/// device does not count as blank.
const TO_LOOK: Duration = Duration::from_secs(60);

/// Contents of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Contents {
    /// No contents: zeros at all places that were read.
    Blank,
    /// Data without a known signature.
    Unknown {
        /// Position of the first byte that is not zero.
        at: u64,
    },
    /// Signatures that contradict each other.
    Several,
    /// Contents with this signature.
    Known(Signature),
}

/// Properties of a signature, in the terms of blkid(8).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signature {
    /// Kind of contents, such as `ext4`, `swap`, `crypto_LUKS` or `LVM2_member`; absent for partition tables.
    pub kind: Option<String>,
    /// Type of a partition table: `gpt`, `dos` and others.
    pub table: Option<String>,
    /// UUID of the contents, or of the partition table.
    pub uuid: Option<String>,
    /// Label given by people.
    pub label: Option<String>,
}

impl Contents {
    /// Returns the kind of file system, swap space or container, if the device holds exactly one.
    pub fn kind(&self) -> Option<&str> {
        match self {
            Self::Known(Signature { kind, table: None, .. }) => kind.as_deref(),
            _ => None,
        }
    }

    /// Describes the contents for people.
    pub fn words(&self) -> String {
        match self {
            Self::Blank => "nothing".to_owned(),
            Self::Unknown { at } => format!("data of an unknown kind (at byte {at})"),
            Self::Several => "several signatures that contradict each other".to_owned(),
            Self::Known(Signature { kind: Some(kind), .. }) => kind.clone(),
            Self::Known(Signature { table: Some(table), .. }) => format!("a partition table ({table})"),
            Self::Known(_) => "a signature of an unknown kind".to_owned(),
        }
    }
}

/// Detects the contents of `device`. A device without a signature takes some thousand reads.
///
/// # Errors
/// If it cannot be read, does not respond in time, or blkid is missing.
pub async fn contents(guest: &Guest, device: &Path) -> Result<Contents, Error> {
    if let Some(found) = signed(guest, device).await? {
        return Ok(found);
    }
    let path = device.to_owned();
    let until = Instant::now() + TO_LOOK;
    let looked =
        at_once(device, TO_LOOK + DEADLINE, move || look(&block_device::open(&path)?, until)).await?;
    match looked {
        Ok(first) => Ok(first.map_or(Contents::Blank, |at| Contents::Unknown { at })),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            Err(Error::Silent { what: device.to_owned(), seconds: TO_LOOK.as_secs() })
        }
        Err(source) => Err(Error::unreadable(device, source)),
    }
}

/// Detects the signatures on `device`; absent if none is known, which does not mean that the device is blank.
///
/// # Errors
/// The errors of [`contents`].
pub async fn signed(guest: &Guest, device: &Path) -> Result<Option<Contents>, Error> {
    if let Some(signature) = told(guest, device).await? {
        return Ok(Some(Contents::Known(signature)));
    }
    let path = programs::text(device)?;
    let found = programs::run(&guest.root, "blkid", &["-p", "-o", "export", "--", path], DEADLINE).await?;
    match found.status.code() {
        Some(0) => Ok(Some(parse(&found.output).map_or(Contents::Several, Contents::Known))),
        Some(8) => Ok(Some(Contents::Several)),
        // blkid exits with 2 also for a device that it cannot open, but then prints an error.
        Some(2) if found.errors.trim().is_empty() => Ok(None),
        _ => Err(programs::failed("blkid", found)),
    }
}

/// Returns what is on `device` instead of the file system of `kind` and `uuid`, or `None` if the device begins
/// with that file system, as after it has been made. Kinds that are not recognised by their beginning are looked
/// up with blkid.
///
/// # Errors
/// The errors of [`contents`].
pub(super) async fn other_than(
    guest: &Guest,
    device: &Path,
    kind: &str,
    uuid: &str,
) -> Result<Option<Contents>, Error> {
    let path = device.to_owned();
    let read = at_once(device, DEADLINE, move || superblock::read(&block_device::open(&path)?)).await?;
    let own = read.map_err(|source| Error::unreadable(device, source))?;
    if own.is_some_and(|own| is_of(&own, kind, uuid)) {
        return Ok(None);
    }
    let found = contents(guest, device).await?;
    let is_it = found.kind() == Some(kind)
        && matches!(&found, Contents::Known(signature) if signature.uuid.as_deref() == Some(uuid));
    Ok((!is_it).then_some(found))
}

/// Returns the file system that udev has found on the device, if it is still there.
async fn told(guest: &Guest, device: &Path) -> Result<Option<Signature>, Error> {
    let (root, path) = (guest.root.clone(), device.to_owned());
    let look = move || {
        let device = block_device::open(&path)?;
        let Some(entry) = udev::block_device(&root, block_device::number(&device)?) else { return Ok(None) };
        let Some(signature) = by_udev(&entry) else { return Ok(None) };
        let own = superblock::read(&device)?;
        let words = signature.kind.as_deref().zip(signature.uuid.as_deref());
        let is_there = own.zip(words).is_some_and(|(own, (kind, uuid))| is_of(&own, kind, uuid));
        Ok(is_there.then_some(signature))
    };
    let looked: io::Result<_> = at_once(device, DEADLINE, look).await?;
    // On an error blkid is run, which describes it better.
    Ok(looked.unwrap_or(None))
}

/// Returns the file system that udev found on a device; none if udev found anything else or anything more.
fn by_udev(entry: &[u8]) -> Option<Signature> {
    let word = |name| udev::property(entry, name).map(str::to_owned);
    let label = word("ID_FS_LABEL_ENC");
    // udev encodes other characters of a label differently.
    let plain = !label.as_ref().is_some_and(|label| label.contains('\\'));
    let alone = word("ID_FS_USAGE")? == "filesystem" && word("ID_PART_TABLE_TYPE").is_none();
    (plain && alone).then_some(Signature {
        kind: Some(word("ID_FS_TYPE")?),
        table: None,
        uuid: Some(word("ID_FS_UUID")?),
        label,
    })
}

/// Returns whether the superblock is of this kind and UUID, as blkid writes them.
fn is_of(own: &Superblock, kind: &str, uuid: &str) -> bool {
    let same_kind = match own.kind {
        Kind::Ext => matches!(kind, "ext2" | "ext3" | "ext4"),
        Kind::Xfs => kind == "xfs",
        Kind::Btrfs { .. } => kind == "btrfs",
    };
    same_kind && uuid.replace('-', "") == format!("{:032x}", u128::from_be_bytes(own.uuid))
}

/// Parses the output of blkid, lines of a name and a value. Returns none if it names nothing known.
fn parse(text: &str) -> Option<Signature> {
    let mut signature = Signature::default();
    let mut table_uuid = None;
    for line in text.lines() {
        let Some((name, value)) = line.split_once('=') else { continue };
        let value = Some(unescape(value));
        match name {
            "TYPE" => signature.kind = value,
            "PTTYPE" => signature.table = value,
            "UUID" => signature.uuid = value,
            "PTUUID" => table_uuid = value,
            "LABEL" => signature.label = value,
            _ => {}
        }
    }
    signature.uuid = signature.uuid.or(table_uuid);
    (signature.kind.is_some() || signature.table.is_some()).then_some(signature)
}

/// Removes the backslashes before characters that are special in a shell.
fn unescape(value: &str) -> String {
    let mut plain = String::with_capacity(value.len());
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        plain.push(if character == '\\' { characters.next().unwrap_or('\\') } else { character });
    }
    plain
}

/// Returns the position of a byte that is not zero, among the places that are read.
fn look(device: &File, until: Instant) -> io::Result<Option<u64>> {
    let length = io::Seek::seek(&mut &*device, io::SeekFrom::End(0))?;
    let mut state = RandomState::new().build_hasher().finish();
    // splitmix64: it need not be unpredictable, only different at each look.
    let random = |below: u64| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % below
    };
    zeros::first_other(device, evidence::places(length, random), until)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_blkid_says() {
        let text =
            "DEVNAME=/dev/vda1\nLABEL=my\\ disk\nUUID=1234\nBLOCK_SIZE=4096\nTYPE=ext4\nUSAGE=filesystem\n";
        let found = parse(text).unwrap();
        let expected = Signature {
            kind: Some("ext4".to_owned()),
            uuid: Some("1234".to_owned()),
            label: Some("my disk".to_owned()),
            table: None,
        };
        assert_eq!(found, expected);
        assert_eq!(Contents::Known(found).kind(), Some("ext4"));
        let table = parse("DEVNAME=/dev/vda\nPTUUID=ab\nPTTYPE=gpt\n").unwrap();
        assert_eq!((table.table.as_deref(), table.uuid.as_deref()), (Some("gpt"), Some("ab")));
        assert_eq!(Contents::Known(table).kind(), None);
        assert_eq!(parse("DEVNAME=/dev/vda\n"), None);
    }

    #[test]
    fn what_udev_found_counts_if_it_is_still_there() {
        let entry = "I:2143861\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\nE:ID_FS_LABEL_ENC=data\n\
                     E:ID_FS_UUID=0a1b2c3d-0000-0000-0000-00000000000f\n";
        let found = by_udev(entry.as_bytes()).unwrap();
        assert_eq!((found.kind.as_deref(), found.label.as_deref()), (Some("ext4"), Some("data")));
        let uuid = [0x0a, 0x1b, 0x2c, 0x3d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 15];
        let own = Superblock { kind: Kind::Ext, uuid, bytes: 1, block: 4096, clean: true, used: true };
        let uuid = found.uuid.unwrap();
        assert!(is_of(&own, "ext4", &uuid));
        assert!(!is_of(&Superblock { kind: Kind::Xfs, ..own }, "ext4", &uuid));
        assert!(!is_of(&Superblock { uuid: [0; 16], ..own }, "ext4", &uuid));
        for (change, to) in [
            ("filesystem", "crypto"),
            ("I:2143861", "E:ID_PART_TABLE_TYPE=dos"),
            ("=data", "=my\\x20disk"),
            ("_UUID", "_UUID_SUB"),
        ] {
            assert_eq!(by_udev(entry.replace(change, to).as_bytes()), None, "{to}");
        }
    }

    /// Returns a file of this length, with data at one position.
    fn file(length: u64, at: u64, data: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        file.write_all_at(data, at).unwrap();
        file
    }

    fn found(file: &File) -> Option<u64> {
        look(file, Instant::now() + TO_LOOK).unwrap()
    }

    #[test]
    fn what_is_left_is_found() {
        for (what, length, at, data, first) in [
            ("nothing", 1 << 40, 0, vec![0; 512], None),
            ("a byte at 1 MiB", 1 << 40, 1 << 20, vec![1], Some(1 << 20)),
            ("a byte at the end", 1 << 40, (1 << 40) - 1, vec![1], Some((1 << 40) - 1)),
            ("a byte in the middle of a small one", 20 << 20, 9_999_999, vec![1], Some(9_999_999)),
            ("an odd end", 1000, 999, vec![1], Some(999)),
        ] {
            assert_eq!(found(&file(length, at, &data)), first, "{what}");
        }
        // At any position, but longer than a part.
        let data = vec![7; (1 << 30) / usize::try_from(evidence::PARTS).unwrap() + 4096];
        let at = (333 << 20) + 12345;
        let first = found(&file(1 << 30, at, &data)).unwrap();
        assert!((at..at + data.len() as u64).contains(&first));
        let error = look(&file(1 << 30, 0, b"x"), Instant::now()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn any_text_will_do(text: String) {
            let _ = parse(&text);
        }

        /// Copies of superblocks, on disks of any size.
        #[test]
        fn no_copy_of_a_header_is_missed(mebibytes in 65_u64..1 << 22, copy in 0_u64..12, in_partition: bool) {
            let length = mebibytes << 20;
            let base = u64::from(in_partition) << 20;
            let pages = (length - base) / 4096;
            let at = base + match copy {
                0 => 64 << 20,
                1 => 256 << 30,
                2 => 8193 * 1024,
                3 => 32768 * 4096,
                4 => 98304 * 4096,
                5 => 819_200 * 4096,
                // As mkfs.xfs divides the disk.
                6 => pages.div_ceil(4) * 4096,
                7 => pages.div_ceil(4) * 3 * 4096,
                8 => pages.div_ceil(16) * 15 * 4096,
                // From the end of the disk: md 1.0, GPT, md 0.90.
                9 => length - base - 8192,
                10 => length - base - 512,
                _ => length - base - 65536,
            };
            prop_assume!(at < length);
            prop_assert_eq!(found(&file(length, at, &[0xa5])), Some(at));
        }
    }
}
