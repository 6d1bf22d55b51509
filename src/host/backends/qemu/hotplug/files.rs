//! File operations for attaching, listing and removing disks. Each has a deadline and uses one of a few
//! threads, because any of the files may be on a file system that hangs.
//!
//! The directory of the volumes has a [`Worker`] with a single place. The files that administrators name may be
//! anywhere, so they have another worker with a few places: a file system that hangs does not block the next
//! file as long as a place is free.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::super::super::disks::DiskError;
use super::super::worker::Worker;

/// Timeout of an operation on a file, longer than a busy disk needs.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of concurrent operations on files that administrators name.
const PLACES: usize = 4;

/// Runs file operations.
#[derive(Debug, Clone)]
pub struct Files {
    volumes: PathBuf,
    in_volumes: Arc<Worker>,
    anywhere: Arc<Worker>,
}

impl Files {
    /// Creates the workers, for volumes in that directory.
    pub fn new(volumes: PathBuf) -> Self {
        Self::with(volumes, PATIENCE)
    }

    fn with(volumes: PathBuf, patience: Duration) -> Self {
        let (in_volumes, anywhere) = (Worker::new(patience), Worker::with_places(patience, PLACES));
        Self { volumes, in_volumes: Arc::new(in_volumes), anywhere: Arc::new(anywhere) }
    }

    /// Returns the directory of the volumes.
    pub fn volumes(&self) -> &Path {
        &self.volumes
    }

    /// Runs `work`, which may block, in the directory of the volumes.
    ///
    /// # Errors
    /// If it is not completed in time. It may have begun, and then continues.
    pub async fn in_volumes<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, DiskError> {
        let done = self.in_volumes.run(work).await;
        done.map_err(|late| {
            let volumes = self.volumes.display();
            DiskError::Unreachable(format!("the directory {volumes} (volumes-dir) cannot be used: {late}"))
        })
    }

    /// Runs `work`, which may block, on a file that an administrator named.
    ///
    /// # Errors
    /// If it is not completed in time, or too many earlier operations are late.
    pub async fn at<T: Send + 'static>(
        &self,
        file: &Path,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, DiskError> {
        let file = file.display();
        if self.anywhere.silent().is_some() {
            return Err(DiskError::Unreachable(format!(
                "the file {file} is not examined: the file systems of {PLACES} other files do not answer"
            )));
        }
        let done = self.anywhere.run(work).await;
        done.map_err(|late| DiskError::Unreachable(format!("the file {file} cannot be examined: {late}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn files_that_hang_take_few_threads_and_give_them_back() {
        let files = Files::with("/volumes".into(), Duration::from_millis(100));
        let (ends, end) = std::sync::mpsc::channel::<()>();
        let end = Arc::new(std::sync::Mutex::new(end));
        let hanging = || {
            let end = Arc::clone(&end);
            move || {
                end.lock().unwrap().recv().unwrap_err();
            }
        };
        let path = Path::new("/hung/a.raw");
        for number in 0..PLACES {
            let late = files.at(path, hanging()).await.unwrap_err().to_string();
            assert!(
                late.contains("/hung/a.raw cannot be examined: its file system has not answered"),
                "{late}"
            );
            // A place for other files is still free.
            assert_eq!(files.at(Path::new("/b"), || 7).await.ok(), Some(7).filter(|_| number + 1 < PLACES));
        }
        let refused = files.at(path, || unreachable!("nothing is begun")).await.unwrap_err();
        assert!(
            refused.to_string().contains("is not examined: the file systems of 4 other files"),
            "{refused}"
        );
        let late = files.in_volumes(hanging()).await.unwrap_err().to_string();
        assert!(late.contains("the directory /volumes (volumes-dir) cannot be used"), "{late}");
        drop(ends);
        while files.anywhere.silent().is_some() || files.in_volumes.silent().is_some() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(files.at(path, || 7).await.unwrap(), 7);
        assert_eq!(files.in_volumes(|| 7).await.unwrap(), 7);
    }
}
