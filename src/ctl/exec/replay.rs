//! Input that a program has not taken yet: it is sent again when a connection breaks. Pure.

use std::collections::VecDeque;

/// Bytes beyond those that the program has taken.
pub const WINDOW: usize = 64 * 1024;

/// What was read here, from what the program has taken on.
#[derive(Debug, Default)]
pub struct Replay {
    /// Bytes that the program has taken.
    taken: u64,
    bytes: VecDeque<u8>,
    has_ended: bool,
}

impl Replay {
    /// Of a program that has taken so much already, from others.
    pub fn from(taken: u64) -> Self {
        Self { taken, ..Self::default() }
    }

    /// How much more may be read now.
    pub fn room(&self) -> usize {
        if self.has_ended { 0 } else { WINDOW - self.bytes.len() }
    }

    /// This was read; its number.
    pub fn read(&mut self, bytes: &[u8]) -> u64 {
        let offset = self.end();
        self.bytes.extend(bytes);
        offset
    }

    /// Nothing more comes; how much there was.
    pub fn ended(&mut self) -> u64 {
        self.has_ended = true;
        self.end()
    }

    /// The program has taken so much. What was not sent cannot have been taken.
    pub fn taken(&mut self, count: u64) {
        let count = count.clamp(self.taken, self.end());
        let gone = usize::try_from(count - self.taken).unwrap_or(usize::MAX);
        self.bytes.drain(..gone);
        self.taken = count;
        if self.bytes.is_empty() {
            self.bytes.shrink_to(0);
        }
    }

    /// What is to be sent on a new connection: bytes with their number, and where it ends, if it does.
    pub fn again(&self) -> (u64, Vec<u8>, Option<u64>) {
        let bytes = self.bytes.iter().copied().collect();
        (self.taken, bytes, self.has_ended.then(|| self.end()))
    }

    fn end(&self) -> u64 {
        self.taken + self.bytes.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_taken_is_sent_again() {
        let mut replay = Replay::from(100);
        assert_eq!(replay.read(b"hello "), 100);
        assert_eq!(replay.read(b"world"), 106);
        replay.taken(103);
        replay.taken(50);
        assert_eq!(replay.again(), (103, b"lo world".to_vec(), None));
        assert_eq!(replay.room(), WINDOW - 8);
        assert_eq!(replay.ended(), 111);
        replay.taken(u64::MAX);
        assert_eq!((replay.again(), replay.room()), ((111, Vec::new(), Some(111)), 0));
    }
}
