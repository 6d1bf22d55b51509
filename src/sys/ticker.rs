//! A periodic timer of the kernel, `timerfd_create(2)`.
//!
//! The event loop's own timers wake the process several times on the way to one that is seconds away; this
//! one wakes it once.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::unistd::read;
use tokio::io::unix::AsyncFd;

use crate::sys::descriptor::watch_readable;

/// Ticks at a fixed interval, on the monotonic clock: it rests while the machine is suspended.
#[derive(Debug)]
pub struct Ticker(AsyncFd<OwnedFd>);

impl Ticker {
    /// The first tick is one `interval` away.
    ///
    /// # Errors
    /// As `timerfd_create(2)` and `timerfd_settime(2)` give them.
    pub fn new(interval: Duration) -> io::Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?;
        let every = Expiration::Interval(TimeSpec::from_duration(interval));
        timer.set(every, TimerSetTimeFlags::empty())?;
        Ok(Self(watch_readable(timer.into())?))
    }

    /// Waits for the next tick. Ticks that passed without a waiter count as one.
    ///
    /// # Errors
    /// The errors of read(2).
    pub async fn tick(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|timer| Ok(read(timer.get_ref(), &mut [0; 8])?)) {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(error)) => return Err(error),
                Err(_not_yet) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ticks_come_again_and_again() {
        let ticker = Ticker::new(Duration::from_millis(5)).unwrap();
        for _ in 0..3 {
            ticker.tick().await.unwrap();
        }
    }
}
