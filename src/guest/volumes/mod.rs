//! What is on disks: told, made, mounted, let go of, and grown. The verbs take files of devices; which disk is meant
//! is found out before.
//!
//! - [`contents`] tells what is on a device; blank is only what nothing at all was found on.
//! - [`format`](mod@format) makes a file system on a blank device, and goes on where a killed one was ([`intent`]).
//! - [`fsck`] repairs what is safely repaired before a file system is mounted.
//! - [`mount`] and [`unmount`] may be repeated; who is in the way is told by [`holders`]. [`swap`] is its counterpart
//!   for swap spaces, [`usage`] tells how full something is.
//! - [`grow`] lets everything on a disk that has grown take the new room.
//!
//! Whatever a device does, a call ends at its deadline. A thread that then still waits for the device holds it
//! ([`busy`]), so that nothing else is begun with it.

pub mod busy;
pub mod contents;
mod error;
pub mod format;
pub mod fsck;
pub mod grow;
pub mod holders;
pub mod intent;
pub mod mount;
pub mod options;
mod programs;
pub mod swap;
pub mod unmount;
pub mod usage;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::guest::Guest;
use crate::sys::block_device::{self, Facts};
use crate::sys::blocking;
use busy::Held;
pub use error::Error;

/// How long a device may take to say what it is.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is being done to the disks of this machine.
#[derive(Debug, Default)]
pub struct Volumes {
    busy: busy::Busy,
}

impl Volumes {
    /// Begins something with a device or place, which nobody else does anything to until that ends.
    pub(in crate::guest) fn begin(&self, what: &Path, doing: &'static str) -> Result<Held, Error> {
        self.busy.begin(what, doing).map_err(|doing| Error::Busy { what: what.to_owned(), doing })
    }

    /// As [`Self::begin`], of a device, whatever file it was named by.
    fn begin_with(&self, device: &Device, doing: &'static str) -> Result<Held, Error> {
        let (major, minor) = device.facts.number;
        let key = PathBuf::from(format!("{major}:{minor}"));
        self.busy.begin(&key, doing).map_err(|doing| Error::Busy { what: device.file.clone(), doing })
    }
}

/// A device, as it was when it was looked up.
#[derive(Debug, Clone)]
struct Device {
    /// Its file, without links.
    file: PathBuf,
    facts: Facts,
}

impl Device {
    /// Looks a device up.
    async fn find(file: &Path) -> Result<Self, Error> {
        let path = file.to_owned();
        let found = at_once(file, PATIENCE, move || {
            let file = std::fs::canonicalize(path)?;
            Ok(Self { facts: block_device::facts(&file)?, file })
        });
        let device = found.await?.map_err(|source| Error::unreadable(file, source))?;
        if device.facts.bytes == 0 {
            return Err(Error::Empty { device: device.file });
        }
        Ok(device)
    }

    /// The file of the disk that it is, or is a partition of.
    fn whole(&self, guest: &Guest) -> PathBuf {
        use crate::sys::block;

        let place = block::place(&guest.root, self.facts.number);
        place.map_or_else(
            |_| self.file.clone(),
            |place| guest.root.path(&block::file(block::name(block::whole(&place)))),
        )
    }
}

/// Does what should take a moment only, beside the event loop.
///
/// # Errors
/// If it takes longer than `patience`; it goes on then.
async fn at_once<T: Send + 'static>(
    what: &Path,
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::time::timeout(patience, blocking::run(work)).await;
    done.map_err(|_| Error::Silent { what: what.to_owned(), seconds: patience.as_secs() })
}

/// As [`at_once`], and what is `held` stays so for as long as it takes.
async fn holding<T: Send + 'static>(
    held: &Held,
    what: &Path,
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let held = held.clone();
    at_once(what, patience, move || {
        let done = work();
        drop(held);
        done
    })
    .await
}
