//! How states and times look to people and, in part, to programs.

use std::time::{Duration, SystemTime};

use prost_types::Timestamp;

use crate::wire::proto::v1::{PowerState, SessionState};

/// A power state in one word.
pub fn power(power: PowerState) -> &'static str {
    match power {
        PowerState::Unspecified => "unknown",
        PowerState::Running => "running",
        PowerState::Paused => "paused",
        PowerState::Off => "off",
    }
}

/// A session's state in one word.
pub fn session(session: SessionState) -> &'static str {
    match session {
        SessionState::Unspecified => "unknown",
        SessionState::Connecting => "connecting",
        SessionState::Connected => "connected",
        SessionState::Refused => "refused",
        SessionState::Gone => "gone",
    }
}

/// The text, or a dash in place of none.
pub fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

/// How long ago, such as `5s`, `3m12s`, `2h5m` or `3d4h`; a dash for never.
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

/// A time to the millisecond in UTC, such as `2026-01-02T03:04:05.678Z`; a dash for none.
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
    fn times() {
        let early = Timestamp { seconds: 1_700_000_000, nanos: 5_999_999 };
        assert_eq!(time(Some(&early)), "2023-11-14T22:13:20.005Z");
        assert_eq!(time(None), "-");
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_010);
        assert_eq!(age(Some(&early), now), "9s");
        assert_eq!(age(None, now), "-");
    }
}
