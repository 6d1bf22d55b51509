//! QEMU's names of guestlet's disks. They are made from the serial number alone, so that the disks are found
//! again after any crash. Pure.

/// Prefix of guestlet's names.
const PREFIX: &str = "guestlet-";
/// Number of digits after the prefix. QEMU limits node names to 31 bytes.
const DIGITS: usize = 20;

/// Returns the identifier of the device, and name of the block node, of the disk with this serial number. A
/// serial number may be longer than identifiers and contain other characters, so this is a digest (80 bits of
/// the 128-bit FNV-1a); the serial number itself is read back from the device.
pub fn name(serial: &str) -> String {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let digest = serial.bytes().fold(BASIS, |digest, byte| (digest ^ u128::from(byte)).wrapping_mul(PRIME));
    format!("{PREFIX}{:0DIGITS$x}", digest >> 48)
}

/// Reports whether guestlet could have given this name.
pub fn is_ours(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|digits| {
        digits.len() == DIGITS && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// Returns the file name of the VM's volume with this serial number: characters that are special in file names
/// are written as `%` and two digits.
pub fn file_name(serial: &str, ending: &str) -> String {
    let mut name = String::new();
    for (at, byte) in serial.bytes().enumerate() {
        let plain = byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-') || (byte == b'.' && at > 0);
        if plain {
            name.push(char::from(byte));
        } else {
            name.push('%');
            name.extend(
                [byte >> 4, byte & 15].map(|digit| char::from_digit(digit.into(), 16).unwrap_or('0')),
            );
        }
    }
    name + "." + ending
}

/// Returns the serial number from which [`file_name`] made this name, and the extension.
pub fn serial_of(file_name: &str) -> Option<(String, &str)> {
    let (name, ending) = file_name.rsplit_once('.')?;
    let mut serial = Vec::new();
    let mut bytes = name.bytes();
    while let Some(byte) = bytes.next() {
        serial.push(if byte == b'%' {
            let mut digit = || char::from(bytes.next()?).to_digit(16);
            u8::try_from(digit()? << 4 | digit()?).ok()?
        } else {
            byte
        });
    }
    Some((String::from_utf8(serial).ok()?, ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_what_they_are() {
        // With a different digest, disks that are plugged at an upgrade would be orphaned.
        assert_eq!(name("data-1"), "guestlet-6e5ba4b5473c64bf6f06");
        assert!(name("data-1").len() <= 31);
        assert_ne!(name("data-1"), name("data-2"));
        assert!(is_ours(&name("")));
        for other in ["guestlet-", "guestlet-xyz", "root", "guestlet-d1a5e8c40e39f50fd7d1A"] {
            assert!(!is_ours(other), "{other}");
        }
    }

    #[test]
    fn files_stay_in_their_folder() {
        let cases = [
            ("data-1", "data-1.raw"),
            ("a.b_c", "a.b_c.raw"),
            ("..", "%2e..raw"),
            ("../x", "%2e.%2fx.raw"),
            ("a b%", "a%20b%25.raw"),
        ];
        for other in ["", "a", "a%.raw", "a%2.raw", "a%zz.raw", "a%ff.raw"] {
            assert_eq!(serial_of(other), None, "{other}");
        }
        for (serial, expected) in cases {
            assert_eq!(file_name(serial, "raw"), expected);
            assert_eq!(serial_of(expected), Some((serial.to_owned(), "raw")));
        }
    }
}
