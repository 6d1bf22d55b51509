//! Watch on one directory, inotify(7): reports when its files are written, created or removed. The directory
//! itself may be created and removed, too.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::inotify::{AddWatchFlags, WatchDescriptor};

use crate::sys::blocking;
use crate::sys::inotify::{Event, Instance};

/// Watch that reports every change in a directory from its creation on.
#[derive(Debug)]
pub struct FolderNews {
    inotify: Arc<Instance>,
    folder: PathBuf,
    inside: Option<WatchDescriptor>,
    /// True if a change has not been reported yet; the current contents may then be unwatched.
    stale: bool,
}

impl FolderNews {
    /// Starts watching `folder`, and the directory that contains it. Blocks if the file system hangs.
    pub fn begin(folder: &Path) -> Self {
        let inotify = Arc::new(Instance::begin());
        let inside = look(&inotify, folder);
        Self { inotify, folder: folder.to_owned(), inside, stale: false }
    }

    /// Waits for a change. All changes up to then are reported as one. Dropping the future loses no change.
    ///
    /// # Errors
    /// The errors of inotify(7).
    pub async fn changed(&mut self) -> io::Result<()> {
        while !self.stale {
            let events = self.inotify.events().await?;
            let itself = self.folder.file_name();
            self.stale = events.iter().any(|event| match event {
                Event::In(_, name) => name.as_deref() == itself,
                Event::Lost => true,
            });
            let inside = |event: &Event| matches!(event, Event::In(watch, _) if Some(*watch) == self.inside);
            if !self.stale && events.iter().any(inside) {
                return Ok(());
            }
        }
        let (inotify, folder) = (Arc::clone(&self.inotify), self.folder.clone());
        self.inside = blocking::run(move || look(&inotify, &folder)).await;
        self.stale = false;
        Ok(())
    }
}

/// Watches what is there by now. What is watched already stays so.
fn look(inotify: &Instance, folder: &Path) -> Option<WatchDescriptor> {
    // Files that are open to be written have not said all that they have to say until they are closed. A link is never
    // written.
    let written = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_CREATE;
    let moved = AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_MOVED_FROM | AddWatchFlags::IN_DELETE;
    if let Some(above) = folder.parent() {
        let comes_and_goes = AddWatchFlags::IN_CREATE | moved | AddWatchFlags::IN_ONLYDIR;
        if let Err(error) = inotify.watch(above, comes_and_goes) {
            tracing::debug!("{} is not watched: {error}", above.display());
        }
    }
    inotify.watch(folder, written | moved | AddWatchFlags::IN_ONLYDIR).ok()
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn is_quiet(news: &mut FolderNews) -> bool {
        tokio::time::timeout(Duration::from_millis(200), news.changed()).await.is_err()
    }

    #[tokio::test]
    async fn files_and_the_folder_itself() {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("rules.d");
        let mut news = FolderNews::begin(&folder);
        std::fs::write(above.path().join("other"), "").unwrap();
        assert!(is_quiet(&mut news).await);
        for turn in 0..2 {
            std::fs::create_dir(&folder).unwrap();
            news.changed().await.unwrap();
            std::fs::write(folder.join("new"), "x").unwrap();
            news.changed().await.unwrap();
            std::fs::rename(folder.join("new"), folder.join("renamed")).unwrap();
            news.changed().await.unwrap();
            std::fs::remove_file(folder.join("renamed")).unwrap();
            news.changed().await.unwrap();
            std::fs::rename(&folder, above.path().join(format!("gone-{turn}"))).unwrap();
            news.changed().await.unwrap();
            while !is_quiet(&mut news).await {}
        }
        std::fs::read_dir(above.path()).unwrap().for_each(drop);
        assert!(is_quiet(&mut news).await);
    }
}
