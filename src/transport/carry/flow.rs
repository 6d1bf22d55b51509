//! Flow control for each direction of a connection: the credit of the sender, and the data that the receiver
//! holds. Pure.
//!
//! ```text
//! sender: credit ──spend──▶ data ──▶ inbox, kept ──passed on──▶ owed ──a quarter of the window──▶ granted: credit again
//! ```
//!
//! For each inbox, the sender's remaining credit, the data that is kept and the credit that is owed to the
//! sender add up to the window.

use std::collections::VecDeque;
use std::io::IoSlice;

/// Credit of each direction when a connection begins.
pub const INITIAL: usize = 32 << 10;
/// Bytes of one message, which has some more around them: together they fit a frame of HTTP/2.
pub const PART: usize = (16 << 10) - 64;
/// No receiver has use for more credit.
const MOST: usize = 1 << 30;
/// A buffer of more than this is given back as soon as nothing is in it.
const KEPT: usize = 4 << 10;

/// Violation of the flow control by the other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Breach {
    /// More data than the credit allows.
    #[error("more data than the credit allows")]
    Credit,
    /// Data after the end of the stream.
    #[error("data after the end")]
    AfterEnd,
    /// Credit beyond the maximum.
    #[error("more credit than 1 GiB")]
    TooMuchCredit,
}

/// Number of bytes that the sender may still send.
#[derive(Debug)]
pub struct Credit(usize);

impl Default for Credit {
    fn default() -> Self {
        Self(INITIAL)
    }
}

impl Credit {
    /// Returns the remaining credit in bytes.
    pub fn left(&self) -> usize {
        self.0
    }

    /// Deducts bytes that were sent.
    pub fn spend(&mut self, bytes: usize) {
        self.0 = self.0.saturating_sub(bytes);
    }

    /// The receiver gives more.
    ///
    /// # Errors
    /// If that is too much.
    pub fn grant(&mut self, bytes: usize) -> Result<(), Breach> {
        let more = self.0.checked_add(bytes).filter(|more| *more <= MOST);
        self.0 = more.ok_or(Breach::TooMuchCredit)?;
        Ok(())
    }
}

/// Received data that was not passed on yet.
#[derive(Debug)]
pub struct Inbox {
    kept: VecDeque<u8>,
    window: usize,
    /// Credit that the sender still has, in bytes.
    open: usize,
    /// Bytes that were passed on, and not yet granted as credit again.
    owed: usize,
    has_ended: bool,
    /// True if the data is no longer needed, and is discarded.
    is_thrown_away: bool,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            kept: VecDeque::new(),
            window: INITIAL,
            open: INITIAL,
            owed: 0,
            has_ended: false,
            is_thrown_away: false,
        }
    }
}

impl Inbox {
    /// Enlarges the window to this size, if it is smaller, and returns the additional credit.
    pub fn widen(&mut self, window: usize) -> usize {
        let more = window.saturating_sub(self.window);
        self.window += more;
        self.open += more;
        more
    }

