//! How many denials are written down, of each who asks: whoever is denied again and again hides nobody else's denials.
//!
//! What is told apart is who asks, for whom, and for which role; of one who asks, so many, and all in all so many. The rest is counted
//! together: who it is may be in the hand of whoever floods.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::pace::{Held, Rate, settle};

/// Denials that are written down.
const RATE: Rate = Rate { burst: 20, again: Duration::from_secs(1) };
/// Callers and roles of one who asks that are counted by themselves.
const MOST_OF_ONE: usize = 32;
/// The same of all.
const MOST: usize = 256;
/// After how long one who is denied nothing is forgotten.
const IDLE: Duration = Duration::from_secs(60);
/// The name of those who are counted together.
const OTHERS: &str = "others";

/// Whose denials are counted together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Of {
    /// As records name the host half, or QGA.
    pub who: String,
    /// For whom it asks, without what changes with each connection.
    pub caller: String,
    /// The role that was missing, or another word for what was denied.
    pub role: &'static str,
}

impl Of {
    /// Of a record with these.
    pub fn new(who: &str, caller: &str, role: &'static str) -> Self {
        Self { who: who.to_owned(), caller: lasting(caller), role }
    }
}

/// A caller without the number of its process, or its port on vsock: one who connects anew is the same one.
fn lasting(caller: &str) -> String {
    if let Some((channel, process)) = caller.split_once(" (pid ") {
        let user = process.split_once(", ").map_or("", |(_, user)| user);
        return format!("{channel} ({user}");
    }
    let peer = caller.strip_prefix("vsock ").and_then(|peer| peer.split_once(':'));
    peer.map_or_else(|| caller.to_owned(), |(cid, _)| format!("vsock {cid}"))
}

/// The denials of all who ask.
#[derive(Debug, Default)]
pub struct Denials(BTreeMap<Of, Held>);

impl Denials {
    /// Whether one more is written down: then with how many of the same were left out since the last one that was.
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

    /// Takes how many were left out and are not told yet, and forgets who was denied nothing for a while.
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
