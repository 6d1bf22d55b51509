//! Files that clients have open: a bounded number of handles, which outlive a client's connection.
//!
//! Every call that may reach the file system runs on a thread of its own and holds its file meanwhile, so that a
//! disk that hangs blocks the calls on one file and nothing else. This includes fstat(2), lseek(2), which takes
//! the inode's lock in some file systems, and a read with `RWF_NOWAIT`, which may have to read the block map of
//! the file. To add a verb: follow [`Files::seek`], which uses `Files::with`.

mod mode;
mod reading;

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex as Turns, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};

use crate::sys::refused::Refused;
use crate::sys::{blocking, clock, descriptor, open};

pub use crate::sys::open::Place;
pub use mode::Mode;
pub use reading::{PIECE, Piece, Pieces};

/// Maximum number of open files. The limit of descriptors is set to allow that many ([`descriptor`]).
pub const MAX_OPEN: usize = 512;
/// Maximum count of one read, in bytes. This is QEMU's; as base64 it is 64 MiB.
pub const MAX_READ: usize = 48 << 20;

/// Smallest handle, as in qemu-ga.
const FIRST_HANDLE: i64 = 1000;
/// Number of possible handles: clients keep handles in 31 bits.
const HANDLES: i64 = (1 << 31) - FIRST_HANDLE;

/// Returns the handle for this time since boot, in milliseconds modulo `HANDLES`. It repeats after 24 days only,
/// so that a restarted agent does not reuse a handle of its earlier run, without having to store the last handle
/// in a file.
fn handle_at(since_boot: Duration) -> i64 {
    let milliseconds = i64::try_from(since_boot.as_millis()).unwrap_or(i64::MAX);
    FIRST_HANDLE + milliseconds % HANDLES
}

