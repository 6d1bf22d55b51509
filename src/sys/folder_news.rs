//! Tells when files of a folder are written, come or go, inotify(7). The folder itself may come and go, too.

use std::io;
use std::path::{Path, PathBuf};

use nix::sys::inotify::{AddWatchFlags, Inotify, WatchDescriptor};

use crate::sys::inotify;

/// Told of everything in a folder from the time when this was made.
#[derive(Debug)]
pub struct FolderNews {
    inotify: Inotify,
    folder: PathBuf,
    inside: Option<WatchDescriptor>,
}

impl FolderNews {
    /// Begins to watch `folder`, and where it would be.
    ///
    /// # Errors
    /// As inotify(7) gives them.
    pub fn begin(folder: &Path) -> io::Result<Self> {
        let inotify = inotify::begin()?;
        let mut news = Self { inotify, folder: folder.to_owned(), inside: None };
        news.look();
        Ok(news)
    }

    /// Watches what is there by now. What is watched already stays so.
    fn look(&mut self) {
        // Files that are open to be written have not said all that they have to say until they are closed. A link is
        // never written.
        let written = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_CREATE;
        let moved = AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_MOVED_FROM | AddWatchFlags::IN_DELETE;
        if let Some(above) = self.folder.parent() {
            let comes_and_goes = AddWatchFlags::IN_CREATE | moved | AddWatchFlags::IN_ONLYDIR;
            if let Err(error) = self.inotify.add_watch(above, comes_and_goes) {
                tracing::debug!("{} is not watched: {error}", above.display());
            }
        }
        self.inside = self.inotify.add_watch(&self.folder, written | moved | AddWatchFlags::IN_ONLYDIR).ok();
    }

    /// Something changed. Everything until then is one change. Dropping the future loses none.
    ///
    /// # Errors
    /// As inotify(7) gives them.
    pub async fn changed(&mut self) -> io::Result<()> {
        loop {
            let events = inotify::events(&self.inotify).await?;
            let name = self.folder.file_name();
            let itself = events.iter().any(|event| event.name.as_deref() == name);
            let lost = events.iter().any(|event| event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW));
            let inside = events.iter().any(|event| Some(event.wd) == self.inside);
            if itself || lost {
                self.look();
            }
            if itself || lost || inside {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn files_and_the_folder_itself() {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("rules.d");
        let mut news = FolderNews::begin(&folder).unwrap();
        std::fs::write(above.path().join("other"), "").unwrap();
        assert_eq!(news.changed().now_or_never().map(Result::ok), None);
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
            while news.changed().now_or_never().is_some() {}
        }
        std::fs::read_dir(above.path()).unwrap().for_each(drop);
        assert_eq!(news.changed().now_or_never().map(Result::ok), None);
    }
}