    /// Takes what the sender has sent.
    ///
    /// # Errors
    /// If that is more than it may send.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<(), Breach> {
        if self.has_ended {
            return Err(Breach::AfterEnd);
        }
        self.open = self.open.checked_sub(bytes.len()).ok_or(Breach::Credit)?;
        if !self.is_thrown_away {
            let wanted = self.kept.len() + bytes.len();
            if wanted > self.kept.capacity() {
                // No more than it may keep, whatever would be next.
                let room = wanted.next_power_of_two().min(self.window).max(wanted);
                self.kept.reserve_exact(room - self.kept.len());
            }
            self.kept.extend(bytes);
        }
        Ok(())
    }

    /// Marks the end of the stream.
    ///
    /// # Errors
    /// If the stream has ended already.
    pub fn end(&mut self) -> Result<(), Breach> {
        if std::mem::replace(&mut self.has_ended, true) { Err(Breach::AfterEnd) } else { Ok(()) }
    }

    /// The sender has said that nothing more comes.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns whether the stream has ended and all data was passed on.
    pub fn is_done(&self) -> bool {
        self.has_ended && self.kept.is_empty()
    }

    /// Returns the pending data, in two parts.
    pub fn waiting(&self) -> [IoSlice<'_>; 2] {
        let (first, second) = self.kept.as_slices();
        [IoSlice::new(first), IoSlice::new(second)]
    }

    /// Returns whether no data is pending.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Removes pending bytes that were passed on, and returns the credit to grant for them and for earlier ones,
    /// if any is due.
    pub fn hand_on(&mut self, bytes: usize) -> Option<usize> {
        let bytes = bytes.min(self.kept.len());
        self.kept.drain(..bytes);
        if self.kept.is_empty() && self.kept.capacity() > KEPT {
            self.kept = VecDeque::new();
        }
        self.owed += bytes;
        if self.owed < self.window / 4 || self.has_ended {
            return None;
        }
        let credit = std::mem::take(&mut self.owed);
        self.open += credit;
        Some(credit)
    }

    /// Discards the pending data, and all that arrives later.
    pub fn throw_away(&mut self) {
        self.is_thrown_away = true;
        self.kept = VecDeque::new();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn waiting(inbox: &Inbox) -> Vec<u8> {
        inbox.waiting().iter().flat_map(|part| part.to_vec()).collect()
    }

    #[test]
    fn nobody_sends_more_than_it_may() {
        let mut inbox = Inbox::default();
        inbox.receive(&vec![0; INITIAL]).unwrap();
        assert_eq!(inbox.receive(b"x"), Err(Breach::Credit));
        assert_eq!(inbox.hand_on(INITIAL / 8), None);
        assert_eq!(inbox.receive(b"x"), Err(Breach::Credit), "that was not said yet");
        assert_eq!(inbox.hand_on(INITIAL / 8), Some(INITIAL / 4));
        inbox.receive(&vec![0; INITIAL / 4]).unwrap();
        assert_eq!(inbox.receive(b"x"), Err(Breach::Credit));
        assert_eq!(inbox.widen(INITIAL + 1), 1);
        inbox.receive(b"x").unwrap();
        assert_eq!(inbox.widen(INITIAL), 0, "a window does not shrink");
    }

    #[test]
    fn nothing_comes_after_the_end() {
        let mut inbox = Inbox::default();
        inbox.receive(b"ab").unwrap();
        inbox.end().unwrap();
        assert_eq!((inbox.end(), inbox.receive(b"")), (Err(Breach::AfterEnd), Err(Breach::AfterEnd)));
        assert!(!inbox.is_done());
        assert_eq!(inbox.hand_on(2), None);
        assert!(inbox.is_done());
    }

    #[test]
    fn what_is_thrown_away_gives_no_credit() {
        let mut inbox = Inbox::default();
        inbox.receive(&vec![0; INITIAL / 2]).unwrap();
        inbox.throw_away();
        inbox.receive(&vec![0; INITIAL / 2]).unwrap();
        assert_eq!((inbox.hand_on(INITIAL), inbox.receive(b"x")), (None, Err(Breach::Credit)));
    }

    #[test]
    fn credit_is_bounded() {
        let mut credit = Credit::default();
        assert_eq!(credit.grant(MOST), Err(Breach::TooMuchCredit));
        credit.grant(MOST - INITIAL).unwrap();
        assert_eq!(
            (credit.grant(1), credit.grant(usize::MAX)),
            (Err(Breach::TooMuchCredit), Err(Breach::TooMuchCredit))
        );
        credit.spend(MOST);
        assert_eq!(credit.left(), 0);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Send(usize),
        HandOn(usize),
        Widen(usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..40_000_usize).prop_map(Step::Send),
            (0..40_000_usize).prop_map(Step::HandOn),
            (0..300_000_usize).prop_map(Step::Widen),
        ];
        proptest::collection::vec(step, 0..60)
    }

    proptest! {
        /// Checks that a sender that keeps to its credit is never refused and never blocked forever, that every byte
        /// arrives in order, and that no more than the window is kept.
        #[test]
        fn both_ends_agree(steps in steps()) {
            let (mut credit, mut inbox) = (Credit::default(), Inbox::default());
            let (mut next, mut expected) = (0u8, 0u8);
            for step in steps {
                match step {
                    Step::Send(bytes) => {
                        let bytes = bytes.min(credit.left());
                        let data: Vec<u8> = (0..bytes).map(|_| { next = next.wrapping_add(1); next }).collect();
                        credit.spend(bytes);
                        prop_assert_eq!(inbox.receive(&data), Ok(()));
                    }
                    Step::HandOn(bytes) => {
                        let all = waiting(&inbox);
                        let bytes = bytes.min(all.len());
                        for byte in &all[..bytes] {
                            expected = expected.wrapping_add(1);
                            prop_assert_eq!(*byte, expected);
                        }
                        if let Some(more) = inbox.hand_on(bytes) {
                            credit.grant(more).unwrap();
                        }
                    }
                    Step::Widen(window) => credit.grant(inbox.widen(window)).unwrap(),
                }
                prop_assert_eq!(inbox.open, credit.left());
                prop_assert_eq!(inbox.open + inbox.kept.len() + inbox.owed, inbox.window);
                prop_assert!(!inbox.kept.is_empty() || credit.left() > 0, "stuck");
            }
        }

        /// Checks that no more than the credit is kept, whatever the other end sends.
        #[test]
        fn a_sender_that_breaks_the_rules_fills_nothing(parts in proptest::collection::vec(0..50_000_usize, 0..20)) {
            let mut inbox = Inbox::default();
            for bytes in parts {
                let _ = inbox.receive(&vec![0; bytes]);
                prop_assert!(inbox.kept.len() <= INITIAL && inbox.kept.capacity() <= INITIAL);
            }
        }
    }
}
