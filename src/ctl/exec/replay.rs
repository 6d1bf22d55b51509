//! Input that a program has not taken yet, which is sent again when a connection breaks. Pure.

use std::collections::VecDeque;

/// Limit of the bytes beyond those that the program has taken.
pub const WINDOW: usize = 256 * 1024;

/// Input read here, from the first byte that the program has not taken yet.
#[derive(Debug, Default)]
pub struct Replay {
    /// Number of bytes that the program has taken.
    taken: u64,
    /// Number of the first byte that is kept: `taken`, unless others have sent some that the program has not
    /// taken yet.
    start: u64,
    bytes: VecDeque<u8>,
    has_ended: bool,
}

impl Replay {
    /// Starts after input that others have sent: `received` bytes of it have arrived, and the program has taken
    /// `taken` of them.
    pub fn from(taken: u64, received: u64) -> Self {
        Self { taken, start: received.max(taken), ..Self::default() }
    }

    /// Returns how many more bytes may be read now.
    pub fn room(&self) -> usize {
        let waiting = usize::try_from(self.end() - self.taken).unwrap_or(usize::MAX);
        if self.has_ended { 0 } else { WINDOW.saturating_sub(waiting) }
    }

    /// Adds input that was read; returns the number of its first byte.
    pub fn read(&mut self, bytes: &[u8]) -> u64 {
        let offset = self.end();
        self.bytes.extend(bytes);
        offset
    }

    /// Marks the end of the input; returns its total length.
    pub fn ended(&mut self) -> u64 {
        self.has_ended = true;
        self.end()
    }

    /// Returns whether the input has ended.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Records how many bytes the program has taken. The count is limited to the input that was read.
    pub fn taken(&mut self, count: u64) {
        let count = count.clamp(self.taken, self.end());
        let gone = usize::try_from(count.saturating_sub(self.start)).unwrap_or(usize::MAX);
        self.bytes.drain(..gone);
        self.taken = count;
        self.start = self.start.max(count);
        if self.bytes.is_empty() {
            self.bytes.shrink_to(0);
        }
    }

    /// Returns what has to be sent on a new connection: the number of the first byte, the bytes, and the total
    /// length if the input has ended.
    pub fn again(&self) -> (u64, Vec<u8>, Option<u64>) {
        let bytes = self.bytes.iter().copied().collect();
        (self.start, bytes, self.has_ended.then(|| self.end()))
    }

    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_taken_is_sent_again() {
        let mut replay = Replay::from(100, 100);
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

    #[test]
    fn what_others_have_sent_is_counted_and_not_sent_again() {
        let mut replay = Replay::from(100, 130);
        assert_eq!(replay.room(), WINDOW - 30);
        assert_eq!(replay.read(b"hello"), 130);
        replay.taken(120);
        assert_eq!((replay.again(), replay.room()), ((130, b"hello".to_vec(), None), WINDOW - 15));
        replay.taken(132);
        assert_eq!((replay.again(), replay.room()), ((132, b"llo".to_vec(), None), WINDOW - 3));
        assert_eq!(Replay::from(100, 100 + WINDOW as u64).room(), 0);
    }
}
