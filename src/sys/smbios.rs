//! Strings that a hypervisor passes to its guest in the SMBIOS table (DMTF DSP0134): structures of type 11,
//! "OEM Strings".
//!
//! Pure: the bytes of `/sys/firmware/dmi/tables/DMI` in, strings out. The table may contain anything; each
//! byte is read only once.

/// Path where the kernel shows the table.
pub const TABLE: &str = "/sys/firmware/dmi/tables/DMI";
/// Bytes of a table that are read. The 32-bit entry point, which QEMU has by default, allows 64 KiB.
pub const MAX_TABLE: u64 = 1 << 20;

const OEM_STRINGS: u8 = 11;
const END_OF_TABLE: u8 = 127;
/// Bytes of the smallest structure: its type, its length, and its handle.
const HEAD: usize = 4;

/// A table that ends within a structure of OEM strings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the table ends within its OEM strings, at byte {at}")]
pub struct CutOff {
    /// Bytes that there are.
    pub at: usize,
}

/// Returns all OEM strings in their order. If a structure is shorter than its header, or has no end,
/// everything after it is ignored, because the bounds of later structures are unknown.
///
/// # Errors
/// If a string is truncated by the end of the table.
pub fn oem_strings(table: &[u8]) -> Result<Vec<&[u8]>, CutOff> {
    let mut found = Vec::new();
    let mut rest = table;
    while let [kind, length, ..] = *rest {
        if kind == END_OF_TABLE || usize::from(length) < HEAD {
            break;
        }
        let Some((strings, after)) = rest.get(usize::from(length)..).and_then(strings) else {
            if kind == OEM_STRINGS {
                return Err(CutOff { at: table.len() });
            }
            break;
        };
        if kind == OEM_STRINGS {
            found.extend(strings.split(|byte| *byte == 0).filter(|string| !string.is_empty()));
        }
        rest = after;
    }
    Ok(found)
}

/// The strings behind a structure, each but the last with its NUL, and what follows the two NULs at their end.
fn strings(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.windows(2).position(|pair| pair == [0, 0])?;
    Some((&bytes[..end], &bytes[end + 2..]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The table of a guest of QEMU 10.0 (q35), started with
    /// `-smbios type=11,value=io.systemd.credential:guestlet.hosts=a key,,of two words,value=second`.
    const OF_QEMU: &[u8] = include_bytes!("../../tests/fixtures/smbios/qemu-10.0-q35");

    #[test]
    fn a_table_of_qemu() {
        let strings: [&[u8]; 2] = [b"io.systemd.credential:guestlet.hosts=a key,of two words", b"second"];
        assert_eq!(oem_strings(OF_QEMU).unwrap(), strings);
    }

    #[test]
    fn a_table_that_is_cut_off_says_so_or_has_what_was_whole() {
        let whole = oem_strings(OF_QEMU).unwrap();
        let start = OF_QEMU.windows(14).position(|bytes| bytes == b"io.systemd.cre").unwrap();
        let end = start + whole.iter().map(|string| string.len() + 1).sum::<usize>() + 1;
        for length in 0..OF_QEMU.len() {
            let found = oem_strings(&OF_QEMU[..length]);
            match length {
                // From where the type and the length of the structure are seen.
                _ if (start - 3..end).contains(&length) => assert_eq!(found, Err(CutOff { at: length })),
                _ if length < end => assert!(found.unwrap().is_empty(), "{length}"),
                _ => assert_eq!(found.unwrap(), whole, "{length}"),
            }
        }
    }

    #[test]
    fn tables_that_lie() {
        let structure = |kind: u8, length: u8, rest: &[u8]| [&[kind, length, 0, 0], rest].concat();
        let ours = structure(11, 5, b"\x02a\0b c\0\0");
        let (a, b): (&[u8], &[u8]) = (b"a", b"b c");
        for (name, table, expected) in [
            ("alone", ours.clone(), Ok(vec![a, b])),
            ("after one without strings", [structure(1, 4, b"\0\0"), ours.clone()].concat(), Ok(vec![a, b])),
            ("twice", [ours.clone(), ours.clone()].concat(), Ok(vec![a, b, a, b])),
            ("behind the end", [structure(127, 4, b"\0\0"), ours.clone()].concat(), Ok(vec![])),
            ("behind a length of nothing", [structure(1, 0, b"\0\0"), ours.clone()].concat(), Ok(vec![])),
            ("within another", [structure(1, 12, b""), ours.clone()].concat(), Ok(vec![])),
            ("more than its count says", structure(11, 5, b"\0a\0b c\0\0"), Ok(vec![a, b])),
            ("none", structure(11, 5, b"\x00\0\0"), Ok(vec![])),
            ("longer than the table", structure(11, 200, b"\x01a\0\0"), Err(CutOff { at: 8 })),
            ("without its end", structure(11, 5, b"\x01a\0"), Err(CutOff { at: 7 })),
            ("another that is cut off", structure(1, 200, b"a\0\0"), Ok(vec![])),
        ] {
            assert_eq!(oem_strings(&table), expected, "{name}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>) {
            let _ = oem_strings(&bytes);
        }

        #[test]
        fn what_looks_like_structures_is_read_within_its_bounds(
            bytes in prop::collection::vec(prop::sample::select(vec![0, 0, 4, 5, 11, 11, 127, b'a']), 0..64),
        ) {
            for string in oem_strings(&bytes).unwrap_or_default() {
                prop_assert!(!string.is_empty() && !string.contains(&0));
            }
        }
    }
}
