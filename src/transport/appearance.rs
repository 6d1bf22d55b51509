//! Waiting for a device node to appear.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::unix::AsyncFd;

use crate::sys::descriptor::watch_readable;

/// Notices files that appear in the folder of a path, or in the nearest folder above it that exists.
#[derive(Debug)]
pub struct Watch {
    inotify: AsyncFd<OwnedFd>,
}

impl Watch {
    /// Begins to watch, for what appears from now on: look for the file after this.
    ///
    /// # Errors
    /// As inotify(7) gives them.
    pub fn new(path: &Path) -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let mut folder = path.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned);
        let what = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_ATTRIB;
        while inotify.add_watch(&folder, what).is_err() {
            if !folder.pop() {
                return Err(io::Error::new(io::ErrorKind::NotFound, "no folder to watch"));
            }
        }
        Ok(Self { inotify: watch_readable(inotify.into())? })
    }

    /// Something appeared, or changed its mode.
    ///
    /// # Errors
    /// As epoll(7) gives them.
    pub async fn changed(&self) -> io::Result<()> {
        drop(self.inotify.readable().await?);
        Ok(())
    }
}
