//! What is on a device: the word of blkid(8), which knows every signature, and a look at where signatures are. A program
//! is not needed for a file system that udev has found before, with the same code, and that still says the same of itself.
//!
//! That nothing was found is told as [`Contents::Blank`] only if the device could be read and holds zeros there:
//! a damaged file system is not blank.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::volumes::{Error, at_once, programs};
use crate::sys::superblock::{self, Kind, Superblock};
use crate::sys::{block_device, udev};

/// How long a device may take to answer.
const DEADLINE: Duration = Duration::from_secs(30);
/// Bytes at the beginning and at the end of a device that are looked at.
const ENDS: u64 = 1 << 20;
const PIECE: usize = 64 * 1024;

/// What is on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Contents {
    /// Nothing.
    Blank,
    /// No signature that is known, and yet something.
    Unknown {
        /// Where the first byte is that is not zero.
        at: u64,
    },
    /// Signatures that contradict each other.
    Several,
    /// What its signature says.
    Known(Signature),
}

/// What a signature says, in the words of blkid(8).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Signature {
    /// Such as `ext4`, `swap`, `crypto_LUKS` or `LVM2_member`; absent of partition tables.
    pub kind: Option<String>,
    /// Of a partition table: `gpt`, `dos` and others.
    pub table: Option<String>,
    /// Which one it is; of a partition table its own.
    pub uuid: Option<String>,
    /// The name that people gave it.
    pub label: Option<String>,
}

impl Contents {
    /// The file system, swap space or container that is there, and nothing else.
    pub fn kind(&self) -> Option<&str> {
        match self {
            Self::Known(Signature { kind, table: None, .. }) => kind.as_deref(),
            _ => None,
        }
    }

    /// In words.
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

/// What is on `device`.
///
/// # Errors
/// If it cannot be read, does not answer in time, or blkid is missing.
pub async fn contents(guest: &Guest, device: &Path) -> Result<Contents, Error> {
    if let Some(signature) = told(guest, device).await? {
        return Ok(Contents::Known(signature));
    }
    let path = programs::text(device)?;
    let found = programs::run(&guest.root, "blkid", &["-p", "-o", "export", "--", path], DEADLINE).await?;
    match found.status.code() {
        Some(0) => Ok(parse(&found.output).map_or(Contents::Several, Contents::Known)),
        Some(8) => Ok(Contents::Several),
        // It says the same of a device that it cannot open.
        Some(2) if found.errors.trim().is_empty() => {
            let path = device.to_owned();
            let looked = at_once(device, DEADLINE, move || look(&block_device::open(&path)?)).await?;
            let first = looked.map_err(|source| Error::unreadable(device, source))?;
            Ok(first.map_or(Contents::Blank, |at| Contents::Unknown { at }))
        }
        _ => Err(programs::failed("blkid", found)),
    }
}

/// What is on `device` in place of the file system of `kind` and `uuid`; `None` if that begins there, as what has just
/// been made does. Kinds that are not known by their beginning are asked blkid for.
///
/// # Errors
/// As [`contents`].
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

/// The file system that udev has found there, if it is still there.
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
    // The program says better what is wrong with it.
    Ok(looked.unwrap_or(None))
}

/// The file system that udev found on a device; nothing if it found anything else, or more than that.
fn by_udev(entry: &[u8]) -> Option<Signature> {
    let word = |name| udev::property(entry, name).map(str::to_owned);
    let label = word("ID_FS_LABEL_ENC");
    // A label with other characters than these is written in another way.
    let plain = !label.as_ref().is_some_and(|label| label.contains('\\'));
    let alone = word("ID_FS_USAGE")? == "filesystem" && word("ID_PART_TABLE_TYPE").is_none();
    (plain && alone).then_some(Signature {
        kind: Some(word("ID_FS_TYPE")?),
        table: None,
        uuid: Some(word("ID_FS_UUID")?),
        label,
    })
}

/// Whether it is the file system of this kind and name, in blkid's words.
fn is_of(own: &Superblock, kind: &str, uuid: &str) -> bool {
    let same_kind = match own.kind {
        Kind::Ext => matches!(kind, "ext2" | "ext3" | "ext4"),
        Kind::Xfs => kind == "xfs",
        Kind::Btrfs { .. } => kind == "btrfs",
    };
    same_kind && uuid.replace('-', "") == format!("{:032x}", u128::from_be_bytes(own.uuid))
}

/// What blkid says, lines of a name and a value; nothing if there is nothing that is known.
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

/// A backslash goes before what a shell would take for something else.
fn unescape(value: &str) -> String {
    let mut plain = String::with_capacity(value.len());
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        plain.push(if character == '\\' { characters.next().unwrap_or('\\') } else { character });
    }
    plain
}

/// Where the first byte is that is not zero, at the beginning and at the end.
fn look(device: &File) -> io::Result<Option<u64>> {
    let length = io::Seek::seek(&mut &*device, io::SeekFrom::End(0))?;
    let first = first_byte(device, 0, length.min(ENDS))?;
    if first.is_some() || length <= ENDS {
        return Ok(first);
    }
    first_byte(device, length.saturating_sub(ENDS).max(ENDS), length)
}

fn first_byte(device: &File, mut from: u64, to: u64) -> io::Result<Option<u64>> {
    let mut piece = vec![0; PIECE];
    while from < to {
        let length = usize::try_from(to - from).unwrap_or(PIECE).min(PIECE);
        device.read_exact_at(&mut piece[..length], from)?;
        if let Some(at) = piece[..length].iter().position(|byte| *byte != 0) {
            return Ok(Some(from + at as u64));
        }
        from += length as u64;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
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
        let own = Superblock { kind: Kind::Ext, uuid, bytes: 1, block: 4096, clean: true };
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

    #[test]
    fn the_first_byte_is_found() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 << 20).unwrap();
        assert_eq!(look(&file).unwrap(), None);
        // In the middle there are no signatures.
        file.write_all_at(b"x", (1 << 20) + 5).unwrap();
        assert_eq!(look(&file).unwrap(), None);
        file.write_all_at(b"x", (3 << 20) - 1).unwrap();
        assert_eq!(look(&file).unwrap(), Some((3 << 20) - 1));
        file.write_all_at(b"x", 70_000).unwrap();
        assert_eq!(look(&file).unwrap(), Some(70_000));
        file.set_len(1000).unwrap();
        assert_eq!(look(&file).unwrap(), None);
    }

    proptest! {
        #[test]
        fn any_text_will_do(text: String) {
            let _ = parse(&text);
        }
    }
}
