//! One health check, and the verdict from its tries. Pure.
//!
//! ```text
//!             success_threshold successes in a row
//!   failed ───────────────────────────────────────▶ healthy
//!  (at first) ◀─────────────────────────────────────
//!             failure_threshold failures in a row
//! ```

use std::time::Duration;

/// Address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Internet Protocol version 4.
    V4,
    /// Internet Protocol version 6.
    V6,
}

/// Check of a port of this guest by periodic TCP connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// Identifier that the client has chosen; returned with each result.
    pub id: String,
    /// Node port to connect to.
    pub port: u16,
    /// Family of the node's address to connect to.
    pub family: Family,
    /// Number of consecutive successes after which the check counts as healthy.
    pub success_threshold: u32,
    /// Number of consecutive failures after which the check counts as failed.
    pub failure_threshold: u32,
    /// Time from the beginning of one try to the beginning of the next.
    pub period: Duration,
    /// Timeout of one try; not longer than the period.
    pub timeout: Duration,
}

/// Present verdict of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// True if the check counts as healthy by its thresholds.
    pub healthy: bool,
    /// Reason why the last try failed; empty if it succeeded.
    pub problem: String,
    /// Number of consecutive tries that contradict the verdict; below the threshold.
    in_a_row: u32,
}

impl Default for Verdict {
    /// Returns the verdict of a check that was not tried yet: it counts as failed.
    fn default() -> Self {
        Self { healthy: false, problem: "it has not been checked yet".to_owned(), in_a_row: 0 }
    }
}

impl Verdict {
    /// Records the outcome of one more try of `check`. Returns whether the reported result has changed.
    pub fn take(&mut self, check: &Check, outcome: Result<(), String>) -> bool {
        let succeeded = outcome.is_ok();
        let (was_healthy, problem) = (self.healthy, outcome.err().unwrap_or_default());
        if succeeded == self.healthy {
            self.in_a_row = 0;
        } else {
            self.in_a_row += 1;
            let needed = if succeeded { check.success_threshold } else { check.failure_threshold };
            if self.in_a_row >= needed {
                (self.healthy, self.in_a_row) = (succeeded, 0);
            }
        }
        let has_changed = was_healthy != self.healthy || self.problem != problem;
        self.problem = problem;
        has_changed
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub fn check(id: &str, port: u16) -> Check {
        let (period, timeout) = (Duration::from_secs(5), Duration::from_secs(3));
        let (id, family) = (id.to_owned(), Family::V4);
        Check { id, port, family, success_threshold: 2, failure_threshold: 3, period, timeout }
    }

    /// Returns the verdict after each of these tries, where `+` is one that succeeds.
    fn course(check: &Check, tries: &str) -> String {
        let mut verdict = Verdict::default();
        let outcome = |sign| if sign == '+' { Ok(()) } else { Err("refused".to_owned()) };
        let after = |sign| {
            verdict.take(check, outcome(sign));
            assert_eq!(verdict.problem.is_empty(), sign == '+', "{tries}");
            if verdict.healthy { 'h' } else { 'f' }
        };
        tries.chars().map(after).collect()
    }

    #[test]
    fn only_tries_in_a_row_reach_a_threshold() {
        let usual = check("a", 1);
        for (tries, expected) in [
            ("++", "fh"),
            ("+-+-+-", "ffffff"),
            ("+-++", "fffh"),
            ("++---+++", "fhhhffhh"),
            ("++--+--+--", "fhhhhhhhhh"),
            ("++-----", "fhhhfff"),
            ("++----+-+", "fhhhfffff"),
        ] {
            assert_eq!(course(&usual, tries), expected, "{tries}");
        }
        let first = Check { success_threshold: 1, failure_threshold: 1, ..usual };
        assert_eq!(course(&first, "-+-+"), "fhfh");
    }

    #[test]
    fn a_change_is_what_others_would_see() {
        let check = check("a", 1);
        let mut verdict = Verdict::default();
        assert!(!verdict.healthy && !verdict.problem.is_empty());
        let failed = |why: &str| Err(why.to_owned());
        for (outcome, changes) in [
            (failed("refused"), true),
            (failed("refused"), false),
            (failed("no answer"), true),
            (Ok(()), true),
            (Ok(()), true),
            (Ok(()), false),
            (failed("refused"), true),
            (failed("refused"), false),
            (failed("refused"), true),
            (failed("refused"), false),
        ] {
            assert_eq!(verdict.take(&check, outcome.clone()), changes, "{outcome:?}: {verdict:?}");
        }
    }

    proptest! {
        /// Compares the verdict with one computed from all tries by the definition of the thresholds.
        #[test]
        fn it_is_as_the_last_tries_were(
            tries in proptest::collection::vec(any::<bool>(), 0..60),
            success_threshold in 1_u32..6,
            failure_threshold in 1_u32..6,
        ) {
            let check = Check { success_threshold, failure_threshold, ..check("a", 1) };
            let (mut verdict, mut expected) = (Verdict::default(), false);
            for count in 1..=tries.len() {
                let last = tries[count - 1];
                verdict.take(&check, if last { Ok(()) } else { Err("refused".to_owned()) });
                let alike = tries[..count].iter().rev().take_while(|one| **one == last).count();
                let needed = if last { success_threshold } else { failure_threshold };
                if alike >= needed as usize {
                    expected = last;
                }
                prop_assert_eq!(verdict.healthy, expected, "{:?}", &tries[..count]);
            }
        }
    }
}
