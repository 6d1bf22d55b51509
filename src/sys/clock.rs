//! Clocks of the kernel, and its notification when the system clock is set.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId as TimerClock, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::read;
use tokio::io::unix::AsyncFd;

use crate::sys::descriptor::watch_readable;

/// Time in milliseconds that three readings of the clocks may take together to count as simultaneous.
const ONE_MOMENT: i64 = 5;

/// Returns the system time minus the time since boot, in milliseconds. It changes when the clock is set, and
/// only then: suspension and the slewing of NTP do not affect it.
///
/// # Errors
/// The errors of `clock_gettime(2)`.
pub fn offset() -> io::Result<i64> {
    let mut best = (i64::MAX, 0);
    // The machine may be held up between two readings; the quickest of a few tries counts.
    for _ in 0..5 {
        let before = milliseconds(ClockId::CLOCK_BOOTTIME)?;
        let day = milliseconds(ClockId::CLOCK_REALTIME)?;
        let after = milliseconds(ClockId::CLOCK_BOOTTIME)?;
        best = best.min((after.saturating_sub(before), day.saturating_sub(before)));
        if best.0 < ONE_MOMENT {
            break;
        }
    }
    Ok(best.1)
}

/// Returns the time since boot, including the time of suspension.
///
/// # Errors
/// The errors of `clock_gettime(2)`.
pub fn since_boot() -> io::Result<Duration> {
    Ok(Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME)?))
}

/// Returns whether a time source, such as NTP, keeps the system clock synchronized (adjtimex(2)).
pub fn is_synchronized() -> bool {
    discipline().is_ok_and(|state| state.is_synchronized)
}

/// State of the clock's synchronization, as the program that synchronizes it has reported to the kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Discipline {
    /// True if a time source keeps the clock synchronized.
    pub is_synchronized: bool,
    /// Seconds that it is corrected by.
    pub offset: f64,
    /// Seconds that it may be wrong by.
    pub max_error: f64,
}

/// Returns the state of the clock's synchronization.
///
/// # Errors
/// The errors of adjtimex(2).
#[allow(clippy::cast_precision_loss, reason = "the kernel bounds both to less than a minute")]
pub fn discipline() -> io::Result<Discipline> {
    // SAFETY: all zeros is a value of this structure of numbers; with no mode set, the kernel only fills it in.
    let (state, now) = unsafe {
        let mut now: libc::timex = std::mem::zeroed();
        (libc::adjtimex(&raw mut now), now)
    };
    if state < 0 {
        return Err(io::Error::last_os_error());
    }
    let unit = if now.status & libc::STA_NANO == 0 { 1e6 } else { 1e9 };
    Ok(Discipline {
        is_synchronized: state < libc::TIME_ERROR,
        offset: now.offset as f64 / unit,
        max_error: now.maxerror as f64 / 1e6,
    })
}

fn milliseconds(clock: ClockId) -> io::Result<i64> {
    let now = clock_gettime(clock)?;
    Ok(now.tv_sec().saturating_mul(1000).saturating_add(now.tv_nsec() / 1_000_000))
}

/// The kernel's word that the clock was set, `timerfd_create(2)`: a timer that never ends, and is cancelled
/// by that.
#[derive(Debug)]
pub struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    /// Watches for the first time that the clock is set from now on.
    ///
    /// # Errors
    /// The errors of `timerfd_create(2)` and `timerfd_settime(2)`.
    pub fn begin() -> io::Result<Self> {
        let timer =
            TimerFd::new(TimerClock::CLOCK_REALTIME, TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)?;
        let never = Expiration::OneShot(TimeSpec::new(libc::time_t::MAX, 0));
        let flags = TimerSetTimeFlags::TFD_TIMER_ABSTIME | TimerSetTimeFlags::TFD_TIMER_CANCEL_ON_SET;
        timer.set(never, flags)?;
        Ok(Self(watch_readable(timer.into())?))
    }

    /// Waits until the clock is set, or the machine resumes after a suspend.
    ///
    /// # Errors
    /// The errors of read(2).
    pub async fn set(self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|timer| Ok(read(timer.get_ref(), &mut [0; 8])?)) {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(error)) if error.raw_os_error() == Some(Errno::ECANCELED as i32) => return Ok(()),
                Ok(Err(error)) => return Err(error),
                Err(_not_yet) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_offset_stays_the_same() {
        let first = offset().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!((offset().unwrap() - first).abs() <= ONE_MOMENT);
    }

    #[tokio::test]
    async fn no_word_while_nobody_sets_the_clock() {
        let watch = Watch::begin().unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(50), watch.set()).await.is_err());
    }
}
