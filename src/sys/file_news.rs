//! Watch on a set of files, inotify(7): reports when they may have changed, because they or the directories
//! that contain them were written, replaced, created or removed.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use nix::sys::inotify::{AddWatchFlags, WatchDescriptor};

use crate::sys::inotify::{Event, Instance};

/// Folders that are watched for one file: its own and the one above, or where they would be.
const ABOVE: usize = 2;

/// Watch that reports changes of some files from the time when they were set.
#[derive(Debug)]
pub struct FileNews {
    inotify: Instance,
    files: Vec<PathBuf>,
    watched: BTreeMap<PathBuf, WatchDescriptor>,
}

impl FileNews {
    /// Begins to watch `files`; none of them has to be there.
    pub fn begin(files: Vec<PathBuf>) -> Self {
        let mut news = Self { inotify: Instance::begin(), files, watched: BTreeMap::new() };
        news.look();
        news
    }

    /// Watches these files in place of the previous ones.
    pub fn follow(&mut self, files: Vec<PathBuf>) {
        if files != self.files {
            self.files = files;
            self.look();
        }
    }

    /// Watches the directories that exist now, and repeats this if one appears meanwhile.
    fn look(&mut self) {
        loop {
            let folders = self.folders();
            let (gone, known) = std::mem::take(&mut self.watched)
                .into_iter()
                .partition::<BTreeMap<_, _>, _>(|(folder, _)| !folders.contains(folder));
            for watch in gone.into_values() {
                // If the directory was removed, the kernel has dropped the watch already.
                let _ = self.inotify.forget(watch);
            }
            self.watched = known;
            for folder in &folders {
                let changes = AddWatchFlags::IN_CLOSE_WRITE
                    | AddWatchFlags::IN_CREATE
                    | AddWatchFlags::IN_ATTRIB
                    | AddWatchFlags::IN_MOVED_TO
                    | AddWatchFlags::IN_MOVED_FROM
                    | AddWatchFlags::IN_DELETE
                    | AddWatchFlags::IN_ONLYDIR;
                match self.inotify.watch(folder, changes) {
                    Ok(watch) => drop(self.watched.insert(folder.clone(), watch)),
                    Err(error) => tracing::debug!("{} is not watched: {error}", folder.display()),
                }
            }
            if self.folders() == folders {
                return;
            }
        }
    }

    fn folders(&self) -> Vec<PathBuf> {
        let above = |file: &PathBuf| {
            let folders: Vec<_> = file.ancestors().skip(1).map(Path::to_owned).collect();
            folders.into_iter().filter(|folder| folder.is_dir()).take(ABOVE)
        };
        let mut folders: Vec<_> = self.files.iter().flat_map(above).collect();
        folders.sort_unstable();
        folders.dedup();
        folders
    }

    /// Waits until something may have changed. All changes up to then are reported as one. Dropping the future
    /// loses no change.
    ///
    /// # Errors
    /// The errors of inotify(7).
    pub async fn changed(&mut self) -> io::Result<()> {
        loop {
            let events = self.inotify.events().await?;
            let concerns = events.iter().any(|event| match event {
                Event::In(watch, name) => self.concerns(*watch, name.as_deref()),
                Event::Lost => true,
            });
            if concerns {
                self.look();
                return Ok(());
            }
        }
    }

    /// Returns whether an event concerns one of the files, or a directory on the path to one.
    fn concerns(&self, watch: WatchDescriptor, name: Option<&OsStr>) -> bool {
        let folder = self.watched.iter().find(|(_, known)| **known == watch).map(|(folder, _)| folder);
        let Some((folder, name)) = folder.zip(name) else { return false };
        // The link that Kubernetes moves when it changes a mounted volume.
        if name == "..data" {
            return true;
        }
        let path = folder.join(name);
        self.files.iter().any(|file| file.starts_with(&path))
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_file_and_the_folders_on_the_way_to_it() {
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("a/b/c/file");
        let mut news = FileNews::begin(vec![path.clone()]);
        std::fs::write(above.path().join("other"), "").unwrap();
        assert_eq!(news.changed().now_or_never().map(Result::ok), None);
        for _ in 0..2 {
            // Created at once with its parents, to check that a directory is noticed even if it is made before its parent
            // is watched.
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            news.changed().await.unwrap();
            std::fs::write(&path, "x").unwrap();
            news.changed().await.unwrap();
            while news.changed().now_or_never().is_some() {}
            std::fs::write(path.with_file_name("beside"), "x").unwrap();
            assert_eq!(news.changed().now_or_never().map(Result::ok), None);
            std::fs::rename(path.with_file_name("beside"), &path).unwrap();
            news.changed().await.unwrap();
            std::fs::remove_dir_all(above.path().join("a")).unwrap();
            news.changed().await.unwrap();
            while news.changed().now_or_never().is_some() {}
        }
        news.follow(vec![above.path().join("other")]);
        std::fs::write(above.path().join("other"), "y").unwrap();
        news.changed().await.unwrap();
    }
}
