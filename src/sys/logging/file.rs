//! A log file, written by a thread of its own, so that a disk that is slow, full or frozen costs entries and never
//! holds up the program.
//!
//! ```text
//! entry ──▶ queue (bounded; what does not fit is counted) ──▶ thread ──▶ file
//!                                                               └─ waits while logging is paused
//! ```
//!
//! The file is opened anew when its name leads elsewhere, as it does after a rotation of logs.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tracing::Level;

use crate::sys::calendar::Date;

/// Entries of the log that wait to be written.
const QUEUE: usize = 256;
/// Time that the end of the program waits for pending lines to be written.
const LAST_WORDS: Duration = Duration::from_secs(1);

static PAUSED: Mutex<bool> = Mutex::new(false);
static RESUMED: Condvar = Condvar::new();
static WRITERS: Mutex<Vec<SyncSender<Message>>> = Mutex::new(Vec::new());

#[derive(Debug)]
enum Message {
    /// A line, and how many count as lost if it cannot be written.
    Line(Vec<u8>, u64),
    /// Request to confirm that everything before it is written.
    Done(SyncSender<()>),
}

/// Until [`resume`] nothing is written to a log file or to standard error. Call it before file systems are frozen.
pub fn pause() {
    *paused() = true;
}

/// Ends what [`pause`] began.
pub fn resume() {
    *paused() = false;
    RESUMED.notify_all();
}

/// Returns whether logging is paused.
pub fn is_paused() -> bool {
    *paused()
}

fn paused() -> MutexGuard<'static, bool> {
    PAUSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits a moment for what is still to be written, at the end of the program.
pub fn finish() {
    if is_paused() {
        return;
    }
    for writer in WRITERS.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        finished(writer, LAST_WORDS);
    }
}

/// A file that lines are appended to; the way to its thread.
#[derive(Debug)]
pub struct Lines {
    writer: SyncSender<Message>,
    lost: Arc<AtomicU64>,
}

impl Lines {
    /// Opens the file at `path` for appending, and starts the writer thread. A new file is accessible to root and
    /// the user of this process only. Up to this many lines may wait to be written.
    ///
    /// # Errors
    /// The errors of open(2).
    pub fn start(path: &Path, queue: usize) -> io::Result<Self> {
        let (file, lost) = (open(path)?, Arc::new(AtomicU64::new(0)));
        let (writer, entries) = sync_channel(queue);
        let (path, counter) = (path.to_owned(), Arc::clone(&lost));
        let work = move || write(file, &path, &entries, &counter);
        std::thread::Builder::new().name("log".into()).spawn(work)?;
        WRITERS.lock().unwrap_or_else(PoisonError::into_inner).push(writer.clone());
        Ok(Self { writer, lost })
    }

    /// Hands over a line with its end; false if there is no room for it, and it is lost.
    pub fn append(&self, line: impl Into<Vec<u8>>) -> bool {
        self.append_counting(line, 1)
    }

    /// Appends a line, as [`Self::append`] does, that reports a number of other lines: if it is lost, `count`
    /// lines are.
    pub fn append_counting(&self, line: impl Into<Vec<u8>>, count: u64) -> bool {
        let is_taken = self.writer.try_send(Message::Line(line.into(), count)).is_ok();
        if !is_taken {
            self.lost.fetch_add(count, Ordering::Relaxed);
        }
        is_taken
    }

    /// Returns the number of lines that were lost since the last call, because there was no room for them in the
    /// queue or on the disk.
    pub fn take_lost(&self) -> u64 {
        self.lost.swap(0, Ordering::Relaxed)
    }

    /// Waits so long for what is still to be written; false if it is not by then. Blocks.
    pub fn finish(&self, patience: Duration) -> bool {
        finished(&self.writer, patience)
    }
}

fn finished(writer: &SyncSender<Message>, patience: Duration) -> bool {
    let (done, written) = sync_channel(1);
    writer.try_send(Message::Done(done)).is_ok() && written.recv_timeout(patience).is_ok()
}

/// The log as lines with their time and level.
pub struct Log {
    lines: Lines,
    lost: AtomicU64,
}

impl Log {
    /// Starts the writer, as [`Lines::start`] does.
    ///
    /// # Errors
    /// The errors of open(2).
    pub fn start(path: &Path) -> io::Result<Self> {
        Ok(Self { lines: Lines::start(path, QUEUE)?, lost: AtomicU64::new(0) })
    }

