//! Last freeze of a guest and how it ended, as a value for programs and as text.

use std::time::SystemTime;

use serde::Serialize;

use super::json::rfc3339;
use super::words::age;
use crate::events::freezes::{end, problem, receipt};
use crate::text;
use crate::wire::proto::v1;

/// Last freeze; it may still be in force.
#[derive(Debug, Serialize)]
pub struct Freeze {
    holder: String,
    file_systems: u32,
    since: Option<String>,
    ended: Option<String>,
    end: String,
    problem: String,
    receipt: String,
    level: String,
}

impl From<v1::LastFreeze> for Freeze {
    fn from(freeze: v1::LastFreeze) -> Self {
        Self {
            holder: freeze.holder,
            file_systems: freeze.file_systems,
            since: freeze.since.map(rfc3339),
            ended: freeze.ended.map(rfc3339),
            end: freeze.end,
            problem: freeze.problem,
            receipt: freeze.receipt,
            level: freeze.level,
        }
    }
}

/// Describes the last freeze, such as `ended 5m0s ago by its deadline, for libvirt: the freeze ended by
/// itself after 120 s`.
pub fn words(freeze: &v1::LastFreeze, now: SystemTime) -> String {
    let holder = text::or_dash(&freeze.holder);
    let Some(ended) = &freeze.ended else {
        let count = freeze.file_systems;
        return format!(
            "not over: {count} file systems for {holder}, for {}",
            age(freeze.since.as_ref(), now)
        );
    };
    let ended = age(Some(ended), now);
    let receipt = receipt(&freeze.receipt, &freeze.level);
    let problem = problem(&freeze.problem);
    match freeze.end.as_str() {
        "failed" => format!("failed {ended} ago, for {holder}{problem}{receipt}"),
        word => format!("ended {ended} ago {}, for {holder}{problem}{receipt}", end(word)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Happening as _;

    #[test]
    fn how_a_freeze_ended_is_said() {
        let at = |seconds| Some(prost_types::Timestamp { seconds, nanos: 0 });
        let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000);
        let frozen = v1::LastFreeze {
            holder: "libvirt".to_owned(),
            file_systems: 3,
            since: at(990),
            ..v1::LastFreeze::default()
        };
        assert_eq!(words(&frozen, now), "not over: 3 file systems for libvirt, for 10s");
        let ended = v1::LastFreeze {
            ended: at(998),
            end: "deadline".to_owned(),
            problem: "the freeze ended by itself after 8 s".to_owned(),
            ..frozen
        };
        let expected = "ended 2s ago by its deadline, for libvirt: the freeze ended by itself after 8 s";
        assert_eq!(words(&ended, now), expected);
        let event = |end: &str| v1::Thawed { end: end.to_owned(), by_itself: true, ..v1::Thawed::default() };
        assert_eq!(event("asked").words(), "thawed by a thaw, for -");
        assert_eq!(event("failed").words(), "not frozen, for -");
        assert_eq!(event("later").words(), "thawed (later), for -");
        assert_eq!(event("").words(), "thawed by itself: no thaw was requested in time");
    }
}
