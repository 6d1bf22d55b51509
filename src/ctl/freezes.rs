//! The last freeze of a guest, and how it ended: as a value for programs, and in words.

use std::time::SystemTime;

use serde::Serialize;

use super::json::rfc3339;
use super::words::age;
use crate::text;
use crate::wire::proto::v1;

/// The last freeze; it may not be over.
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

/// The end of a freeze, as an event.
#[derive(Debug, Serialize)]
pub struct Thawed {
    by_itself: bool,
    holder: String,
    end: String,
    problem: String,
    receipt: String,
    level: String,
}

impl From<v1::Thawed> for Thawed {
    fn from(thawed: v1::Thawed) -> Self {
        let v1::Thawed { by_itself, holder, end, problem, receipt, level } = thawed;
        Self { by_itself, holder, end, problem, receipt, level }
    }
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

/// Such as `ended 5m0s ago by its deadline, for libvirt: the freeze ended by itself after 120 s`.
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

/// Such as `; receipt 0123…: filesystem`.
fn receipt(id: &str, level: &str) -> String {
    if id.is_empty() { String::new() } else { format!("; receipt {id}: {level}") }
}

/// What an event says.
pub fn thawed_words(thawed: &v1::Thawed) -> String {
    match thawed.end.as_str() {
        // An agent that does not say more.
        "" if thawed.by_itself => "thawed by itself: nobody had asked for it in time".to_owned(),
        "" => "thawed".to_owned(),
        word => {
            let receipt = receipt(&thawed.receipt, &thawed.level);
            let (holder, problem) = (text::or_dash(&thawed.holder), problem(&thawed.problem));
            match word {
                "failed" => format!("not frozen, for {holder}{problem}{receipt}"),
                word => format!("thawed {}, for {holder}{problem}{receipt}", end(word)),
            }
        }
    }
}

fn end(word: &str) -> String {
    match word {
        "asked" => "by a thaw",
        "deadline" => "by its deadline",
        "person" => "by a person in the guest",
        "crash" => "because the agent crashed",
        "hang" => "because the agent hung",
        other => return format!("({})", text::or_dash(other)),
    }
    .to_owned()
}

fn problem(problem: &str) -> String {
    if problem.is_empty() { String::new() } else { format!(": {problem}") }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(thawed_words(&event("asked")), "thawed by a thaw, for -");
        assert_eq!(thawed_words(&event("failed")), "not frozen, for -");
        assert_eq!(thawed_words(&event("later")), "thawed (later), for -");
        assert_eq!(thawed_words(&event("")), "thawed by itself: nobody had asked for it in time");
    }
}
