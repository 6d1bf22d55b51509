//! What is known of one program: what it has written, what it is to read, who is attached, and how it ended. Pure but for the
//! clock that callers pass in.

use std::collections::VecDeque;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use super::ring::Ring;

/// Bytes of input that wait for the program.
pub const MAX_INPUT: usize = 256 * 1024;
/// Bytes of output that are told at once.
const PART: usize = 64 * 1024;
/// How long a program that is to end may take before it is killed.
pub const GRACE: Duration = Duration::from_secs(10);

/// What becomes of a program to which nobody is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Away {
    /// It waits with what it has written, and is ended after so long.
    Ends(Duration),
    /// It goes on, and the last bytes are kept.
    GoesOn,
}

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The status, or why that is not known.
    pub status: Result<ExitStatus, String>,
    /// It was ended because of its time limit.
    pub timed_out: bool,
    /// Others hold its outputs open.
    pub cut_off: bool,
}

/// How far a program is from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Nobody wants it to end.
    Runs,
    /// It was asked to end, then.
    Asked(Instant),
    /// All of it was killed.
    Killed,
}

/// How far somebody has read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Position {
    /// The numbers of the bytes of output and errors that come next.
    pub outputs: [u64; 2],
    /// So much input is known to have been taken.
    pub input: u64,
}

/// What is to be told to whoever is attached.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    /// Bytes of an output, 0 or 1, with the number of the first.
    Output(usize, u64, Vec<u8>),
    /// So much input was given to the program.
    InputTaken(u64),
    /// Everything was told.
    Ended(Ended),
    /// Somebody else is attached.
    Replaced,
    /// The program is not known any more.
    Forgotten,
    /// Nothing now.
    Nothing,
}

/// The state.
#[derive(Debug)]
pub struct State {
    rings: [Ring; 2],
    input: VecDeque<u8>,
    input_taken: u64,
    end_of_input: Option<u64>,
    /// The number of the one from whom the newest input came, or its end.
    input_from: Option<u64>,
    /// The number of whoever is attached, counted from 1; what it was before that one.
    attached: Option<u64>,
    attachments: u64,
    away_since: Instant,
    /// What becomes of it without a client.
    pub away: Away,
    /// How far it is from its end.
    pub fate: Fate,
    /// It was asked to end because of its time limit.
    pub timed_out: bool,
    ended: Option<Ended>,
    /// Its process is gone: the number may be another one's.
    pub was_waited_for: bool,
    /// Nobody is to be told anything any more.
    pub forgotten: bool,
}

impl State {
    /// Of a program that starts now, and keeps `ring` bytes of each output.
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

    /// Somebody attaches, and whoever was before does not count any more. Tells its number.
    pub fn attach(&mut self) -> u64 {
        self.attachments += 1;
        self.attached = Some(self.attachments);
        self.attachments
    }

    /// The one with this number is gone.
    pub fn leave(&mut self, number: u64, now: Instant) {
        if self.is_attached_to(number) {
            self.attached = None;
            self.away_since = now;
        }
    }

    /// Whether the one with this number is attached, and nobody has come since.
    pub fn is_attached_to(&self, number: u64) -> bool {
        self.attached == Some(number)
    }

    /// Whether somebody is attached.
    pub fn is_attached(&self) -> bool {
        self.attached.is_some()
    }

    /// The numbers of the oldest bytes of the outputs that are kept.
    pub fn oldest(&self) -> [u64; 2] {
        [self.rings[0].start(), self.rings[1].start()]
    }

    /// Bytes that are kept of so many outputs, or of a program that has not ended those that may be.
    pub fn most_kept(&self, outputs: usize) -> usize {
        let has_ended = self.ended.is_some();
        let most = |ring: &Ring| if has_ended { ring.kept() } else { ring.most() };
        self.rings.iter().take(outputs).map(most).sum()
    }

    /// Bytes of input that were given to the program.
    pub fn input_taken(&self) -> u64 {
        self.input_taken
    }

    /// Bytes of input that have arrived, whether or not the program was given them: the number of the one that comes next.
    pub fn input_received(&self) -> u64 {
        self.input_taken + self.input.len() as u64
    }

    /// Whether it is known where the input ends, so that nothing can be added to it.
    pub fn input_has_ended(&self) -> bool {
        self.end_of_input.is_some()
    }

    /// The number of the one from whom the newest input came, or its end.
    pub fn input_from(&self) -> Option<u64> {
        self.input_from
    }

    /// How many bytes of an output may be taken from the program now.
    pub fn room(&self, which: usize) -> usize {
        if self.away == Away::GoesOn && self.attached.is_none() { PART } else { self.rings[which].room() }
    }

    /// The program has written this.
    pub fn written(&mut self, which: usize, bytes: &[u8]) {
        self.rings[which].push(bytes);
    }

    /// Bytes before these numbers have arrived.
    pub fn acknowledge(&mut self, before: [u64; 2]) {
        for (ring, before) in self.rings.iter_mut().zip(before) {
            ring.forget(before);
        }
    }

    /// Takes input whose first byte has this number; what was there before is left out. Whether it fits.
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

    /// No input comes after so many bytes. Whether that can be.
    pub fn end_input(&mut self, at: u64) -> bool {
        let have = self.input_received();
        let fits = have <= at && self.end_of_input.is_none_or(|end| end == at);
        if fits && self.end_of_input.is_none() {
            self.end_of_input = Some(at);
            self.input_from = self.attached;
        }
        fits
    }

    /// The input that waits.
    pub fn waiting_input(&self) -> &[u8] {
        let (front, back) = self.input.as_slices();
        if front.is_empty() { back } else { front }
    }

    /// The program has taken so much of it.
    pub fn take_input(&mut self, count: usize) {
        let count = count.min(self.input.len());
        self.input.drain(..count);
        self.input_taken += count as u64;
        if self.input.is_empty() {
            self.input = VecDeque::new();
        }
    }

    /// The program does not read any more: what waits is thrown away.
    pub fn refuse_input(&mut self) {
        self.take_input(usize::MAX);
    }

    /// All input was given, and no more comes.
    pub fn has_no_more_input(&self) -> bool {
        self.end_of_input == Some(self.input_taken)
    }

    /// It has ended.
    pub fn end(&mut self, status: Result<ExitStatus, String>, cut_off: bool) {
        self.ended = Some(Ended { status, timed_out: self.timed_out, cut_off });
    }

    /// How it ended, if it did.
    pub fn ended(&self) -> Option<&Ended> {
        self.ended.as_ref()
    }

    /// When something is due that depends on nothing but time, and what.
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

    /// What is to be told next to the one with this number, who is at this position, which moves on.
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

/// What comes of time that passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Nobody came back.
    HangUp,
    /// It ran for as long as it may.
    TimeOut,
    /// It did not end when it was asked to.
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
