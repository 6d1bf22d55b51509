//! Jumps of the clock: it was set, or has changed during a suspension.

use std::convert::Infallible;
use std::io;

use crate::guest::Guest;
use crate::sys::clock::{self, Watch};
use crate::wire::proto::v1::ClockJumped;

/// Minimum change that counts as a jump, in milliseconds.
const JUMP: i64 = 100;

pub(super) async fn watch(guest: Guest) -> io::Result<Infallible> {
    let mut known = clock::offset()?;
    loop {
        // Begin the watch before reading the clock, so that a change after the reading is reported by the watch.
        let watch = Watch::begin()?;
        let milliseconds;
        (milliseconds, known) = decide(known, clock::offset()?);
        if let Some(milliseconds) = milliseconds {
            guest.events.tell(ClockJumped { milliseconds });
        }
        watch.set().await?;
    }
}

/// Returns the jump from one offset to the other, and the offset to compare the next one with: many small steps
/// add up to a jump.
fn decide(known: i64, now: i64) -> (Option<i64>, i64) {
    let milliseconds = now.saturating_sub(known);
    if milliseconds.saturating_abs() >= JUMP { (Some(milliseconds), now) } else { (None, known) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps() {
        for (name, known, now, jump) in [
            ("nothing", 5000, 5000, None),
            ("too little", 5000, 5099, None),
            ("too little, back", 5000, 4901, None),
            ("enough", 5000, 5100, Some(100)),
            ("enough, back", 5000, 4900, Some(-100)),
            ("an hour", 1_700_000_000_000, 1_700_003_600_000, Some(3_600_000)),
            ("from one end to the other", i64::MAX, i64::MIN, Some(i64::MIN)),
        ] {
            assert_eq!(decide(known, now), (jump, if jump.is_some() { now } else { known }), "{name}");
        }
    }

    #[test]
    fn small_steps_add_up() {
        let mut known = 0;
        let mut told = Vec::new();
        for now in (0..=350).step_by(50) {
            let jump;
            (jump, known) = decide(known, now);
            told.extend(jump);
        }
        assert_eq!(told, [100, 100, 100]);
    }
}
