//! What volumes are called. Pure.
//!
//! ```text
//! <pool>.<serial>      fast.k3m9xq7r2v8w5t1c6h4n
//! ```
//!
//! The last twenty characters are what the guest reads as the disk's serial number, and the name of the volume's files;
//! they are drawn at random and compared with those of all volumes, so that no two disks are alike. The pool before
//! them is for people, and tells where to look; what is true stands in the volume's record.

/// Characters of a serial number: all that virtio-blk shows.
pub const SERIAL: usize = 20;
/// Bytes of the longest name of a pool.
pub const LONGEST_POOL: usize = 63;
/// Without those that look alike.
const DIGITS: &[u8; 32] = b"abcdefghjkmnpqrstuvwxyz023456789";

/// A serial number drawn at random; it begins with a letter, and so is never all zeros.
pub fn draw() -> String {
    let digit = |among: usize| char::from(DIGITS.get(fastrand::usize(..among)).copied().unwrap_or(b'a'));
    let first = digit(23);
    std::iter::once(first).chain((1..SERIAL).map(|_| digit(DIGITS.len()))).collect()
}

/// The identifier of a volume.
pub fn id(pool: &str, serial: &str) -> String {
    format!("{pool}.{serial}")
}

/// Whether it could be a serial number that was drawn.
pub fn is_serial(text: &str) -> bool {
    text.len() == SERIAL && text.bytes().all(|byte| DIGITS.contains(&byte))
}

/// The pool and the serial number that an identifier says.
pub fn parse(id: &str) -> Option<(&str, &str)> {
    let (pool, serial) = id.rsplit_once('.')?;
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    let good = !pool.is_empty() && pool.len() <= LONGEST_POOL && pool.bytes().all(plain) && is_serial(serial);
    good.then_some((pool, serial))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_drawn_is_a_serial_number() {
        for _ in 0..1000 {
            let serial = draw();
            assert!(is_serial(&serial) && serial.as_bytes()[0].is_ascii_lowercase(), "{serial}");
            assert_eq!(parse(&id("fast.ssd", &serial)), Some(("fast.ssd", serial.as_str())));
        }
        assert_ne!(draw(), draw());
    }

    #[test]
    fn others_are_none() {
        let long = "a".repeat(64);
        for (pool, serial) in [
            ("", "aaaaaaaaaaaaaaaaaaaa"),
            (&long, "aaaaaaaaaaaaaaaaaaaa"),
            ("../x", "aaaaaaaaaaaaaaaaaaaa"),
            ("Fast", "aaaaaaaaaaaaaaaaaaaa"),
            ("fast", "aaaaaaaaaaaaaaaaaaa"),
            ("fast", "aaaaaaaaaaaaaaaaaaaaa"),
            ("fast", "aaaaaaaaaaaaaaaaaaa1"),
            ("fast", "aaaaaaaaaaaaaaaaaa/a"),
        ] {
            assert_eq!(parse(&id(pool, serial)), None, "{pool} {serial}");
        }
        assert_eq!(parse("pvc-11111111-2222-3333-4444-555555555555"), None);
    }

    proptest! {
        #[test]
        fn what_is_parsed_is_safe_in_a_path(text in "\\PC{0,100}|[a-z./]{0,20}[.][a-z0-9]{18,22}") {
            if let Some((pool, serial)) = parse(&text) {
                prop_assert_eq!(id(pool, serial), text.clone());
                prop_assert!(!text.contains('/') && text.len() <= 128);
            }
        }
    }
}
