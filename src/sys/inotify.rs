//! Integration of inotify(7) with the event loop.
//!
//! The kernel limits instances and watches per user, and on a Kubernetes node kubelet and the pods that run as
//! root use them up. While the kernel grants none, lost events are reported every [`LOOK_AGAIN`], so that the
//! caller checks again, until there is room.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, OnceLock, PoisonError};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::Interest;
use tokio::time::{Instant, sleep_until};

use crate::sys::descriptor::wait;

/// Interval at which lost events are reported while the kernel cannot report changes.
pub const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// An instance, whether or not the kernel has one to give.
#[derive(Debug)]
pub struct Instance {
    kernel: OnceLock<Inotify>,
    /// True if there was no room for one of the watches.
    is_blind: AtomicBool,
    due: Mutex<Instant>,
}

/// Event of a watch.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Change to the file of this name in a watched directory; without a name, to the directory itself.
    In(WatchDescriptor, Option<OsString>),
    /// Lost events: anything may have changed.
    Lost,
}

impl Instance {
    /// One that watches nothing yet.
    pub fn begin() -> Self {
        let now = Instant::now();
        let made =
            Self { kernel: OnceLock::new(), is_blind: false.into(), due: Mutex::new(now + LOOK_AGAIN) };
        if let Err(error) = made.ask() {
            complain("instances", "fs.inotify.max_user_instances", error);
        }
        made
    }

    /// Requests an instance from the kernel.
    fn ask(&self) -> Result<(), Errno> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        // Cannot be set already: only the one waiter for events asks again.
        drop(self.kernel.set(inotify));
        Ok(())
    }

    /// Watches a file or directory. Blocks if the file system hangs.
    ///
    /// # Errors
    /// The errors of `inotify_add_watch(2)`. If there is no room for the watch, lost events are reported from time
    /// to time.
    pub fn watch(&self, path: &Path, mask: AddWatchFlags) -> io::Result<WatchDescriptor> {
        let inotify = self.kernel.get().ok_or(Errno::EMFILE)?;
        let watched = inotify.add_watch(path, mask);
        if let Err(error @ (Errno::ENOSPC | Errno::ENOMEM)) = watched {
            complain("watches", "fs.inotify.max_user_watches", error);
            self.is_blind.store(true, Ordering::Relaxed);
        }
        Ok(watched?)
    }

    /// Removes a watch.
    ///
    /// # Errors
    /// The errors of `inotify_rm_watch(2)`, also if the watched file no longer exists.
    pub fn forget(&self, watch: WatchDescriptor) -> io::Result<()> {
        self.kernel.get().map_or(Ok(()), |inotify| Ok(inotify.rm_watch(watch)?))
    }

    /// Waits for events and returns them. Dropping the future loses none.
    ///
    /// # Errors
    /// The errors of inotify(7).
    pub async fn events(&self) -> io::Result<Vec<Event>> {
        loop {
            let Some(inotify) = self.kernel.get() else {
                self.next_look().await;
                if self.ask().is_ok() {
                    tracing::info!("the kernel reports changed files again");
                }
                return Ok(vec![Event::Lost]);
            };
            match inotify.read_events() {
                Ok(events) => return Ok(events.into_iter().map(Event::from).collect()),
                Err(Errno::EAGAIN) if self.is_blind.load(Ordering::Relaxed) => {
                    tokio::select! {
                        readable = wait(inotify.as_fd(), Interest::READABLE) => readable?,
                        () = self.next_look() => {
                            self.is_blind.store(false, Ordering::Relaxed);
                            return Ok(vec![Event::Lost]);
                        }
                    }
                }
                Err(Errno::EAGAIN) => wait(inotify.as_fd(), Interest::READABLE).await?,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until it is time to look again.
    async fn next_look(&self) {
        let due = *self.due.lock().unwrap_or_else(PoisonError::into_inner);
        sleep_until(due).await;
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + LOOK_AGAIN;
    }
}

impl From<InotifyEvent> for Event {
    fn from(event: InotifyEvent) -> Self {
        if event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
            Self::Lost
        } else {
            Self::In(event.wd, event.name)
        }
    }
}

/// Says once that the kernel has no room.
fn complain(what: &str, limit: &str, error: Errno) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let seconds = LOOK_AGAIN.as_secs();
        tracing::warn!(
            "no inotify {what} are left ({error}): other programs of this user have used them up. Until some \
             are free, changed files are noticed after up to {seconds} s; raise the sysctl {limit}"
        );
    });
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn without_the_kernel() -> Instance {
        Instance {
            kernel: OnceLock::new(),
            is_blind: false.into(),
            due: Mutex::new(Instant::now() + LOOK_AGAIN),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn without_an_instance_everything_is_lost_now_and_then_until_there_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let instance = without_the_kernel();
        assert!(instance.watch(folder.path(), AddWatchFlags::IN_CREATE).is_err());
        // However often the waiting future is dropped and made again.
        for _ in 0..9 {
            assert_eq!(instance.events().now_or_never().map(Result::ok), None);
            tokio::time::advance(LOOK_AGAIN / 9 + Duration::from_millis(1)).await;
        }
        assert_eq!(instance.events().now_or_never().unwrap().unwrap(), [Event::Lost]);
        // The test's kernel has one by now.
        let watch = instance.watch(folder.path(), AddWatchFlags::IN_CREATE).unwrap();
        std::fs::write(folder.path().join("new"), "").unwrap();
        assert_eq!(instance.events().await.unwrap(), [Event::In(watch, Some("new".into()))]);
        tokio::time::advance(2 * LOOK_AGAIN).await;
        assert_eq!(instance.events().now_or_never().map(Result::ok), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_there_was_no_room_to_watch_is_looked_at_once_more() {
        let instance = Instance::begin();
        instance.is_blind.store(true, Ordering::Relaxed);
        assert_eq!(instance.events().await.unwrap(), [Event::Lost]);
        tokio::time::advance(2 * LOOK_AGAIN).await;
        assert_eq!(instance.events().now_or_never().map(Result::ok), None);
    }
}
