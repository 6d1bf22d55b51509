//! State of one program: its output, its pending input, the attached client, and how the program ended. Pure but
//! for the clock that callers pass in.

use std::collections::VecDeque;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use super::ring::Ring;

/// Maximum number of input bytes that wait for the program.
pub const MAX_INPUT: usize = 256 * 1024;
/// Maximum number of output bytes in one `News::Output`.
const PART: usize = 64 * 1024;
/// Time that a program has to end after SIGHUP or SIGTERM before it is killed.
pub const GRACE: Duration = Duration::from_secs(10);

/// Policy for a program to which no client is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Away {
    /// The program keeps its unacknowledged output, blocks when that is full, and is ended after this time.
    Ends(Duration),
    /// The program keeps running, and only the newest bytes of its output are kept.
    GoesOn,
}

/// End of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Exit status, or the reason why it is not known.
    pub status: Result<ExitStatus, String>,
    /// True if the program was ended because of its time limit.
    pub timed_out: bool,
    /// True if other processes still held the outputs open, so that later output is lost.
    pub cut_off: bool,
}

/// Progress of ending a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The program runs and was not asked to end.
    Runs,
    /// The program was sent a signal to end, at this time; it is killed `GRACE` later.
    Asked(Instant),
    /// All processes of the program were killed.
    Killed,
}

/// Position of a client in the streams of a program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Position {
    /// Numbers of the next bytes of standard output and standard error.
    pub outputs: [u64; 2],
    /// Bytes of input that the client knows to have been given to the program.
    pub input: u64,
}

/// Message for the attached client.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    /// Bytes of output 0 or 1, with the number of the first byte.
    Output(usize, u64, Vec<u8>),
    /// The program has been given this many bytes of input in total.
    InputTaken(u64),
    /// The program has ended, and all of its output was sent before this.
    Ended(Ended),
    /// Another client has attached in place of this one.
    Replaced,
    /// The program is no longer known.
    Forgotten,
    /// No message is pending.
    Nothing,
}

/// State of one program; all of its methods return at once.
#[derive(Debug)]
pub struct State {
    rings: [Ring; 2],
    input: VecDeque<u8>,
    input_taken: u64,
    end_of_input: Option<u64>,
    /// Number of the client that has sent the newest input, or its end.
    input_from: Option<u64>,
    /// Number of the attached client. Clients are numbered from 1, in the order in which they attached.
    attached: Option<u64>,
    attachments: u64,
    away_since: Instant,
    /// Policy while no client is attached.
    pub away: Away,
    /// Progress of ending the program.
    pub fate: Fate,
    /// True if the program was asked to end because of its time limit.
    pub timed_out: bool,
    ended: Option<Ended>,
    /// True once the process was waited for: from then on its number may belong to another process.
    pub was_waited_for: bool,
    /// True once nobody needs to learn how the program ended, so that its record can be dropped.
    pub forgotten: bool,
}

impl State {
    /// Creates the state of a program that starts now and keeps `ring` bytes of each output.
    pub fn new(ring: usize, away: Away, now: Instant) -> Self {
        Self {
            rings: [Ring::new(ring), Ring::new(ring)],
            input: VecDeque::new(),
            input_taken: 0,
            end_of_input: None,
            input_from: None,
            attached: None,
            attachments: 0,
            away_since: now,
            away,
            fate: Fate::Runs,
            timed_out: false,
            ended: None,
            was_waited_for: false,
            forgotten: false,
        }
    }

    /// Attaches a client in place of the one before, and returns the number of the new one.
    pub fn attach(&mut self) -> u64 {
        self.attachments += 1;
        self.attached = Some(self.attachments);
        self.attachments
    }

    /// Detaches the client with this number; ignored if another client has attached since.
    pub fn leave(&mut self, number: u64, now: Instant) {
        if self.is_attached_to(number) {
            self.attached = None;
            self.away_since = now;
        }
    }

    /// Returns whether the client with this number is attached, and no other has attached since.
    pub fn is_attached_to(&self, number: u64) -> bool {
        self.attached == Some(number)
    }

    /// Returns whether a client is attached.
    pub fn is_attached(&self) -> bool {
        self.attached.is_some()
    }

    /// Returns the numbers of the oldest bytes of the outputs that are kept.
    pub fn oldest(&self) -> [u64; 2] {
        [self.rings[0].start(), self.rings[1].start()]
    }

    /// Returns the bytes that are kept of the first `outputs` outputs; for a running program, the maximum that may be
    /// kept.
    pub fn most_kept(&self, outputs: usize) -> usize {
        let has_ended = self.ended.is_some();
        let most = |ring: &Ring| if has_ended { ring.kept() } else { ring.most() };
        self.rings.iter().take(outputs).map(most).sum()
    }

    /// Returns how many bytes of input were given to the program.
    pub fn input_taken(&self) -> u64 {
        self.input_taken
    }

