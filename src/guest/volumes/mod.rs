//! Operations on disks: their contents are detected, made, mounted, unmounted and grown. Which disk is meant is
//! decided before; the operations take one that is [`held`], never a name.
//!
//! - [`held`] is a disk held by one operation: open, checked, and not available to others meanwhile. `work` runs
//!   programs on it, and knows those that are still running.
//! - [`contents`] detects what is on a device; it is blank only if nothing at all was found.
//! - [`format`](mod@format) makes a file system on a blank device, and continues where a killed run stopped
//!   ([`intent`]).
//! - [`fsck`] repairs what can be repaired safely before a file system is mounted.
//! - [`mount`] and [`unmount`] may be repeated; [`holders`] finds the users of a mount that is in use. [`swap`] is
//!   the counterpart for swap spaces, and [`usage`] reports how full a file system is.
//! - [`grow`] grows everything on a disk that has grown.
//!
//! To add an operation that writes: it takes a [`Held`], has its program run by `work` or checks immediately
//! before it acts, and needs no lock or key of its own.
//!
//! Whatever a device does, a call ends at its deadline. A thread that is then still waiting for the device holds
//! it (its [`Turn`]), so that no other operation on it is begun.

pub mod contents;
mod error;
mod evidence;
pub mod format;
pub mod fsck;
pub mod grow;
pub mod held;
pub mod holders;
pub mod intent;
pub mod mount;
pub mod options;
mod programs;
pub mod swap;
pub mod unmount;
pub mod usage;
mod work;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::sys::blocking;
use crate::turns::{self, Turns};
pub use error::Error;
use held::Held;

/// Time limit for a device to report its properties.
const PATIENCE: Duration = Duration::from_secs(10);

/// Running operations on the disks of this machine.
#[derive(Debug, Default)]
pub struct Volumes {
    turns: Turns<Thing, &'static str>,
}

/// Object on which only one operation may work at a time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    /// Mount at this path, present or planned.
    Place(PathBuf),
    /// Disk with this generation.
    Disk(u64),
}

/// Exclusive right to work on a disk or mount point, until the last copy is dropped.
pub type Turn = turns::Turn<Thing, &'static str>;

impl Volumes {
    /// Takes the turn of a mount point, so that no other operation on it begins until the turn is dropped.
    pub(in crate::guest) fn begin(&self, place: &Path, doing: &'static str) -> Result<Turn, Error> {
        self.take(Thing::Place(place.to_owned()), place, doing)
    }

    /// Takes the turn of the disk with this generation, so that no other operation on it begins until the turn is
    /// dropped. This one key covers all operations on the disk. `name` is the name of the disk in errors.
    pub(in crate::guest) fn turn(
        &self,
        generation: u64,
        name: &Path,
        doing: &'static str,
    ) -> Result<Turn, Error> {
        self.take(Thing::Disk(generation), name, doing)
    }

    fn take(&self, thing: Thing, name: &Path, doing: &'static str) -> Result<Turn, Error> {
        self.turns.take(thing, doing).map_err(|doing| Error::Busy { what: name.to_owned(), doing })
    }
}

/// Runs `work`, which should be brief, on a thread that may block.
///
/// # Errors
/// If it takes longer than `patience`; it then continues.
async fn at_once<T: Send + 'static>(
    what: &Path,
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::time::timeout(patience, blocking::run(work)).await;
    done.map_err(|_| Error::Silent { what: what.to_owned(), seconds: patience.as_secs() })
}

/// Runs `work` like [`at_once`]; the disk stays held until it ends.
async fn holding<T: Send + 'static>(
    held: &Held,
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    keeping(held, held.file(), patience, work).await
}

/// Runs `work` like [`at_once`]; `held` is kept until it ends.
async fn keeping<T: Send + 'static>(
    held: &(impl Clone + Send + 'static),
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
