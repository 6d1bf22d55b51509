//! Checksums of 32 bits, as disks hold them: the bits of each byte are taken from the lowest on.

/// ISO 3309, which UEFI uses for its partition tables.
pub const ISO: u32 = 0xedb8_8320;
/// Castagnoli's (CRC32C), which file systems use.
pub const CASTAGNOLI: u32 = 0x82f6_3b78;

/// Goes on from `sum` with these bytes. One begins with all bits set; some end with all bits turned.
pub fn update(polynomial: u32, sum: u32, bytes: &[u8]) -> u32 {
    let bit = |sum: u32, _| if sum & 1 == 0 { sum >> 1 } else { sum >> 1 ^ polynomial };
    bytes.iter().fold(sum, |sum, byte| (0..8).fold(sum ^ u32::from(*byte), bit))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check values that the catalogues of such checksums give.
    #[test]
    fn known_sums() {
        assert_eq!(!update(ISO, u32::MAX, b"123456789"), 0xcbf4_3926);
        assert_eq!(!update(CASTAGNOLI, u32::MAX, b"123456789"), 0xe306_9283);
        let halves = update(ISO, update(ISO, u32::MAX, b"1234"), b"56789");
        assert_eq!(halves, update(ISO, u32::MAX, b"123456789"));
    }
}
