//! Files that clients have open: handles that outlive a client's connection, a bounded number of them.
//!
//! Every call that asks the file system for anything works on a thread of its own and holds its file for as long, so that
//! a disk that hangs keeps up the calls for one file and nothing else. That is so for fstat(2), for lseek(2), which takes
//! the inode's lock with some file systems, and for a read with `RWF_NOWAIT`, which may have to read where the blocks of
//! the file are. How to add a verb: as [`Files::seek`] is one, through `Files::with`.

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

/// Files that may be open at the same time. The limit of descriptors has room for them ([`descriptor`]).
pub const MAX_OPEN: usize = 512;
/// The largest count of one read, in bytes (QEMU's; as text it is 64 MiB).
pub const MAX_READ: usize = 48 << 20;

/// The smallest handle, as with qemu-ga.
const FIRST_HANDLE: i64 = 1000;
/// How many there are: clients keep them in 31 bits.
const HANDLES: i64 = (1 << 31) - FIRST_HANDLE;

/// The handle of the moment, so long after the boot. Of another moment it is another one for 24 days, so that a handle of
/// an earlier run of the agent is not given again, without a note in a file of how far that run had come.
fn handle_at(since_boot: Duration) -> i64 {
    let milliseconds = i64::try_from(since_boot.as_millis()).unwrap_or(i64::MAX);
    FIRST_HANDLE + milliseconds % HANDLES
}

/// Why a call on a file failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It was closed, or never opened.
    #[error("this is not the handle of an open file")]
    UnknownHandle,
    /// [`MAX_OPEN`] files are.
    #[error("{MAX_OPEN} files are open, which is the limit; close some")]
    TooMany,
    /// The system's refusal.
    #[error("cannot {doing} {path}")]
    Io {
        /// Such as "open".
        doing: &'static str,
        /// As it was given when the file was opened.
        path: String,
        /// The reason.
        source: io::Error,
    },
    /// A part was written before the system refused.
    #[error("only {written} of {count} bytes were written to {path}")]
    Partly {
        /// Bytes that were written.
        written: usize,
        /// Bytes that should have been.
        count: usize,
        /// As above.
        path: String,
        /// The reason.
        source: io::Error,
    },
}

/// The open files.
pub struct Files {
    table: Mutex<Table>,
    places: Arc<Semaphore>,
}

#[derive(Default)]
struct Table {
    open: HashMap<i64, Arc<Handle>>,
    /// The one that was given last; 0, which is none, before that.
    last: i64,
}

/// One open file. Who holds the turn is alone with it.
struct Handle {
    path: String,
    turn: Arc<Turns<Option<File>>>,
    _place: OwnedSemaphorePermit,
}

/// A file whose turn it is.
struct Held {
    path: String,
    file: OwnedMutexGuard<Option<File>>,
}

impl Default for Files {
    /// No file is open.
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
    /// Opens the file at `path`, which is taken from the root on, and gives its handle; `may` is asked about the
    /// place to which every link leads.
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
            // This moment's is given already.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn begin(&self, handle: &Arc<Handle>) -> Option<i64> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        // Linux always has that clock; without it handles are at least others.
        let moment = clock::since_boot().ok();
        let number = moment.map_or_else(|| FIRST_HANDLE.max(table.last + 1), handle_at);
        if number == table.last || table.open.contains_key(&number) {
            return None;
        }
        table.last = number;
        table.open.insert(number, Arc::clone(handle));
        Some(number)
    }

    /// Closes a file, after what is under way with it. The handle is gone whatever the system says.
    ///
    /// # Errors
    /// If there is no such handle, or as close(2) gives them: what the last writes came to.
    pub async fn close(&self, handle: i64) -> Result<(), Error> {
        let removed = self.table.lock().unwrap_or_else(PoisonError::into_inner).open.remove(&handle);
        let removed = removed.ok_or(Error::UnknownHandle)?;
        let path = removed.path.clone();
        let mut file = Arc::clone(&removed.turn).lock_owned().await;
        let file = file.take().ok_or(Error::UnknownHandle)?;
        // The place is free again when the descriptor is.
        let closing = blocking::run(move || (descriptor::close(file.into()), drop(removed)).0);
        closing.await.map_err(|source| Error::Io { doing: "close", path, source })
    }

    /// Reads up to `count` bytes, no more than [`MAX_READ`], in pieces that are each put through `convert` where
    /// they are read; all but the last have a length that is a multiple of three.
    ///
    /// # Errors
    /// If there is no such handle, or nothing can be read. An error after some bytes ends the pieces; it comes again
    /// with the next call if it lasts.
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
    /// If there is no such handle, or not all can be written.
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

    /// Goes to a place of the file, and says where it is from the file's beginning.
    ///
    /// # Errors
    /// If there is no such handle or no such place.
    pub async fn seek(&self, handle: i64, to: SeekFrom) -> Result<u64, Error> {
        self.with(handle, "seek in", move |file| file.seek(to)).await
    }

    /// Hands everything written over to the system: it has been already.
    ///
    /// # Errors
    /// If there is no such handle.
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

    /// Waits for the turn of a file.
    async fn held(&self, handle: i64) -> Result<Held, Error> {
        let found = self.table.lock().unwrap_or_else(PoisonError::into_inner).open.get(&handle).cloned();
        let found = found.ok_or(Error::UnknownHandle)?;
        let file = Arc::clone(&found.turn).lock_owned().await;
        // It may have been closed meanwhile.
        if file.is_none() {
            return Err(Error::UnknownHandle);
        }
        Ok(Held { path: found.path.clone(), file })
    }
}

#[cfg(test)]
mod tests;
