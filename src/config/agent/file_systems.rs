//! The settings of `[file-systems]`: when the guest reports that file systems are about to fill.

use std::time::Duration;

use crate::config::Problem;
use crate::config::agent::check::{problem, time};
use crate::config::agent::fragment::{FileSystemsFragment, Time};

/// Default interval between two checks.
const INTERVAL: Duration = Duration::from_secs(300);
const FULL_PERCENT: u32 = 90;

/// Checks of how full file systems are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSystemSettings {
    /// Interval between two checks; zero for no checks.
    pub interval: Duration,
    /// Percentage in use from which a file system counts as about to fill.
    pub full_percent: u32,
}

/// Checks the settings, and fills in defaults.
pub fn check(file_systems: &FileSystemsFragment) -> Result<FileSystemSettings, Problem> {
    let interval = match &file_systems.interval {
        Some(Time::Seconds(0)) => Duration::ZERO,
        written => time("file-systems.interval", written.as_ref(), INTERVAL)?,
    };
    let full_percent = file_systems.full_percent.unwrap_or(FULL_PERCENT);
    if !(10..=100).contains(&full_percent) {
        let text = format!("file-systems.full-percent is {full_percent}; use 10 to 100");
        return problem("file-systems.full-percent", text);
    }
    Ok(FileSystemSettings { interval, full_percent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_and_percentages() {
        let of = |interval, full_percent| check(&FileSystemsFragment { interval, full_percent });
        let words = |text: &str| Some(Time::Words(text.to_owned()));
        let usual = FileSystemSettings { interval: Duration::from_secs(300), full_percent: 90 };
        assert_eq!(of(None, None).unwrap(), usual);
        assert_eq!(of(Some(Time::Seconds(0)), None).unwrap().interval, Duration::ZERO);
        assert_eq!(of(words("1min"), Some(100)).unwrap().interval, Duration::from_secs(60));
        for wrong in [of(words("2h"), None), of(None, Some(9)), of(None, Some(101))] {
            wrong.unwrap_err();
        }
    }
}
