//! What processors and blocks of memory are to be, in the words of the records of both ends.

use super::proto::v1::Switch;

/// Those that are told of many.
const MOST: usize = 32;

/// Such as `2 off, 3 on`; so many of them as fit.
pub fn words(switches: &[Switch]) -> String {
    let one = |switch: &Switch| format!("{} {}", switch.id, if switch.online { "on" } else { "off" });
    switches.iter().take(MOST).map(one).collect::<Vec<_>>().join(", ")
}
