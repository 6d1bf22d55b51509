//! Texts for states and times, for people and, in part, for programs.

use std::time::{Duration, SystemTime};

use prost_types::Timestamp;

use super::io_errors;
pub use crate::events::disks::words as disk;
pub use crate::events::file_systems::words as file_system;
pub use crate::events::interfaces::words as interface;
pub use crate::events::users::words as user;
use crate::text::colours::Style;
use crate::wire::proto::v1::{CallbackState, GuestSuspended, PowerState, SessionState, VirtualMachine};

/// Returns a power state in one word.
pub fn power(power: PowerState) -> &'static str {
    match power {
        PowerState::Unspecified => "unknown",
        PowerState::Running => "running",
        PowerState::Paused => "paused",
        PowerState::Off => "off",
    }
}

/// Returns the target of a guest's suspension.
pub fn suspended_to(suspended: GuestSuspended) -> &'static str {
    if suspended.to_disk { "disk" } else { "memory" }
}

/// Lists the reasons why a VM is not healthy: those of its session, the problem with its power state, and its
/// failing disks.
pub fn reasons(vm: &VirtualMachine) -> String {
    let reasons = [&vm.reason, &vm.power_problem];
    let mut reasons: Vec<_> = reasons.into_iter().filter(|reason| !reason.is_empty()).cloned().collect();
    reasons.extend(vm.io_errors.iter().map(io_errors::words));
    reasons.join("; ")
}

/// Lists the labels of a VM as `key=value`, in the order of their keys.
pub fn labels(vm: &VirtualMachine) -> Vec<String> {
    vm.labels.iter().map(|(key, value)| format!("{key}={value}")).collect()
}

/// Returns a session's state in one word.
pub fn session(session: SessionState) -> &'static str {
    match session {
        SessionState::Unspecified => "unknown",
        SessionState::Connecting => "connecting",
        SessionState::Connected => "connected",
        SessionState::Refused => "refused",
        SessionState::Gone => "gone",
        SessionState::Elsewhere => "elsewhere",
        SessionState::NoVsock => "no-vsock",
    }
}

/// Returns the style of a session's state; `None` if nothing is expected of the VM.
pub fn session_style(session: SessionState) -> Option<Style> {
    match session {
        SessionState::Connected => Some(Style::Good),
        SessionState::Connecting => Some(Style::Note),
        SessionState::Refused | SessionState::NoVsock => Some(Style::Wrong),
        SessionState::Unspecified | SessionState::Gone | SessionState::Elsewhere => None,
    }
}

/// Returns the callback's state in one word.
pub fn callback(callback: CallbackState) -> &'static str {
    match callback {
        CallbackState::Unspecified => "none",
        CallbackState::Connecting => "connecting",
        CallbackState::Open => "open",
    }
}

/// Converts nanoseconds to milliseconds.
#[allow(clippy::cast_precision_loss, reason = "nobody waits long enough")]
pub fn milliseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

/// Parses a span of time as people write it: `90s`, `5m`, `2h`, `3d`; a number alone is seconds.
///
/// # Errors
/// Fails with a message if it is not valid.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|one: char| one.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86400,
        _ => return Err("give a number and s, m, h or d, such as 5m".to_owned()),
    };
    let number: u32 = digits.parse().map_err(|_| "give a number and s, m, h or d, such as 5m".to_owned())?;
    Ok(Duration::from_secs(u64::from(number) * unit))
}

/// Formats the age of a time, such as `5s`, `3m12s`, `2h5m` or `3d4h`; a dash stands for never.
pub fn age(time: Option<&Timestamp>, now: SystemTime) -> String {
    let Some(then) = time.and_then(|time| SystemTime::try_from(*time).ok()) else {
        return "-".to_owned();
    };
    span(now.duration_since(then).unwrap_or_default())
}

fn span(span: Duration) -> String {
    let seconds = span.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{}m", minutes % 60),
        _ => format!("{days}d{}h", hours % 24),
    }
}

/// Formats a time with milliseconds in UTC, such as `2026-01-02T03:04:05.678Z`; a dash stands for none.
pub fn time(time: Option<&Timestamp>) -> String {
    let Some(time) = time else { return "-".to_owned() };
    let milliseconds = time.nanos / 1_000_000;
    let text = Timestamp { nanos: 0, ..*time }.to_string();
    format!("{}.{milliseconds:03}Z", text.trim_end_matches('Z'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans() {
        let cases = [(0, "0s"), (59, "59s"), (192, "3m12s"), (7_500, "2h5m"), (273_600, "3d4h")];
        for (seconds, expected) in cases {
            assert_eq!(span(Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn spans_that_people_write() {
        let seconds = |text| parse_span(text).map(|span| span.as_secs());
        assert_eq!(seconds("90"), Ok(90));
        assert_eq!(seconds("5m"), Ok(300));
        assert_eq!(seconds("2h"), Ok(7200));
        assert_eq!(seconds("1d"), Ok(86400));
        for wrong in ["", "m", "-5m", "5 m", "5w", "99999999999s", "5µ"] {
            assert!(parse_span(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times() {
        let early = Timestamp { seconds: 1_700_000_000, nanos: 5_999_999 };
        assert_eq!(time(Some(&early)), "2023-11-14T22:13:20.005Z");
        assert_eq!(time(None), "-");
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_010);
        assert_eq!(age(Some(&early), now), "9s");
        assert_eq!(age(None, now), "-");
    }
}
