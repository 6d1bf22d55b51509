//! Waiting for a device node to appear.

use std::io;
use std::path::{Path, PathBuf};

use nix::sys::inotify::AddWatchFlags;

use crate::sys::inotify::Instance;

/// Watch for files that appear in the directory of a path, or in its nearest ancestor that exists.
#[derive(Debug)]
pub struct Watch(Instance);

impl Watch {
    /// Begins to watch, for what appears from now on: look for the file after this.
    pub fn new(path: &Path) -> Self {
        let inotify = Instance::begin();
        let mut folder = path.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned);
        let what = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_ATTRIB;
        while inotify.watch(&folder, what).is_err() && folder.pop() {}
        Self(inotify)
    }

    /// Waits until a file may have appeared, or changed its mode.
    ///
    /// # Errors
    /// The errors of inotify(7).
    pub async fn changed(&self) -> io::Result<()> {
        self.0.events().await.map(drop)
    }
}
