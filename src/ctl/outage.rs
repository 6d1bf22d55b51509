//! The time without a connection to a guest or one of its programs: when a person is told of it, and when it is too long. Pure.

use std::time::{Duration, Instant};

use tonic::Code;

/// After how long a person is told.
const QUIET: Duration = Duration::from_secs(2);
/// For how long a host half that has just started may not know its VMs yet, or keep its socket closed.
const SETTLED: Duration = Duration::from_secs(10);

/// From the loss of a connection until another one is attached to the program.
#[derive(Debug)]
pub struct Outage {
    patience: Duration,
    since: Option<Instant>,
    /// Since when it is only said what may be said too early.
    early_since: Option<Instant>,
    why: String,
    is_told: bool,
}

impl Outage {
    /// None yet; later ones may take so long.
    pub fn none(patience: Duration) -> Self {
        Self { patience, since: None, early_since: None, why: String::new(), is_told: false }
    }

    /// A connection was lost, or came to nothing, for this reason.
    pub fn goes_on(&mut self, why: String, now: Instant) {
        self.early_since = None;
        self.fails(why, now);
    }

    /// The same, for a reason that is final unless the host half has only just started. Whether that may be.
    pub fn may_be_early(&mut self, why: String, now: Instant) -> bool {
        self.fails(why, now);
        now.duration_since(*self.early_since.get_or_insert(now)) <= SETTLED
    }

    fn fails(&mut self, why: String, now: Instant) {
        self.since.get_or_insert(now);
        self.why = why;
    }

    /// The guest answers, or the program is attached to.
    pub fn ends(&mut self) {
        *self = Self::none(self.patience);
    }

    /// The program does not wait any longer.
    pub fn is_too_long(&self, now: Instant) -> bool {
        self.since.is_some_and(|since| now.duration_since(since) > self.patience)
    }

    /// For how long there is none.
    pub fn lasts(&self, now: Instant) -> Duration {
        self.since.map_or(Duration::ZERO, |since| now.duration_since(since))
    }

    /// When a person is to be told, unless that was done.
    pub fn tell_at(&self) -> Option<Instant> {
        self.since.filter(|_| !self.is_told).map(|since| since + QUIET)
    }

    /// A person is told now; of what.
    pub fn tell(&mut self) -> &str {
        self.is_told = true;
        &self.why
    }

    /// A person knows of it.
    pub fn is_told(&self) -> bool {
        self.is_told
    }

    /// The last reason.
    pub fn why(&self) -> &str {
        &self.why
    }
}

/// Whether what was refused with this code may be granted a little later.
pub fn may_pass(code: Code, by_guest: bool) -> bool {
    match code {
        Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded => true,
        // Without a session; a guest has other conditions, which stay.
        Code::FailedPrecondition => !by_guest,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_a_program_that_is_attached_to_ends_an_outage() {
        let begun = Instant::now();
        let mut outage = Outage::none(24 * SECOND);
        assert_eq!((outage.tell_at(), outage.is_too_long(begun)), (None, false));
        // However long each attempt takes.
        for at in [0, 10, 20] {
            outage.goes_on(format!("reason {at}"), begun + at * SECOND);
        }
        assert_eq!(outage.tell_at(), Some(begun + QUIET));
        assert_eq!(outage.tell(), "reason 20");
        assert_eq!((outage.tell_at(), outage.is_told()), (None, true));
        assert!(!outage.is_too_long(begun + 24 * SECOND));
        assert!(outage.is_too_long(begun + 25 * SECOND));
        outage.ends();
        assert!(!outage.is_too_long(begun + 25 * SECOND) && !outage.is_told());
        outage.goes_on("another".to_owned(), begun + 30 * SECOND);
        assert_eq!(outage.tell_at(), Some(begun + 32 * SECOND));
    }

    #[test]
    fn what_a_host_half_says_too_early_is_final_when_it_goes_on_saying_so() {
        let begun = Instant::now();
        let mut outage = Outage::none(600 * SECOND);
        outage.goes_on("not running".to_owned(), begun);
        let mut says = |at: u32| outage.may_be_early("unknown".to_owned(), begun + at * SECOND);
        assert!(says(60) && says(70));
        assert!(!says(71));
        outage.goes_on("not running".to_owned(), begun + 72 * SECOND);
        assert!(outage.may_be_early("unknown".to_owned(), begun + 73 * SECOND));
    }

    #[test]
    fn what_does_not_change_by_itself_is_not_asked_again() {
        for code in [Code::Unavailable, Code::ResourceExhausted, Code::DeadlineExceeded] {
            assert!(may_pass(code, false) && may_pass(code, true), "{code:?}");
        }
        assert!(may_pass(Code::FailedPrecondition, false) && !may_pass(Code::FailedPrecondition, true));
        for code in [
            Code::PermissionDenied,
            Code::NotFound,
            Code::Unimplemented,
            Code::InvalidArgument,
            Code::Aborted,
        ] {
            assert!(!may_pass(code, false) && !may_pass(code, true), "{code:?}");
        }
    }
}
