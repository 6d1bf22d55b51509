//! Identifiers of volumes. Pure.
//!
//! ```text
//! <pool>.<pool's UUID>.<serial>    fast.0f1e2d3c4b5a69788796a5b4c3d2e1f0.k3m9xq7r2v8w5t5c6h4n
//! <pool>.<serial>                  fast.k3m9xq7r2v8w5t5c6h4n, from before pools had UUIDs
//! ```
//!
//! The last twenty characters are the serial number that the guest reads, and the name of the volume's files.
//! They are drawn at random and compared with those of all volumes, so that no two disks are alike. The UUID,
//! in 32 hexadecimal digits, identifies the pool, and thus its directory, on whichever host it is. The name of
//! the pool in front of it is for people, and may be out of date: the volume's record is authoritative.

/// Length of a serial number in characters: as many as virtio-blk shows.
pub const SERIAL: usize = 20;
/// Maximum length of a pool's name in bytes.
pub const LONGEST_POOL: usize = 63;
/// Number of hexadecimal digits in a UUID.
const UUID: usize = 32;
/// Alphabet of serial numbers, without characters that look alike.
const DIGITS: &[u8; 32] = b"abcdefghjkmnpqrstuvwxyz023456789";

/// Parts of an identifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts<'i> {
    /// Name of the pool when the volume was created.
    pub pool: &'i str,
    /// UUID of the pool, if the identifier contains one.
    pub uuid: Option<&'i str>,
    /// Serial number of the volume.
    pub serial: &'i str,
}

/// Draws a random serial number. It begins with a letter, and so is never all zeros.
pub fn draw() -> String {
    let digit = |among: usize| char::from(DIGITS.get(fastrand::usize(..among)).copied().unwrap_or(b'a'));
    let first = digit(23);
    std::iter::once(first).chain((1..SERIAL).map(|_| digit(DIGITS.len()))).collect()
}

/// Builds the identifier of a volume.
pub fn id(pool: &str, uuid: &str, serial: &str) -> String {
    format!("{pool}.{uuid}.{serial}")
}

/// Reports whether a text has the form of a serial number that is drawn here.
pub fn is_serial(text: &str) -> bool {
    text.len() == SERIAL && text.bytes().all(|byte| DIGITS.contains(&byte))
}

/// Reports whether a text has the form of a pool's UUID.
pub fn is_uuid(text: &str) -> bool {
    text.len() == UUID && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Parses an identifier; `None` if it does not have the form of one.
pub fn parse(id: &str) -> Option<Parts<'_>> {
    let (before, serial) = id.rsplit_once('.')?;
    let (pool, uuid) = match before.rsplit_once('.') {
        Some((pool, uuid)) if is_uuid(uuid) => (pool, Some(uuid)),
        _ => (before, None),
    };
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'.');
    let good = !pool.is_empty() && pool.len() <= LONGEST_POOL && pool.bytes().all(plain) && is_serial(serial);
    good.then_some(Parts { pool, uuid, serial })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NUMBER: &str = "0f1e2d3c4b5a69788796a5b4c3d2e1f0";

    #[test]
    fn what_is_drawn_is_a_serial_number() {
        for _ in 0..1000 {
            let serial = draw();
            assert!(is_serial(&serial) && serial.as_bytes()[0].is_ascii_lowercase(), "{serial}");
            let parts = Parts { pool: "fast.ssd", uuid: Some(NUMBER), serial: &serial };
            assert_eq!(parse(&id("fast.ssd", NUMBER, &serial)), Some(parts));
            assert_eq!(parse(&format!("fast.ssd.{serial}")), Some(Parts { uuid: None, ..parts }));
        }
        assert_ne!(draw(), draw());
        assert!(id(&"a".repeat(LONGEST_POOL), NUMBER, &draw()).len() <= 128);
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
            assert_eq!(parse(&format!("{pool}.{serial}")), None, "{pool} {serial}");
            assert_eq!(parse(&id(pool, NUMBER, serial)), None, "{pool} {serial}");
        }
        assert_eq!(parse("pvc-11111111-2222-3333-4444-555555555555"), None);
    }

    proptest! {
        #[test]
        fn what_is_parsed_is_safe_in_a_path(text in "\\PC{0,100}|[a-z./]{0,20}([.][0-9a-f]{32})?[.][a-z0-9]{18,22}") {
            if let Some(Parts { pool, uuid, serial }) = parse(&text) {
                let again = uuid.map_or_else(|| format!("{pool}.{serial}"), |uuid| id(pool, uuid, serial));
                prop_assert_eq!(again, text.clone());
                prop_assert!(!text.contains('/') && text.len() <= 128);
            }
        }
    }
}
