//! inotify(7) in the event loop.
//!
//! The kernel has few instances and watches for each user, and on a node of a Kubernetes cluster kubelet and the pods that run
//! as root use them up. Where it gives none, everything is told as lost every [`LOOK_AGAIN`], so that whoever listens looks
//! again, until there is room.

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

/// How often everything is told as lost while the kernel cannot tell.
pub const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// An instance, whether or not the kernel has one to give.
#[derive(Debug)]
pub struct Instance {
    kernel: OnceLock<Inotify>,
    /// There was no room for one of its watches.
    is_blind: AtomicBool,
    due: Mutex<Instant>,
}

/// Something that has happened.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// In a directory that is watched, to the file of this name; without a name, to the directory itself.
    In(WatchDescriptor, Option<OsString>),
    /// What has happened is not known.
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

    /// Asks the kernel for an instance.
    fn ask(&self) -> Result<(), Errno> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        // Only whoever waits for events asks again.
        drop(self.kernel.set(inotify));
        Ok(())
    }

    /// Watches a file or directory. Blocks if the file system hangs.
    ///
    /// # Errors
    /// As `inotify_add_watch(2)` gives them. Where there is no room, everything is told as lost now and then.
    pub fn watch(&self, path: &Path, mask: AddWatchFlags) -> io::Result<WatchDescriptor> {
        let inotify = self.kernel.get().ok_or(Errno::EMFILE)?;
        let watched = inotify.add_watch(path, mask);
        if let Err(error @ (Errno::ENOSPC | Errno::ENOMEM)) = watched {
            complain("watches", "fs.inotify.max_user_watches", error);
            self.is_blind.store(true, Ordering::Relaxed);
        }
        Ok(watched?)
    }

    /// Watches something no longer.
    ///
    /// # Errors
    /// As `inotify_rm_watch(2)` gives them, also if what was watched is gone.
    pub fn forget(&self, watch: WatchDescriptor) -> io::Result<()> {
        self.kernel.get().map_or(Ok(()), |inotify| Ok(inotify.rm_watch(watch)?))
    }

    /// What has happened, as soon as something has. Dropping the future loses nothing.
    ///
    /// # Errors
    /// As inotify(7) gives them.
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
            "no inotify {what} are left ({error}): other programs of this user have used them up; until there \
             are, changed files are noticed after up to {seconds} s: raise the sysctl {limit}"
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
        // However often whoever waits does something else.
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
