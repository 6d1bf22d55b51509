//! Time without a connection to a guest or one of its programs: when a person is informed of it, and when it
//! is too long. Pure.

use std::time::{Duration, Instant};

use tonic::Code;

/// Delay before a person is informed.
const QUIET: Duration = Duration::from_secs(2);
/// Time after its start in which a host half may not know its VMs yet, or keep its socket closed.
const SETTLED: Duration = Duration::from_secs(10);

/// Period from the loss of a connection until another one is attached to the program.
#[derive(Debug)]
pub struct Outage {
    patience: Duration,
    since: Option<Instant>,
    /// Time of the first of the latest failures in a row that may be due to a host half that has just started.
    early_since: Option<Instant>,
    why: String,
    is_told: bool,
}

impl Outage {
    /// Returns the state without an outage. Later outages may last for `patience`.
    pub fn none(patience: Duration) -> Self {
        Self { patience, since: None, early_since: None, why: String::new(), is_told: false }
    }

    /// Records that a connection was lost or could not be made, for this reason.
    pub fn goes_on(&mut self, why: String, now: Instant) {
        self.early_since = None;
        self.fails(why, now);
    }

    /// Records a failure that is final unless the host half has only just started. Returns whether that is
    /// possible.
    pub fn may_be_early(&mut self, why: String, now: Instant) -> bool {
        self.fails(why, now);
        now.duration_since(*self.early_since.get_or_insert(now)) <= SETTLED
    }

    fn fails(&mut self, why: String, now: Instant) {
        self.since.get_or_insert(now);
        self.why = why;
    }

    /// Records the end of the outage: the guest answers, or the program is attached to.
    pub fn ends(&mut self) {
        *self = Self::none(self.patience);
    }

    /// Returns whether the program no longer waits for a client.
    pub fn is_too_long(&self, now: Instant) -> bool {
        self.since.is_some_and(|since| now.duration_since(since) > self.patience)
    }

    /// Returns how long there has been no connection.
    pub fn lasts(&self, now: Instant) -> Duration {
        self.since.map_or(Duration::ZERO, |since| now.duration_since(since))
    }

    /// Returns when a person is to be informed; `None` if that was done or is not needed.
    pub fn tell_at(&self) -> Option<Instant> {
        self.since.filter(|_| !self.is_told).map(|since| since + QUIET)
    }

    /// Marks the person as informed, and returns the reason to show.
    pub fn tell(&mut self) -> &str {
        self.is_told = true;
        &self.why
    }

    /// Returns whether the person was informed.
    pub fn is_told(&self) -> bool {
        self.is_told
    }

    /// Returns the last reason.
    pub fn why(&self) -> &str {
        &self.why
    }
}

/// Returns whether a call that was refused with this code may succeed a little later.
pub fn may_pass(code: Code, by_guest: bool) -> bool {
    match code {
        Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded => true,
        // Without a session this is temporary. A guest uses it for other conditions, which last.
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
        // The duration of each attempt does not matter.
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
