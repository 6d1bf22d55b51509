//! inotify(7) in the event loop.

use std::io;
use std::os::fd::AsFd as _;

use nix::errno::Errno;
use nix::sys::inotify::{InitFlags, Inotify, InotifyEvent};
use tokio::io::Interest;

use crate::sys::descriptor::wait;

/// An instance that watches nothing yet.
///
/// # Errors
/// As `inotify_init1(2)` gives them.
pub fn begin() -> io::Result<Inotify> {
    Ok(Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?)
}

/// What has happened, as soon as something has. Dropping the future loses nothing.
///
/// # Errors
/// As inotify(7) gives them.
pub async fn events(inotify: &Inotify) -> io::Result<Vec<InotifyEvent>> {
    loop {
        match inotify.read_events() {
            Ok(events) => return Ok(events),
            Err(Errno::EAGAIN) => wait(inotify.as_fd(), Interest::READABLE).await?,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