    /// Returns how many bytes of input have arrived, which is the number of the next byte, whether or not the program
    /// has been given them.
    pub fn input_received(&self) -> u64 {
        self.input_taken + self.input.len() as u64
    }

    /// Returns whether the end of the input is known, so that nothing can be added to it.
    pub fn input_has_ended(&self) -> bool {
        self.end_of_input.is_some()
    }

    /// Returns the number of the client that has sent the newest input, or its end.
    pub fn input_from(&self) -> Option<u64> {
        self.input_from
    }

    /// Returns how many bytes of an output may be read from the program now. Without a client, `Away::GoesOn` always
    /// allows more: the oldest bytes are dropped.
    pub fn room(&self, which: usize) -> usize {
        if self.away == Away::GoesOn && self.attached.is_none() { PART } else { self.rings[which].room() }
    }

    /// Adds bytes that the program has written.
    pub fn written(&mut self, which: usize, bytes: &[u8]) {
        self.rings[which].push(bytes);
    }

    /// Drops the output bytes before these numbers, because the client has received them.
    pub fn acknowledge(&mut self, before: [u64; 2]) {
        for (ring, before) in self.rings.iter_mut().zip(before) {
            ring.forget(before);
        }
    }

    /// Takes input whose first byte has this number; bytes that have arrived before are skipped. Returns false, and
    /// takes nothing, if there is a gap, no space, or the input would go past its end.
    pub fn give(&mut self, offset: u64, bytes: &[u8]) -> bool {
        let have = self.input_received();
        let Some(known) = have.checked_sub(offset) else { return false };
        let known = usize::try_from(known).unwrap_or(usize::MAX).min(bytes.len());
        let new = &bytes[known..];
        let over = self.end_of_input.is_some_and(|end| have + new.len() as u64 > end);
        if over || self.input.len() + new.len() > MAX_INPUT {
            return false;
        }
        if !new.is_empty() {
            self.input.extend(new);
            self.input_from = self.attached;
        }
        true
    }

    /// Ends the input after `at` bytes. Returns false if more have arrived already, or it ends elsewhere.
    pub fn end_input(&mut self, at: u64) -> bool {
        let have = self.input_received();
        let fits = have <= at && self.end_of_input.is_none_or(|end| end == at);
        if fits && self.end_of_input.is_none() {
            self.end_of_input = Some(at);
            self.input_from = self.attached;
        }
        fits
    }

    /// Returns pending input, not necessarily all of it.
    pub fn waiting_input(&self) -> &[u8] {
        let (front, back) = self.input.as_slices();
        if front.is_empty() { back } else { front }
    }

    /// Removes pending input that the program has read.
    pub fn take_input(&mut self, count: usize) {
        let count = count.min(self.input.len());
        self.input.drain(..count);
        self.input_taken += count as u64;
        if self.input.is_empty() {
            self.input = VecDeque::new();
        }
    }

    /// Discards the pending input, because the program no longer reads.
    pub fn refuse_input(&mut self) {
        self.take_input(usize::MAX);
    }

    /// Returns whether all input was given to the program and its end is known.
    pub fn has_no_more_input(&self) -> bool {
        self.end_of_input == Some(self.input_taken)
    }

    /// Records the end of the program.
    pub fn end(&mut self, status: Result<ExitStatus, String>, cut_off: bool) {
        self.ended = Some(Ended { status, timed_out: self.timed_out, cut_off });
    }

    /// Returns how the program ended, or `None` while it runs.
    pub fn ended(&self) -> Option<&Ended> {
        self.ended.as_ref()
    }

    /// Returns the next action that falls due by time alone, and when.
    pub fn due(&self, limit: Option<Instant>) -> Option<(Instant, Due)> {
        match self.fate {
            Fate::Killed => None,
            Fate::Asked(since) => Some((since + GRACE, Due::Kill)),
            Fate::Runs => {
                let away = match self.away {
                    Away::Ends(after) if self.attached.is_none() => {
                        Some((self.away_since + after, Due::HangUp))
                    }
                    _ => None,
                };
                let limit = limit.map(|limit| (limit, Due::TimeOut));
                away.into_iter().chain(limit).min_by_key(|(when, _)| *when)
            }
        }
    }

    /// Returns the next message for the client with this number, and advances its position.
    pub fn news(&self, number: u64, position: &mut Position) -> News {
        if !self.is_attached_to(number) {
            return News::Replaced;
        }
        for (which, ring) in self.rings.iter().enumerate() {
            let (at, bytes) = ring.read(position.outputs[which], PART);
            if !bytes.is_empty() {
                position.outputs[which] = at + bytes.len() as u64;
                return News::Output(which, at, bytes);
            }
        }
        if self.input_taken != position.input {
            position.input = self.input_taken;
            return News::InputTaken(self.input_taken);
        }
        match &self.ended {
            Some(ended) => News::Ended(ended.clone()),
            None if self.forgotten => News::Forgotten,
            None => News::Nothing,
        }
    }
}

