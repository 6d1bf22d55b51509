//! Fields of packets, as far as this client reads them: pure, and safe for bytes from an untrusted source.

/// Rest of a packet that was not parsed yet.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// Begins to parse a whole packet.
    pub fn of(packet: &'a [u8]) -> Self {
        Self(packet)
    }

    /// Returns whether the packet has no bytes left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes the next `length` bytes; `None` if fewer are left.
    pub fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// Takes the next byte.
    pub fn byte(&mut self) -> Option<u8> {
        self.bytes(1)?.first().copied()
    }

    /// Takes a little-endian number of `length` bytes, at most 8.
    pub fn number(&mut self, length: usize) -> Option<u64> {
        let bytes = self.bytes(length)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// Takes bytes up to a zero byte, which is taken as well.
    pub fn terminated(&mut self) -> Option<&'a [u8]> {
        let length = self.0.iter().position(|byte| *byte == 0)?;
        let taken = self.bytes(length)?;
        self.bytes(1)?;
        Some(taken)
    }

    /// Takes a length-encoded number.
    pub fn counted_number(&mut self) -> Option<u64> {
        match self.byte()? {
            small @ 0..=0xfa => Some(small.into()),
            0xfc => self.number(2),
            0xfd => self.number(3),
            0xfe => self.number(8),
            // 0xfb is NULL, and 0xff begins an error.
            _ => None,
        }
    }

    /// Takes a length-encoded string.
    pub fn counted(&mut self) -> Option<&'a [u8]> {
        let length = self.counted_number()?;
        self.bytes(usize::try_from(length).ok()?)
    }

    /// Takes a length-encoded string, or NULL.
    #[allow(clippy::option_option, reason = "nothing that could be read, and NULL")]
    pub fn value(&mut self) -> Option<Option<&'a [u8]>> {
        if self.0.first() == Some(&0xfb) {
            self.bytes(1)?;
            return Some(None);
        }
        self.counted().map(Some)
    }

    /// Takes all remaining bytes.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_and_texts() {
        let mut fields = Fields::of(b"\x01\x02text\0\x03abc\xfb\xfc\x01\x00z\xfd\x02\x01\x00");
        assert_eq!(fields.number(2), Some(0x0201));
        assert_eq!(fields.terminated(), Some(&b"text"[..]));
        assert_eq!(fields.value(), Some(Some(&b"abc"[..])));
        assert_eq!(fields.value(), Some(None));
        assert_eq!(fields.counted(), Some(&b"z"[..]));
        assert_eq!(fields.counted_number(), Some(0x102));
        assert!(fields.is_empty() && fields.byte().is_none() && fields.value().is_none());
        // A length that no packet can have, and a text without its terminator.
        assert_eq!(Fields::of(b"\xfe\xff\xff\xff\xff\xff\xff\xff\xffabc").counted(), None);
        assert_eq!(Fields::of(b"abc").terminated(), None);
    }

    proptest! {
        #[test]
        fn no_field_is_longer_than_what_there_is(bytes: Vec<u8>) {
            let mut fields = Fields::of(&bytes);
            let mut taken = 0;
            while let Some(value) = fields.value() {
                taken += 1 + value.map_or(0, <[u8]>::len);
            }
            prop_assert!(taken <= bytes.len());
            let _ = Fields::of(&bytes).terminated();
            let _ = Fields::of(&bytes).number(8);
        }
    }
}
