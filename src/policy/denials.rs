//! Rate limit on the denials that are recorded, separate for each client: a client that is denied over and over
//! cannot hide the denials of others.
//!
//! Denials are distinguished by client, by the caller that it acts for, and by role. The number of separate counts
//! is limited, for one client and in total; beyond that, denials are counted together. The limits are needed
//! because a flooding client may be able to choose these names.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::pace::{Held, Rate, settle};

/// Rate at which denials of one kind are recorded.
const RATE: Rate = Rate { burst: 20, again: Duration::from_secs(1) };
/// Maximum number of separate counts (callers and roles) for one client.
const MOST_OF_ONE: usize = 32;
/// Maximum number of separate counts in total.
const MOST: usize = 256;
/// Time without denials after which a count is forgotten.
const IDLE: Duration = Duration::from_secs(60);
/// Name under which further denials are counted together.
const OTHERS: &str = "others";

/// Key by which denials are counted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Of {
    /// Host half or QGA, as records name it.
    pub who: String,
    /// User that it acts for, without the parts that change with each connection.
    pub caller: String,
    /// Role that was missing, or another keyword for what was denied.
    pub role: &'static str,
}

impl Of {
    /// Creates the key for a record with these values.
    pub fn new(who: &str, caller: &str, role: &'static str) -> Self {
        Self { who: who.to_owned(), caller: lasting(caller), role }
    }
}

/// Removes the process ID or the vsock port from a caller, so that a client that reconnects is counted as the same
/// one.
fn lasting(caller: &str) -> String {
    if let Some((channel, process)) = caller.split_once(" (pid ") {
        let user = process.split_once(", ").map_or("", |(_, user)| user);
        return format!("{channel} ({user}");
    }
    let peer = caller.strip_prefix("vsock ").and_then(|peer| peer.split_once(':'));
    peer.map_or_else(|| caller.to_owned(), |(cid, _)| format!("vsock {cid}"))
}

/// Counts of the denials of all clients.
#[derive(Debug, Default)]
pub struct Denials(BTreeMap<Of, Held>);

impl Denials {
    /// Returns, if one more denial may be recorded, the number of the same kind that were left out since the last
    /// record.
    pub fn admit(&mut self, of: Of, now: Instant) -> Option<u64> {
        let others = |who: &str| Of { who: who.to_owned(), caller: OTHERS.to_owned(), role: of.role };
        let of_one = || self.0.keys().filter(|known| known.who == of.who).count();
        let of = if self.0.contains_key(&of) {
            of
        } else if self.0.len() >= MOST {
            others(OTHERS)
        } else if of_one() >= MOST_OF_ONE {
            others(&of.who)
        } else {
            of
        };
        let held = self.0.entry(of).or_insert_with(|| Held::new(now));
        held.admit(RATE, now).then(|| held.take_left_out())
    }

    /// Takes the numbers of denials that were left out and not yet reported. Forgets clients that were not denied
    /// anything for a while.
    pub fn settle(&mut self, now: Instant) -> Vec<(Of, u64)> {
        settle(&mut self.0, IDLE, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(denials: &mut Denials, of: &Of, count: usize, now: Instant) -> usize {
        (0..count).filter(|_| denials.admit(of.clone(), now).is_some()).count()
    }

    #[test]
    fn of_many_denials_some_are_written_and_the_others_counted_of_each_who_asks() {
        let (mut denials, now) = (Denials::default(), Instant::now());
        let (one, role, other) =
            (Of::new("a", "uid:0 x", "exec"), Of::new("a", "uid:0 x", "power"), Of::new("b", "", "exec"));
        assert_eq!(admitted(&mut denials, &one, 1000, now), 20);
        for of in [&role, &other, &Of::new("a", "uid:1 y", "exec")] {
            assert_eq!(denials.admit(of.clone(), now), Some(0), "{of:?}");
        }
        let later = now + RATE.again;
        assert_eq!(denials.admit(one.clone(), later), Some(980));
        assert_eq!(admitted(&mut denials, &one, 10, later), 0);
        assert_eq!(denials.settle(later), [(one, 10)]);
        assert_eq!(denials.settle(later), []);
        assert!(denials.settle(later + IDLE).is_empty() && denials.0.is_empty());
    }

    #[test]
    fn one_who_calls_itself_by_many_names_hides_nobody_and_costs_little() {
        let (mut denials, now) = (Denials::default(), Instant::now());
        let mut written = 0;
        for number in 0..5000 {
            let of = Of::new("a", &format!("uid:{number} x"), "exec");
            written += usize::from(denials.admit(of, now).is_some());
        }
        assert_eq!((written, denials.0.len()), (MOST_OF_ONE + 20, MOST_OF_ONE + 1));
        assert_eq!(denials.admit(Of::new("b", "", "exec"), now), Some(0));
        for number in 0..5000 {
            denials.admit(Of::new(&number.to_string(), "", "exec"), now);
        }
        assert_eq!(denials.0.len(), MOST + 1);
    }

    #[test]
    fn one_who_connects_anew_is_the_same() {
        for (one, other, is_same) in [
            ("/run/qga.sock (pid 1, uid 0)", "/run/qga.sock (pid 27, uid 0)", true),
            ("/run/qga.sock (pid 1, uid 0)", "/run/qga.sock (pid 1, uid 7)", false),
            ("vsock 2:1023", "vsock 2:77", true),
            ("vsock 2:1023", "vsock 3:1023", false),
            ("uid:0 root", "uid:1 root", false),
        ] {
            assert_eq!(Of::new("a", one, "exec") == Of::new("a", other, "exec"), is_same, "{one}, {other}");
        }
    }
}
