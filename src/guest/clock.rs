//! Time of day: the system clock, the hardware clock and the time zone.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;

use crate::guest::Guest;
use crate::sys::blocking;
use crate::sys::calendar::{self, Date, Zone};
use crate::sys::root::Root;

/// First time that hardware clocks cannot hold, since the epoch: 2070-01-01.
pub const END: Duration = Duration::from_secs(3_155_760_000);

const HARDWARE_CLOCK: &str = "/dev/rtc0";

/// Reason why the clock was not set, or only in part.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The time is outside the range of hardware clocks.
    #[error("the time is outside the years 1970 to 2069")]
    OutOfRange,
    /// The kernel refused the time. Nothing was changed.
    #[error("the system's clock cannot be set")]
    Clock(#[source] io::Error),
    /// The hardware clock cannot be read. Nothing was changed.
    #[error("the hardware clock cannot be read")]
    Read(#[source] io::Error),
    /// The hardware clock cannot be written. The system clock has been set.
    #[error("the system's clock was set, but the hardware clock cannot be")]
    Write(#[source] io::Error),
    /// The time zone, which a hardware clock in local time needs, is unknown. Nothing was changed.
    #[error("the time zone is unknown")]
    Zone(#[source] io::Error),
}

/// Returns the time in nanoseconds since the epoch.
pub fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

/// Returns the present time zone.
///
/// # Errors
/// If the calendar cannot represent the time of the clock.
pub fn zone() -> io::Result<Zone> {
    calendar::zone(now().div_euclid(1_000_000_000))
}

/// Sets the system clock to this time since the epoch, and also the hardware clock if the machine has one.
///
/// # Errors
/// If one of them cannot be set; the error says whether the system clock was.
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

/// Sets the system clock from the hardware clock.
///
/// # Errors
/// If the hardware clock cannot be read or shows a time out of range, or the system clock cannot be set.
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

/// Returns whether the error means that the machine has no hardware clock: no device, or a driver that finds no
/// hardware.
fn is_absent(error: &io::Error) -> bool {
    [Errno::ENOENT, Errno::ENODEV, Errno::ENXIO]
        .map(|errno| Some(errno as i32))
        .contains(&error.raw_os_error())
}

/// Converts a time since the epoch to the date that the hardware clock should show.
fn in_hardware(root: &Root, time: Duration) -> io::Result<Date> {
    let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    let offset = if is_local(root) { calendar::zone(seconds)?.offset } else { 0 };
    Ok(Date::of(seconds.saturating_add(offset)))
}

/// Converts the date of the hardware clock to seconds since the epoch.
fn of_hardware(root: &Root, date: Date) -> io::Result<i64> {
    let seconds = date.seconds();
    if !is_local(root) {
        return Ok(seconds);
    }
    // The offset has to be that of the resulting time. The first guess is close enough to find it, except around a
    // change of the offset.
    let near = seconds - calendar::zone(seconds)?.offset;
    Ok(seconds - calendar::zone(near)?.offset)
}

/// Returns whether the hardware clock is in local time, according to the third line of /etc/adjtime; see
/// hwclock(8).
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
