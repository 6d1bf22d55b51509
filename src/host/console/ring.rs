//! Ring buffer for guest output that has not been sent to the client yet. Pure.

use std::collections::VecDeque;

/// Bytes of one message.
pub const PART: usize = 16 << 10;
/// Bytes that are kept. Beyond that, the oldest are dropped.
const KEPT: usize = 256 << 10;

/// Kept output, and the number of bytes dropped before it.
#[derive(Debug, Default)]
pub struct Ring {
    bytes: VecDeque<u8>,
    lost: u64,
}

/// Next item to send to the client.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Number of bytes that were dropped at this point.
    Lost(u64),
    /// Output, at most 16 KiB.
    Bytes(Vec<u8>),
}

impl Ring {
    /// Appends output of the guest. Returns how many bytes are dropped for it.
    pub fn push(&mut self, bytes: &[u8]) -> u64 {
        let more = (self.bytes.len() + bytes.len()).saturating_sub(KEPT);
        let oldest = more.min(self.bytes.len());
        self.bytes.drain(..oldest);
        self.bytes.extend(&bytes[more - oldest..]);
        self.lost += more as u64;
        more as u64
    }

    /// Returns whether there is nothing to send: neither output nor a count of dropped bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.lost == 0
    }

    /// Takes the next item to send, if there is one.
    pub fn next(&mut self) -> Option<Next> {
        if self.lost > 0 {
            return Some(Next::Lost(std::mem::take(&mut self.lost)));
        }
        let length = self.bytes.len().min(PART);
        let part: Vec<u8> = self.bytes.drain(..length).collect();
        if self.bytes.is_empty() {
            self.bytes.shrink_to(PART);
        }
        (length > 0).then_some(Next::Bytes(part))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_oldest_bytes_go_and_are_counted() {
        let mut ring = Ring::default();
        assert_eq!((ring.is_empty(), ring.next()), (true, None));
        assert_eq!(ring.push(b"old"), 0);
        assert_eq!(ring.push(&vec![b'n'; KEPT]), 3);
        assert_eq!(ring.push(b""), 0);
        assert!(!ring.is_empty());
        assert_eq!(ring.next(), Some(Next::Lost(3)));
        assert_eq!(ring.next(), Some(Next::Bytes(vec![b'n'; PART])));
        ring.push(&vec![b'l'; 3 * KEPT]);
        assert_eq!(ring.next(), Some(Next::Lost((KEPT - PART + 2 * KEPT) as u64)));
    }

    proptest! {
        /// Every byte is either sent, in order, or counted where it is missing.
        #[test]
        fn what_is_sent_and_what_is_lost_is_all(
            pushes in proptest::collection::vec((0_usize..200_000, 0_usize..12), 1..12),
        ) {
            let mut ring = Ring::default();
            let (mut written, mut read) = (0_u64, 0_u64);
            let byte = |at: u64| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
            for (length, takes) in pushes {
                let bytes: Vec<u8> = (written..written + length as u64).map(byte).collect();
                ring.push(&bytes);
                written += length as u64;
                prop_assert!(ring.bytes.len() <= KEPT);
                for next in (0..takes).map_while(|_| ring.next()) {
                    match next {
                        Next::Lost(count) => read += count,
                        Next::Bytes(bytes) => {
                            prop_assert!(bytes.len() <= PART);
                            prop_assert!(bytes.iter().enumerate().all(|(at, one)| *one == byte(read + at as u64)));
                            read += bytes.len() as u64;
                        }
                    }
                }
            }
            while let Some(next) = ring.next() {
                read += match next { Next::Lost(count) => count, Next::Bytes(bytes) => bytes.len() as u64 };
            }
            prop_assert_eq!(read, written);
        }
    }
}