/// Reason why a call on a file failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The handle was closed, or never opened.
    #[error("this is not the handle of an open file")]
    UnknownHandle,
    /// [`MAX_OPEN`] files are open.
    #[error("{MAX_OPEN} files are open, which is the limit; close some")]
    TooMany,
    /// The operating system refused the call.
    #[error("cannot {doing} {path}")]
    Io {
        /// Operation that failed, such as "open".
        doing: &'static str,
        /// Path as it was given when the file was opened.
        path: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Only a part was written before the operating system refused.
    #[error("only {written} of {count} bytes were written to {path}")]
    Partly {
        /// Number of bytes that were written.
        written: usize,
        /// Number of bytes in the request.
        count: usize,
        /// Path as it was given when the file was opened.
        path: String,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Files that are open, by handle.
pub struct Files {
    table: Mutex<Table>,
    places: Arc<Semaphore>,
}

#[derive(Default)]
struct Table {
    open: HashMap<i64, Arc<Handle>>,
    /// Handle that was given out last; 0, which is no handle, before the first.
    last: i64,
}

/// Open file. The holder of the turn has exclusive access.
struct Handle {
    path: String,
    turn: Arc<Turns<Option<File>>>,
    _place: OwnedSemaphorePermit,
}

/// Open file to which the holder has exclusive access.
struct Held {
    path: String,
    file: OwnedMutexGuard<Option<File>>,
}

impl Default for Files {
    /// Creates a table without open files.
    fn default() -> Self {
        Self { table: Mutex::default(), places: Arc::new(Semaphore::new(MAX_OPEN)) }
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = MAX_OPEN - self.places.available_permits();
        formatter.debug_struct("Files").field("open", &open).finish_non_exhaustive()
    }
}

impl Files {
    /// Opens the file at `path`, which is relative to the root directory, and returns its handle. `may` decides on the
    /// file that the path leads to with every link resolved.
    ///
    /// # Errors
    /// If `may` or the system refuses, or too many files are open.
    pub async fn open<E>(
        &self,
        path: PathBuf,
        mode: Mode,
        may: impl Fn(&Place) -> Result<(), E> + Send + 'static,
    ) -> Result<i64, E>
    where
        E: From<Error> + Send + 'static,
    {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| Error::TooMany)?;
        let name = path.display().to_string();
        let opening = blocking::run(move || {
            open::open(&path, mode.how(), |place| may(place).map_err(Refused::Caller)).map_err(|refused| {
                match refused {
                    Refused::Caller(error) => error,
                    Refused::System(source) => {
                        Error::Io { doing: "open", path: path.display().to_string(), source }.into()
                    }
                }
            })
        });
        let file = opening.await?;
        let turn = Arc::new(Turns::new(Some(file)));
        let handle = Arc::new(Handle { path: name, turn, _place: place });
        loop {
            if let Some(number) = self.begin(&handle) {
                return Ok(number);
            }
            // The handle of this millisecond is in use: try the next one.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn begin(&self, handle: &Arc<Handle>) -> Option<i64> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        // Linux always has that clock. Without it the handles would still be unique within this run.
        let moment = clock::since_boot().ok();
        let number = moment.map_or_else(|| FIRST_HANDLE.max(table.last + 1), handle_at);
        if number == table.last || table.open.contains_key(&number) {
            return None;
        }
        table.last = number;
        table.open.insert(number, Arc::clone(handle));
        Some(number)
    }

    /// Closes a file after the calls under way on it have ended. The handle is invalid afterwards, even if close(2)
    /// fails.
    ///
    /// # Errors
    /// If the handle is unknown, or as close(2) returns them: it may report that earlier writes failed.
    pub async fn close(&self, handle: i64) -> Result<(), Error> {
        let removed = self.table.lock().unwrap_or_else(PoisonError::into_inner).open.remove(&handle);
        let removed = removed.ok_or(Error::UnknownHandle)?;
        let path = removed.path.clone();
        let mut file = Arc::clone(&removed.turn).lock_owned().await;
        let file = file.take().ok_or(Error::UnknownHandle)?;
        // The slot is released together with the descriptor.
        let closing = blocking::run(move || (descriptor::close(file.into()), drop(removed)).0);
        closing.await.map_err(|source| Error::Io { doing: "close", path, source })
    }

    /// Reads up to `count` bytes, at most [`MAX_READ`], in pieces. Each piece is passed through `convert` on the
    /// thread that reads it. The length of every piece but the last is a multiple of three.
    ///
    /// # Errors
    /// If the handle is unknown, or nothing can be read. An error after some bytes ends the pieces; if it persists,
    /// the next call returns it.
    pub async fn read(
        &self,
        handle: i64,
        count: usize,
        convert: fn(&[u8]) -> Vec<u8>,
    ) -> Result<Pieces, Error> {
        let Held { path, file } = self.held(handle).await?;
        let read = reading::begin(file, count.min(MAX_READ), convert).await;
        read.map_err(|source| Error::Io { doing: "read", path, source })
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// If the handle is unknown, or not all bytes can be written.
    pub async fn write(&self, handle: i64, bytes: Vec<u8>) -> Result<(), Error> {
        let held = self.held(handle).await?;
        let writing = blocking::run(move || {
            let Held { path, mut file } = held;
            let Some(file) = file.as_mut() else { return Err(Error::UnknownHandle) };
            let mut written = 0;
            while written < bytes.len() {
                match file.write(&bytes[written..]) {
                    Ok(0) => break,
                    Ok(length) => written += length,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(source) if written == 0 => return Err(Error::Io { doing: "write to", path, source }),
                    Err(source) => {
                        return Err(Error::Partly { written, count: bytes.len(), path, source });
                    }
                }
            }
            Ok(())
        });
        writing.await
    }

    /// Moves the file offset, and returns it as bytes from the beginning of the file.
    ///
    /// # Errors
    /// If the handle is unknown, or the offset is invalid.
    pub async fn seek(&self, handle: i64, to: SeekFrom) -> Result<u64, Error> {
        self.with(handle, "seek in", move |file| file.seek(to)).await
    }

    /// Does nothing but check the handle: every write has passed its bytes to the kernel already.
    ///
    /// # Errors
    /// If the handle is unknown.
    pub async fn flush(&self, handle: i64) -> Result<(), Error> {
        self.held(handle).await.map(drop)
    }

    async fn with<T: Send + 'static>(
        &self,
        handle: i64,
        doing: &'static str,
        work: impl FnOnce(&mut File) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        let Held { path, mut file } = self.held(handle).await?;
        let done = blocking::run(move || file.as_mut().map(work)).await.ok_or(Error::UnknownHandle)?;
        done.map_err(|source| Error::Io { doing, path, source })
    }

    /// Waits for exclusive access to a file.
    async fn held(&self, handle: i64) -> Result<Held, Error> {
        let found = self.table.lock().unwrap_or_else(PoisonError::into_inner).open.get(&handle).cloned();
        let found = found.ok_or(Error::UnknownHandle)?;
        let file = Arc::clone(&found.turn).lock_owned().await;
        // The file may have been closed while this call waited for its turn.
        if file.is_none() {
            return Err(Error::UnknownHandle);
        }
        Ok(Held { path: found.path.clone(), file })
    }
}

#[cfg(test)]
mod tests;
