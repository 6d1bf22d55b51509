//! A file of records, one line each, written by a thread of its own: a disk that is slow, full or hangs costs records, which
//! are counted, and never holds up the program.
//!
//! The file is opened anew when its name leads elsewhere, as it does after a rotation of logs.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

/// Records that wait to be written.
const QUEUE: usize = 1024;

enum Message {
    Line(String),
    /// Everything before it is written.
    Done(SyncSender<()>),
}

/// The way to the thread.
#[derive(Debug)]
pub struct RecordFile {
    queue: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

impl RecordFile {
    /// Opens the file at `path` to append to it, for the process's own user only if it is new, and starts the thread.
    ///
    /// # Errors
    /// As open(2) gives them.
    pub fn open(path: &Path) -> io::Result<Self> {
        let (file, lost) = (open(path)?, Arc::new(AtomicU64::new(0)));
        let (queue, records) = sync_channel(QUEUE);
        let (path, counter) = (path.to_owned(), Arc::clone(&lost));
        let work = move || write(file, &path, &records, &counter);
        std::thread::Builder::new().name("records".into()).spawn(work)?;
        Ok(Self { queue, lost })
    }

    /// Hands over a record, without the line's end, or counts it as lost.
    pub fn write(&self, line: String) {
        if self.queue.try_send(Message::Line(line)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records that were lost since this was asked the last time.
    pub fn take_lost(&self) -> u64 {
        self.lost.swap(0, Ordering::Relaxed)
    }

    /// Waits so long for what is still to be written, at the end of the program. Blocks.
    pub fn finish(&self, patience: Duration) {
        let (done, written) = sync_channel(1);
        if self.queue.try_send(Message::Done(done)).is_ok() {
            let _ = written.recv_timeout(patience);
        }
    }
}

fn write(mut file: File, path: &Path, records: &Receiver<Message>, lost: &AtomicU64) {
    let mut is_torn = false;
    while let Ok(message) = records.recv() {
        match message {
            Message::Line(line) => {
                if !is_at(&file, path)
                    && let Ok(anew) = open(path)
                {
                    (file, is_torn) = (anew, false);
                }
                // What was written of a record before the disk was full stays a line of its own.
                let line = format!("{}{line}\n", if is_torn { "\n" } else { "" });
                is_torn = file.write_all(line.as_bytes()).is_err();
                lost.fetch_add(is_torn.into(), Ordering::Relaxed);
            }
            Message::Done(done) => drop(done.try_send(())),
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

fn is_at(file: &File, path: &Path) -> bool {
    let same = |file: io::Result<std::fs::Metadata>| file.map(|found| (found.dev(), found.ino())).ok();
    same(file.metadata()) == same(std::fs::metadata(path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn records_are_appended_and_a_rotated_file_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.json");
        let file = RecordFile::open(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        file.write("one".into());
        file.finish(LONG);
        std::fs::rename(&path, folder.path().join("audit.json.1")).unwrap();
        file.write("two".into());
        file.finish(LONG);
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!((read("audit.json.1").as_str(), read("audit.json").as_str()), ("one\n", "two\n"));
        assert_eq!(file.take_lost(), 0);
    }

    #[test]
    fn what_cannot_be_written_is_counted() {
        let file = RecordFile::open(Path::new("/dev/full")).unwrap();
        (0..3).for_each(|_| file.write("no room".into()));
        file.finish(LONG);
        assert_eq!((file.take_lost(), file.take_lost()), (3, 0));
    }

    #[test]
    fn a_disk_that_hangs_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _reader = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let file = RecordFile::open(&path).unwrap();
        // More than a pipe and the queue have room for.
        (0..4 * QUEUE).for_each(|_| file.write("x".repeat(1024)));
        let lost = file.take_lost();
        assert!(lost > 0 && lost < 4 * QUEUE as u64, "{lost}");
    }
}
