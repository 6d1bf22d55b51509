//! The time of day: the system's clock, the hardware's clock, the time zone.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;

use crate::guest::Guest;
use crate::sys::blocking;
use crate::sys::calendar::{self, Date, Zone};
use crate::sys::root::Root;

/// The first second after what hardware clocks hold, since the epoch: 2070-01-01.
pub const END: Duration = Duration::from_secs(3_155_760_000);

const HARDWARE_CLOCK: &str = "/dev/rtc0";

/// Why the clock was not set, or not everywhere.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Hardware clocks do not hold it.
    #[error("the time is outside the years 1970 to 2069")]
    OutOfRange,
    /// Nothing was changed.
    #[error("the system's clock cannot be set")]
    Clock(#[source] io::Error),
    /// Nothing was changed.
    #[error("the hardware clock cannot be read")]
    Read(#[source] io::Error),
    /// The system's clock is set.
    #[error("the system's clock was set, but the hardware clock cannot be")]
    Write(#[source] io::Error),
    /// Nothing was changed.
    #[error("the time zone is unknown")]
    Zone(#[source] io::Error),
}

/// Nanoseconds since the epoch.
pub fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

/// The time zone, as it is now.
///
/// # Errors
/// If the clock shows a time that the calendar has not.
pub fn zone() -> io::Result<Zone> {
    calendar::zone(now().div_euclid(1_000_000_000))
}

/// Sets the system's clock to that time since the epoch, and the hardware clock with it, where there is one.
///
/// # Errors
/// If one of them cannot be set; the error says whether the first one was.
pub async fn set(guest: &Guest, time: Duration) -> Result<(), Error> {
    if time >= END {
        return Err(Error::OutOfRange);
    }
    let guest = guest.clone();
    blocking::run(move || {
        let date = in_hardware(&guest.root, time).map_err(Error::Zone)?;
        guest.effects.set_clock(time).map_err(Error::Clock)?;
        match guest.effects.set_hardware_clock(&guest.root.path(HARDWARE_CLOCK), date) {
            Err(error) if is_absent(&error) => {
                tracing::debug!("there is no hardware clock to set: {error}");
                Ok(())
            }
            set => set.map_err(Error::Write),
        }
    })
    .await
}

/// Sets the system's clock from the hardware clock.
///
/// # Errors
/// If that cannot be read, or shows a time out of range, or the system's clock cannot be set.
pub async fn set_from_hardware(guest: &Guest) -> Result<(), Error> {
    let guest = guest.clone();
    blocking::run(move || {
        let date = guest.effects.hardware_clock(&guest.root.path(HARDWARE_CLOCK)).map_err(Error::Read)?;
        let seconds = of_hardware(&guest.root, date).map_err(Error::Zone)?;
        let time = u64::try_from(seconds).map(Duration::from_secs).ok().filter(|time| *time < END);
        guest.effects.set_clock(time.ok_or(Error::OutOfRange)?).map_err(Error::Clock)
    })
    .await
}

/// Machines without one have no device, or one of a driver that finds nothing behind it.
fn is_absent(error: &io::Error) -> bool {
    [Errno::ENOENT, Errno::ENODEV, Errno::ENXIO]
        .map(|errno| Some(errno as i32))
        .contains(&error.raw_os_error())
}

/// What the hardware clock should show at that time since the epoch.
fn in_hardware(root: &Root, time: Duration) -> io::Result<Date> {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    let offset = if is_local(root) { calendar::zone(seconds)?.offset } else { 0 };
    Ok(Date::of(seconds.saturating_add(offset)))
}

/// Seconds since the epoch, when the hardware clock shows that.
fn of_hardware(root: &Root, date: Date) -> io::Result<i64> {
    let seconds = date.seconds();
    if !is_local(root) {
        return Ok(seconds);
    }
    // The offset is that of the moment itself, which the first guess is near enough to but around a change.
    let near = seconds - calendar::zone(seconds)?.offset;
    Ok(seconds - calendar::zone(near)?.offset)
}

/// Whether the hardware clock is in local time, hwclock(8): the third line of /etc/adjtime.
fn is_local(root: &Root) -> bool {
    let file = root.read("/etc/adjtime").unwrap_or_default();
    String::from_utf8_lossy(&file).lines().nth(2).is_some_and(|line| line.trim() == "LOCAL")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hardware_clock_is_in_utc_unless_adjtime_says_otherwise() {
        let folder = tempfile::tempdir().unwrap();
        let root = Root::at(folder.path());
        assert!(!is_local(&root));
        std::fs::create_dir(folder.path().join("etc")).unwrap();
        for (text, local) in
            [("0.0 0 0.0\n0\nUTC\n", false), ("0.0 0 0.0\n0\nLOCAL\n", true), ("LOCAL\n", false), ("", false)]
        {
            #[allow(clippy::disallowed_methods)]
            std::fs::write(folder.path().join("etc/adjtime"), text).unwrap();
            assert_eq!(is_local(&root), local, "{text:?}");
            let time = Duration::from_secs(1_795_272_819);
            let there_and_back = of_hardware(&root, in_hardware(&root, time).unwrap()).unwrap();
            assert_eq!(there_and_back, 1_795_272_819, "{text:?}");
        }
    }
}
