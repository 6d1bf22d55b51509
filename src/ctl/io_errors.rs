//! Disks of a VM that could not be read or written on the host, as values for programs and as text.

use std::time::SystemTime;

use serde::Serialize;

use super::json::rfc3339;
use super::words::age;
use crate::wire::proto::v1::{self, IoOperation};

/// Disk that could not be read or written.
#[derive(Debug, Serialize)]
pub struct IoError {
    disk: String,
    file: String,
    operation: &'static str,
    no_space: bool,
    stopped: bool,
    reason: String,
    count: u64,
    last: Option<String>,
}

impl From<v1::IoError> for IoError {
    fn from(error: v1::IoError) -> Self {
        Self {
            operation: match error.operation() {
                IoOperation::Read => "read",
                IoOperation::Write => "write",
                IoOperation::Unspecified => "unknown",
            },
            disk: error.disk,
            file: error.file,
            no_space: error.no_space,
            stopped: error.stopped,
            reason: error.reason,
            count: error.count,
            last: error.time.map(rfc3339),
        }
    }
}

/// Describes an I/O error, such as `disk data-1 cannot be written: No space left on device; the VM stands
/// still until it is resumed`.
pub fn words(error: &v1::IoError) -> String {
    let what = match error.operation() {
        IoOperation::Read => "read",
        IoOperation::Write => "written",
        IoOperation::Unspecified => "read or written",
    };
    let reason = match (error.reason.as_str(), error.no_space) {
        ("", true) => ": there is no space left on the host".to_owned(),
        ("", false) => String::new(),
        (reason, _) => format!(": {reason}"),
    };
    let stopped = if error.stopped { "; the VM is paused until it is resumed" } else { "" };
    format!("disk {} cannot be {what}{reason}{stopped}", error.disk)
}

/// Describes the error with the file on the host, the number of occurrences, and the time.
pub fn long_words(error: &v1::IoError, now: SystemTime) -> String {
    let file = if error.file.is_empty() { String::new() } else { format!("{}, ", error.file) };
    let times = if error.count == 1 { String::new() } else { format!("{} times, last ", error.count) };
    format!("{} ({file}{times}{} ago)", words(error), age(error.time.as_ref(), now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_read() {
        let full = v1::IoError {
            disk: "data-1".into(),
            file: "/a.raw".into(),
            operation: IoOperation::Write.into(),
            no_space: true,
            stopped: true,
            count: 2,
            time: Some(prost_types::Timestamp::default()),
            ..v1::IoError::default()
        };
        let expected = "disk data-1 cannot be written: there is no space left on the host; the VM is paused \
                        until it is resumed";
        assert_eq!(words(&full), expected);
        let later = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(5);
        assert_eq!(long_words(&full, later), format!("{expected} (/a.raw, 2 times, last 5s ago)"));
        let read = v1::IoError {
            disk: "b".into(),
            operation: IoOperation::Read.into(),
            reason: "Input/output error".into(),
            ..v1::IoError::default()
        };
        assert_eq!(words(&read), "disk b cannot be read: Input/output error");
    }
}
