//! What is on disks: told, made, mounted, let go of, and grown. Which disk is meant is decided before; the verbs are given
//! one that is [`held`], never a name.
//!
//! - [`held`] is a disk in the hands of one operation: open, checked, and nobody else's meanwhile. `work` runs programs on
//!   it, and knows those that still run.
//! - [`contents`] tells what is on a device; blank is only what nothing at all was found on.
//! - [`format`](mod@format) makes a file system on a blank device, and goes on where a killed one was ([`intent`]).
//! - [`fsck`] repairs what is safely repaired before a file system is mounted.
//! - [`mount`] and [`unmount`] may be repeated; who is in the way is told by [`holders`]. [`swap`] is its counterpart
//!   for swap spaces, [`usage`] tells how full something is.
//! - [`grow`] lets everything on a disk that has grown take the new room.
//!
//! To add a verb that writes: it takes a [`Held`], has its program run by `work` or checks
//! immediately before it acts, and needs no lock or key of its own.
//!
//! Whatever a device does, a call ends at its deadline. A thread that then still waits for the device holds it
//! (its [`Turn`]), so that nothing else is begun with it.

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

/// How long a device may take to say what it is.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is being done to the disks of this machine.
#[derive(Debug, Default)]
pub struct Volumes {
    turns: Turns<Thing, &'static str>,
}

/// What only one may work on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    /// What is mounted at a path, or will be.
    Place(PathBuf),
    /// The disk of this generation.
    Disk(u64),
}

/// Nobody else does anything to a disk or place until the last copy of this is dropped.
pub type Turn = turns::Turn<Thing, &'static str>;

impl Volumes {
    /// Begins something with a place, which nobody else does anything to until that ends.
    pub(in crate::guest) fn begin(&self, place: &Path, doing: &'static str) -> Result<Turn, Error> {
        self.take(Thing::Place(place.to_owned()), place, doing)
    }

    /// Begins something with the disk of this generation, which nobody else does anything to until that ends: the one
    /// key for whatever is done to a disk. For people it is called `name`.
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

/// As [`at_once`], with a disk that stays held for as long as it takes.
async fn holding<T: Send + 'static>(
    held: &Held,
    patience: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    keeping(held, held.file(), patience, work).await
}

/// As [`at_once`], and what is `held` stays so for as long as it takes.
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
