//! Converts the times of a receipt from the clock of its guest to the clock of this node. Pure.
//!
//! The guest reads its clock after the node has sent a request and before the node has received the answer. This
//! bounds the difference between the two clocks, and so each time of the guest lies between two times of the node.
//! Of the window in which everything was frozen, only the part counts that is certainly inside.
//!
//! The clock of a paused guest stands still. The events of the freeze and of the thaw show that it has not stood
//! still since the thaw: no event can be received before it happened.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::receipt::{Moment, Receipt};

/// Microseconds since 1970, by the clock of the node.
type Micros = i64;

/// Bounds on how far the node's clock is ahead of the guest's `CLOCK_BOOTTIME`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    least: Micros,
    most: Micros,
}

/// Times at which the events of a freeze were received, by the clock of the node.
#[derive(Debug, Clone, Copy)]
pub struct Heard {
    /// Receipt of the event of its beginning; `None` if that was missed.
    pub frozen: Option<SystemTime>,
    /// Receipt of the event of its end.
    pub thawed: SystemTime,
}

fn micros(time: SystemTime) -> Option<Micros> {
    time.duration_since(UNIX_EPOCH).ok()?.as_micros().try_into().ok()
}

/// Returns the bounds of a time that the guest has truncated to milliseconds.
fn bounds(milliseconds: u64) -> Option<(Micros, Micros)> {
    let least = Micros::try_from(milliseconds).ok()?.checked_mul(1000)?;
    Some((least, least.checked_add(1000)?))
}

impl Difference {
    /// Computes the bounds that follow from one answer; `None` if the answer has no usable time.
    pub fn of(asked: SystemTime, said: u64, answered: SystemTime) -> Option<Self> {
        let (least, most) = bounds(said)?;
        let found =
            Self { least: micros(asked)?.checked_sub(most)?, most: micros(answered)?.checked_sub(least)? };
        (said > 0 && found.least <= found.most).then_some(found)
    }

    /// Combines two bounds; `None` if they contradict each other.
    pub fn and(self, other: Self) -> Option<Self> {
        let both = Self { least: self.least.max(other.least), most: self.most.min(other.most) };
        (both.least <= both.most).then_some(both)
    }

    /// Returns the uncertainty: the distance between the bounds.
    pub fn width(self) -> Duration {
        Duration::from_micros(self.most.abs_diff(self.least))
    }

    /// Converts a time of the guest to its bounds on the node's clock.
    fn place(self, moment: &Moment) -> Option<(Micros, Micros)> {
        let (least, most) = bounds(moment.boottime_ms)?;
        Some((least.checked_add(self.least)?, most.checked_add(self.most)?))
    }
}

/// Returns the window in which everything was certainly frozen, by the clock of the node.
///
/// # Errors
/// The reason why there is no certain window.
pub fn window(
    receipt: &Receipt,
    difference: Difference,
    heard: Heard,
) -> Result<(SystemTime, SystemTime), &'static str> {
    let times = &receipt.times;
    let place = |moment: &Option<Moment>| moment.as_ref().and_then(|moment| difference.place(moment));
    let moments = (place(&times.frozen), place(&times.thaw_asked), place(&times.thawed));
    let (Some(frozen), Some(asked), Some(thawed)) = moments else {
        return Err("it is not known when everything was frozen, or thawed");
    };
    let Some(heard_frozen) = heard.frozen.and_then(micros) else {
        return Err("the node did not learn of the freeze when it began");
    };
    if heard_frozen < frozen.0 || micros(heard.thawed).is_none_or(|heard| heard < thawed.0) {
        return Err("the guest's clock has stood still, or was set, since then");
    }
    let (from, until) = (frozen.1, asked.0);
    if from >= until {
        return Err("everything was frozen for too short a time to be sure of it by the node's clock");
    }
    let time =
        |micros: Micros| u64::try_from(micros).map(|micros| UNIX_EPOCH + Duration::from_micros(micros));
    let both = time(from).ok().zip(time(until).ok());
    both.ok_or("the clock of the guest or of the node is far off")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::receipt::Times;

    fn at(milliseconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(milliseconds)
    }

    /// Frozen, asked to thaw, and thawed.
    fn receipt(moments: [u64; 3]) -> Receipt {
        let [frozen, thaw_asked, thawed] =
            moments.map(|boottime_ms| Some(Moment { boottime_ms, time: String::new() }));
        Receipt { times: Times { frozen, thaw_asked, thawed, ..Times::default() }, ..Receipt::default() }
    }

    #[test]
    fn what_is_not_proved_is_no_window() {
        // The node's clock is 1,000,000 ms ahead.
        let close = Difference::of(at(1_020_000), 20_000, at(1_020_004)).unwrap();
        let heard = Heard { frozen: Some(at(1_010_003)), thawed: at(1_015_100) };
        let good = receipt([10_000, 15_000, 15_050]);
        assert_eq!(window(&good, close, heard), Ok((at(1_010_005), at(1_014_999))));
        let words = |receipt: &Receipt, difference, heard| window(receipt, difference, heard).unwrap_err();
        assert!(words(&good, close, Heard { frozen: None, ..heard }).contains("did not learn"));
        // The guest stood still for a second after the thaw.
        let paused = Difference::of(at(1_021_000), 20_000, at(1_021_004)).unwrap();
        assert!(words(&good, paused, heard).contains("stood still"));
        let wide = Difference::of(at(1_014_000), 20_000, at(1_020_004)).unwrap();
        assert!(words(&good, wide, heard).contains("too short a time"));
        let unknown = Receipt { times: Times { frozen: None, ..good.times.clone() }, ..Receipt::default() };
        assert!(words(&unknown, close, heard).contains("is not known"));
        // Answers that contradict each other, or say nothing.
        assert_eq!(close.and(paused), None);
        assert_eq!(close.and(wide), Some(close));
        assert_eq!(Difference::of(at(5), 0, at(6)), None);
        assert_eq!(Difference::of(at(6), 3, at(5)).and_then(|one| one.and(close)), None);
        assert_eq!(Difference::of(at(5), u64::MAX, at(6)), None);
    }

    proptest! {
        /// Whatever the delays are: the window lies inside of the time for which everything was frozen.
        #[test]
        fn no_window_is_too_long(
            ahead in 1_000_000u64..2_000_000, frozen in 1u64..10_000, held in 0u64..5_000, thaw in 0u64..500,
            delays in prop::array::uniform4(0u64..300), asks in prop::collection::vec((0u64..200, 0u64..200), 1..4),
        ) {
            let (asked, thawed) = (frozen + held, frozen + held + thaw);
            let heard = Heard {
                frozen: Some(at(ahead + frozen + delays[0])), thawed: at(ahead + thawed + delays[1]),
            };
            let said = thawed + 1000;
            let difference = asks.iter().map(|(before, after)| {
                Difference::of(at(ahead + said - before), said, at(ahead + said + after)).unwrap()
            });
            let difference = difference.reduce(|one, other| one.and(other).unwrap()).unwrap();
            if let Ok((from, until)) = window(&receipt([frozen, asked, thawed]), difference, heard) {
                prop_assert!(at(ahead + frozen) <= from && from < until && until <= at(ahead + asked));
            }
        }
    }
}
