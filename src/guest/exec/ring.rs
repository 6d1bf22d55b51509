//! Output of a program that no client has acknowledged, addressed by byte numbers. Pure.
//!
//! ```text
//! 0 ······ start ████████████ end ── room ──▶
//!   dropped         kept             free
//! ```

use std::collections::VecDeque;

/// Capacity that an empty ring keeps.
const SMALL: usize = 4096;

/// Last bytes of a stream. Memory is allocated as bytes arrive, not in advance.
#[derive(Debug)]
pub struct Ring {
    start: u64,
    bytes: VecDeque<u8>,
    most: usize,
}

impl Ring {
    /// Creates an empty ring that keeps up to `most` bytes.
    pub fn new(most: usize) -> Self {
        Self { start: 0, bytes: VecDeque::new(), most }
    }

    /// Returns the number of the oldest byte that is kept.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns the number of the next byte.
    pub fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Returns the number of bytes that are kept.
    pub fn kept(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the maximum number of bytes that may be kept.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Returns how many bytes can be added without dropping any.
    pub fn room(&self) -> usize {
        self.most - self.bytes.len()
    }

    /// Adds bytes; drops the oldest ones if there is no space.
    pub fn push(&mut self, bytes: &[u8]) {
        // Only the last bytes fit if there are more than the ring holds.
        let (lost, bytes) = bytes.split_at(bytes.len().saturating_sub(self.most));
        self.drop_oldest((self.bytes.len() + bytes.len()).saturating_sub(self.most));
        if !lost.is_empty() {
            self.start = self.end() + lost.len() as u64;
            self.bytes.clear();
        }
        self.bytes.extend(bytes);
    }

    /// Drops the bytes before this number. A number beyond the end counts as the end: bytes that were never written
    /// cannot be acknowledged.
    pub fn forget(&mut self, before: u64) {
        let before = before.min(self.end());
        let count = before.saturating_sub(self.start);
        self.drop_oldest(usize::try_from(count).unwrap_or(usize::MAX));
        if self.bytes.is_empty() && self.bytes.capacity() > SMALL {
            self.bytes = VecDeque::new();
        }
    }

    fn drop_oldest(&mut self, count: usize) {
        let count = count.min(self.bytes.len());
        self.bytes.drain(..count);
        self.start += count as u64;
    }

    /// Returns at most `most` bytes from this number on, or from the oldest byte that is kept, with the number of the
    /// first.
    pub fn read(&self, from: u64, most: usize) -> (u64, Vec<u8>) {
        let from = from.clamp(self.start, self.end());
        let skipped = usize::try_from(from - self.start).unwrap_or(usize::MAX);
        let (front, back) = self.bytes.as_slices();
        let mut read = Vec::new();
        let first = front.get(skipped..).unwrap_or_default();
        let second = back.get(skipped.saturating_sub(front.len())..).unwrap_or_default();
        let count = most.min(first.len() + second.len());
        read.reserve_exact(count);
        read.extend_from_slice(&first[..count.min(first.len())]);
        read.extend_from_slice(&second[..count - read.len()]);
        (from, read)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Push(Vec<u8>),
        Forget(u64),
        Read(u64, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            proptest::collection::vec(any::<u8>(), 0..40).prop_map(Step::Push),
            (0u64..300).prop_map(Step::Forget),
            (0u64..300, 0usize..40).prop_map(|(from, most)| Step::Read(from, most)),
        ]
    }

    proptest! {
        /// Compares the ring with a stream that keeps everything.
        #[test]
        fn what_is_read_is_what_was_written_under_its_number(steps in proptest::collection::vec(step(), 0..40), most in 1usize..32) {
            let mut ring = Ring::new(most);
            let mut all: Vec<u8> = Vec::new();
            let mut forgotten = 0;
            for step in steps {
                match step {
                    Step::Push(bytes) => {
                        let fits = bytes.len() <= ring.room();
                        let start = ring.start();
                        ring.push(&bytes);
                        all.extend(&bytes);
                        prop_assert!(!fits || ring.start() == start, "nothing goes while there is room");
                    }
                    Step::Forget(before) => {
                        ring.forget(before);
                        forgotten = forgotten.max(before.min(all.len() as u64));
                    }
                    Step::Read(from, most) => {
                        let (at, bytes) = ring.read(from, most);
                        prop_assert!(at >= ring.start() && (at == from || from < ring.start() || from > ring.end()));
                        let at = usize::try_from(at).unwrap();
                        prop_assert_eq!(&all[at..at + bytes.len()], &bytes[..]);
                        prop_assert!(bytes.len() == most || at + bytes.len() == all.len());
                    }
                }
                prop_assert_eq!(ring.end(), all.len() as u64);
                prop_assert!(ring.end() - ring.start() <= most as u64 && ring.start() >= forgotten);
                prop_assert_eq!(ring.room() as u64, most as u64 - (ring.end() - ring.start()));
            }
        }
    }

    #[test]
    fn an_empty_ring_gives_its_memory_back() {
        let mut ring = Ring::new(1 << 18);
        ring.push(&vec![1; 1 << 18]);
        assert_eq!(ring.room(), 0);
        ring.forget(u64::MAX);
        assert_eq!((ring.start(), ring.end(), ring.bytes.capacity()), (1 << 18, 1 << 18, 0));
    }
}
