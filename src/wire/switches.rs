//! Description of requested states of processors and memory blocks, for the audit records of both ends.

use super::proto::v1::Switch;

/// Maximum number of switches in a description.
const MOST: usize = 32;

/// Describes the switches, such as `2 off, 3 on`; those beyond the limit are left out.
pub fn words(switches: &[Switch]) -> String {
    let one = |switch: &Switch| format!("{} {}", switch.id, if switch.online { "on" } else { "off" });
    switches.iter().take(MOST).map(one).collect::<Vec<_>>().join(", ")
}