    /// Hands over an entry, or counts it as lost.
    pub fn take(&self, level: Level, text: &[u8]) {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        let mut line = Vec::with_capacity(text.len() + 40);
        let now = timestamp(SystemTime::now());
        if lost > 0 {
            line.extend_from_slice(format!("{now}  WARN {lost} entries before were lost\n").as_bytes());
        }
        line.extend_from_slice(format!("{now} {level:>5} ").as_bytes());
        line.extend_from_slice(text);
        if !self.lines.append(line) {
            self.lost.fetch_add(lost + 1, Ordering::Relaxed);
        }
    }
}

fn write(mut file: File, path: &Path, entries: &Receiver<Message>, lost: &AtomicU64) {
    let mut is_torn = false;
    while let Ok(message) = entries.recv() {
        drop(RESUMED.wait_while(paused(), |paused| *paused));
        match message {
            Message::Line(line, count) => {
                if !is_at(&file, path)
                    && let Ok(anew) = open(path)
                {
                    (file, is_torn) = (anew, false);
                }
                // If the disk was full in the middle of a line, the part that was written stays a line of its own.
                let line = if is_torn { [b"\n", line.as_slice()].concat() } else { line };
                is_torn = file.write_all(&line).is_err();
                if is_torn {
                    lost.fetch_add(count, Ordering::Relaxed);
                }
            }
            Message::Done(done) => drop(done.try_send(())),
        }
    }
}

/// A file that is there is opened without the flag to create it: with it, open(2) would wait on a file system that is
/// frozen.
fn open(path: &Path) -> io::Result<File> {
    match OpenOptions::new().append(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            OpenOptions::new().append(true).create(true).mode(0o600).open(path)
        }
        opened => opened,
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let same = |file: io::Result<std::fs::Metadata>| file.map(|found| (found.dev(), found.ino())).ok();
    same(file.metadata()) == same(std::fs::metadata(PathBuf::from(path)))
}

/// Formats a time in UTC, as in RFC 3339.
pub fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let Date { year, month, day, hour, minute, second } =
        Date::of(i64::try_from(since.as_secs()).unwrap_or(i64::MAX));
    let micro = since.subsec_micros();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micro:06}Z")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn timestamps() {
        let cases = [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (951_868_800, "2000-03-01T00:00:00.000000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn entries_are_appended_and_wait_while_logging_is_paused_and_a_rotated_file_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, "before\n").unwrap();
        let log = Log::start(&path).unwrap();
        let written = || {
            let (done, written) = sync_channel(1);
            log.lines.writer.send(Message::Done(done)).unwrap();
            written.recv_timeout(Duration::from_secs(20)).is_ok()
        };
        log.take(Level::INFO, b"one\n");
        assert!(written());
        pause();
        log.take(Level::WARN, b"two\n");
        for _ in 0..2 * QUEUE {
            log.take(Level::WARN, b"more\n");
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("before\n2") && text.ends_with("Z  INFO one\n"), "{text}");
        resume();
        assert!(written());
        log.take(Level::WARN, b"after\n");
        assert!(written());
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("  WARN two\n") && text.contains("entries before were lost\n"), "{text}");
        std::fs::rename(&path, folder.path().join("log.1")).unwrap();
        log.take(Level::INFO, b"anew\n");
        assert!(written());
        assert!(std::fs::read_to_string(&path).unwrap().ends_with("anew\n"));
    }

    const LONG: Duration = Duration::from_secs(20);
    const RECORDS: usize = 1024;

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn records_are_appended_and_a_rotated_file_is_begun_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.json");
        let file = Lines::start(&path, RECORDS).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        file.append("one\n");
        assert!(file.finish(LONG));
        std::fs::rename(&path, folder.path().join("audit.json.1")).unwrap();
        file.append("two\n");
        assert!(file.finish(LONG));
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!((read("audit.json.1").as_str(), read("audit.json").as_str()), ("one\n", "two\n"));
        assert_eq!(file.take_lost(), 0);
    }

    #[test]
    fn what_cannot_be_written_is_counted() {
        let file = Lines::start(Path::new("/dev/full"), RECORDS).unwrap();
        for _ in 0..3 {
            file.append("no room\n");
        }
        assert!(file.finish(LONG));
        assert_eq!((file.take_lost(), file.take_lost()), (3, 0));
    }

    #[test]
    fn a_disk_that_hangs_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let _reader = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let file = Lines::start(&path, RECORDS).unwrap();
        // More than a pipe and the queue have room for.
        for _ in 0..4 * RECORDS {
            file.append("x".repeat(1024) + "\n");
        }
        let lost = file.take_lost();
        assert!(lost > 0 && lost < 4 * RECORDS as u64, "{lost}");
    }
}
