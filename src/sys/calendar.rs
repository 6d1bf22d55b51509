//! Dates of the calendar, as the hardware clock counts, and the time zone of this machine.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;

use nix::libc;

/// A moment by the calendar, in whatever zone its clock is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Date {
    /// Year, such as 2026.
    pub year: i32,
    /// Month, 1–12.
    pub month: u8,
    /// Day of the month, 1–31.
    pub day: u8,
    /// Hour, 0–23.
    pub hour: u8,
    /// Minute, 0–59.
    pub minute: u8,
    /// Second, 0–60 (60 in a leap second).
    pub second: u8,
}

impl Date {
    /// The date in UTC, of seconds since the epoch.
    pub fn of(seconds: i64) -> Self {
        let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
        // Years begin in March here, so that the odd day is the last of them, and eras are the calendar's 400 years.
        let days = days.saturating_add(719_468);
        let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
        let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = year + era * 400 + i64::from(month <= 2);
        let small = |number: i64| u8::try_from(number).unwrap_or_default();
        Self {
            year: i32::try_from(year).unwrap_or(i32::MAX),
            month: small(month),
            day: small(day),
            hour: small(of_day / 3600),
            minute: small(of_day / 60 % 60),
            second: small(of_day % 60),
        }
    }

    /// Seconds since the epoch, of a date in UTC.
    pub fn seconds(self) -> i64 {
        let month = i64::from(self.month);
        let year = i64::from(self.year) - i64::from(month <= 2);
        let (era, year) = (year.div_euclid(400), year.rem_euclid(400));
        let month = (month + 9) % 12;
        let of_year = (153 * month + 2) / 5 + i64::from(self.day) - 1;
        let days = era * 146_097 + year * 365 + year / 4 - year / 100 + of_year - 719_468;
        let of_day = i64::from(self.hour) * 3600 + i64::from(self.minute) * 60 + i64::from(self.second);
        days * 86_400 + of_day
    }
}

/// Properties of a time zone at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Zone {
    /// Abbreviation, such as `CET`.
    pub abbreviation: String,
    /// Seconds east of UTC.
    pub offset: i64,
}

/// This machine's time zone, as it is at that moment in seconds since the epoch: that of the environment variable TZ,
/// or of /etc/localtime, which is looked at anew.
///
/// # Errors
/// For a moment whose year no integer holds.
pub fn zone(seconds: i64) -> io::Result<Zone> {
    unsafe extern "C" {
        fn tzset();
    }
    let mut broken_down = MaybeUninit::uninit();
    // SAFETY: tzset(3) takes nothing; it reads the environment, which this program never changes.
    unsafe { tzset() };
    // SAFETY: both are pointers to values of the right types, and localtime_r(3) fills in the second one.
    if unsafe { libc::localtime_r(&raw const seconds, broken_down.as_mut_ptr()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it has not failed, so it has filled it in.
    let broken_down: libc::tm = unsafe { broken_down.assume_init() };
    // SAFETY: tm_zone is a string that the C library keeps (tzset(3)).
    let abbreviation = unsafe { CStr::from_ptr(broken_down.tm_zone) };
    Ok(Zone { abbreviation: abbreviation.to_string_lossy().into_owned(), offset: broken_down.tm_gmtoff })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_seconds() {
        let date = |year, month, day, hour, minute, second| Date { year, month, day, hour, minute, second };
        for (seconds, expected) in [
            (0, date(1970, 1, 1, 0, 0, 0)),
            (-1, date(1969, 12, 31, 23, 59, 59)),
            (951_782_400, date(2000, 2, 29, 0, 0, 0)),
            (951_868_799, date(2000, 2, 29, 23, 59, 59)),
            (1_795_272_819, date(2026, 11, 21, 14, 53, 39)),
            (3_155_759_999, date(2069, 12, 31, 23, 59, 59)),
            (4_107_542_400, date(2100, 3, 1, 0, 0, 0)),
        ] {
            assert_eq!(Date::of(seconds), expected, "{seconds}");
            assert_eq!(expected.seconds(), seconds, "{expected:?}");
        }
        for seconds in (-9_000_000_000..9_000_000_000).step_by(7_654_321) {
            assert_eq!(Date::of(seconds).seconds(), seconds);
        }
        let _ = (Date::of(i64::MAX), Date::of(i64::MIN));
    }

    #[test]
    fn a_zone_has_a_name() {
        assert!(!zone(0).unwrap().abbreviation.is_empty());
        assert!(zone(i64::MAX).is_err());
    }
}