/// Action that falls due because time has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// No client has attached again in time.
    HangUp,
    /// The time limit of the program has expired.
    TimeOut,
    /// The program has not ended within `GRACE` after it was asked to.
    Kill,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(away: Away) -> (State, Instant) {
        let now = Instant::now();
        (State::new(8, away, now), now)
    }

    #[test]
    fn whoever_attaches_again_misses_nothing() {
        let (mut state, now) = state(Away::Ends(GRACE));
        let first = state.attach();
        state.written(0, b"12345678");
        assert_eq!(state.room(0), 0);
        let mut position = Position::default();
        assert_eq!(state.news(first, &mut position), News::Output(0, 0, b"12345678".to_vec()));
        assert_eq!(state.news(first, &mut position), News::Nothing);
        state.acknowledge([3, 0]);
        assert_eq!(state.room(0), 3);
        state.leave(first, now);
        state.written(0, b"9ab");
        assert_eq!(state.room(0), 0, "it waits");
        let second = state.attach();
        assert_eq!(state.news(first, &mut position), News::Replaced);
        state.leave(first, now);
        assert!(state.is_attached(), "whoever was replaced leaves later");
        let mut position = Position { outputs: [3, 0], input: 0 };
        assert_eq!(state.news(second, &mut position), News::Output(0, 3, b"456789ab".to_vec()));
        state.end(Err("x".into()), false);
        assert!(matches!(state.news(second, &mut position), News::Ended(_)));
    }

    #[test]
    fn a_program_that_goes_on_loses_its_oldest_bytes() {
        let (mut state, now) = state(Away::GoesOn);
        assert_eq!(state.room(1), PART);
        state.written(1, b"0123456789abcdef");
        assert_eq!(state.due(None), None);
        let number = state.attach();
        assert_eq!(state.room(1), 0, "it waits for whoever is attached");
        let mut position = Position::default();
        assert_eq!(state.news(number, &mut position), News::Output(1, 8, b"89abcdef".to_vec()));
        state.leave(number, now);
        assert_eq!(state.due(Some(now)), Some((now, Due::TimeOut)));
    }

    #[test]
    fn input_is_taken_once_and_no_more_than_fits() {
        let (mut state, _) = state(Away::GoesOn);
        assert!(state.give(0, b"hello"));
        assert!(state.give(3, b"lo world"), "the first two are known");
        assert_eq!(state.waiting_input(), b"hello world");
        assert!(!state.give(12, b"x"), "one is missing");
        state.take_input(6);
        assert_eq!((state.waiting_input(), state.input_taken()), (&b"world"[..], 6));
        assert!(state.give(0, b"hello"), "all of it is known");
        assert!(!state.end_input(10) && state.end_input(11) && !state.end_input(12));
        assert!(!state.give(11, b"!"), "after the end");
        assert!(!state.has_no_more_input());
        state.take_input(5);
        assert!(state.has_no_more_input());
        let (mut state, _) = self::state(Away::GoesOn);
        assert!(state.give(0, &vec![0; MAX_INPUT]) && !state.give(MAX_INPUT as u64, b"x"));
        state.refuse_input();
        assert_eq!(state.input_taken(), MAX_INPUT as u64);
    }

    #[test]
    fn it_is_known_from_whom_the_newest_input_came() {
        let (mut state, now) = state(Away::GoesOn);
        assert_eq!(state.input_from(), None);
        let first = state.attach();
        assert!(state.give(0, b"hello"));
        state.leave(first, now);
        let second = state.attach();
        assert!(state.give(0, b"hello"), "nothing of it is new");
        assert_eq!(state.input_from(), Some(first));
        assert!(state.give(5, b"!"));
        assert_eq!(state.input_from(), Some(second));
        let third = state.attach();
        assert!(state.end_input(6));
        state.attach();
        assert!(state.end_input(6));
        assert_eq!(state.input_from(), Some(third));
    }

    #[test]
    fn a_program_that_nobody_comes_back_to_is_ended() {
        let (mut state, now) = state(Away::Ends(Duration::from_secs(30)));
        let away = now + Duration::from_secs(30);
        assert_eq!(state.due(None), Some((away, Due::HangUp)));
        assert_eq!(state.due(Some(now)), Some((now, Due::TimeOut)));
        let number = state.attach();
        assert_eq!(state.due(None), None);
        state.leave(number, away);
        assert_eq!(state.due(None), Some((away + Duration::from_secs(30), Due::HangUp)));
        state.fate = Fate::Asked(now);
        assert_eq!(state.due(Some(now)), Some((now + GRACE, Due::Kill)));
        state.fate = Fate::Killed;
        assert_eq!(state.due(Some(now)), None);
    }
}
