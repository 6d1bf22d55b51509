//! Publishes the disks of this machine to all tasks that look them up or wait for them.
//!
//! Only one task, the monitor of disks, publishes the list. All others see the newest complete list at any time.
//!
//! ```text
//! uevents ─▶ monitor::disks ──publish──▶ Room: [newest list] ──▶ all, find: at once
//!                                                           └──▶ wait: with the change that brings it
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::guest::disks::identity::KnownDisk;
use crate::guest::disks::lookup::{self, FindError, Selector};

/// Immutable list of disks.
pub type Disks = Arc<[Arc<KnownDisk>]>;

/// Current list of disks, with notifications of changes.
#[derive(Debug)]
pub struct Room {
    known: watch::Sender<Disks>,
    changes: watch::Sender<u64>,
    touches: watch::Sender<Touches>,
    doubts: Notify,
}

/// Number of changes seen on each disk, by its generation.
pub type Touches = BTreeMap<u64, u64>;

impl Default for Room {
    fn default() -> Self {
        Self {
            known: watch::Sender::new(Arc::default()),
            changes: watch::Sender::new(0),
            touches: watch::Sender::default(),
            doubts: Notify::new(),
        }
    }
}

/// Reasons why a disk that was waited for was not found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// The selector is unusable, or several disks match already.
    #[error(transparent)]
    Find(#[from] FindError),
    /// No matching disk appeared in time.
    #[error("no disk with {selector} has appeared within {} s", .within.as_secs_f32())]
    TooLate {
        /// Selector that was waited for.
        selector: Selector,
        /// Time that was waited.
        within: Duration,
    },
}

impl Room {
    /// Returns all disks in the order of their names. Empty until the monitor has looked for the first time.
    pub fn all(&self) -> Disks {
        Arc::clone(&self.known.borrow())
    }

    /// Returns the disk that the selector means.
    ///
    /// # Errors
    /// If no disk matches, or more than one.
    pub fn find(&self, selector: &Selector) -> Result<Arc<KnownDisk>, FindError> {
        lookup::find(&self.known.borrow(), selector)
    }

    /// Waits for the disk that the selector means, and returns it as soon as it is known, or fails after `within`.
    /// Dropping the future ends the wait.
    ///
    /// # Errors
    /// If no disk matches in time; at once if several match, or if the selector is unusable.
    pub async fn wait(&self, selector: &Selector, within: Duration) -> Result<Arc<KnownDisk>, WaitError> {
        // Subscribed before the first look, so that no change is missed in between.
        let mut known = self.known.subscribe();
        let coming = async {
            loop {
                let found = lookup::find(&known.borrow_and_update(), selector);
                match found {
                    Err(FindError::NotFound(_)) => {}
                    found => return Ok(found?),
                }
                // The sender lives as long as the room.
                let _ = known.changed().await;
            }
        };
        let too_late = |_| WaitError::TooLate { selector: selector.clone(), within };
        tokio::time::timeout(within, coming).await.map_err(too_late)?
    }

    /// Returns a counter of the changes of the list: disks that appear and disappear, and properties that change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the number of events on each disk, including those that change no property known here: the contents
    /// of the disk may have changed. Where udev runs, it reports such an event when a device node of the disk that
    /// was open for writing is closed.
    pub fn touches(&self) -> watch::Receiver<Touches> {
        self.touches.subscribe()
    }

    /// Counts an event on a disk.
    pub(in crate::guest) fn touch(&self, disk: &KnownDisk) {
        self.touches.send_modify(|touches| *touches.entry(disk.generation).or_default() += 1);
    }

    /// Makes the monitor read the identities of all disks again, as any of them may have been replaced unnoticed.
    pub(in crate::guest) fn doubt(&self) {
        self.doubts.notify_one();
    }

    /// Waits until a caller has requested that by `doubt`.
    pub(in crate::guest) async fn doubted(&self) {
        self.doubts.notified().await;
    }

    /// Publishes a new list of disks.
    pub(in crate::guest) fn publish(&self, disks: Disks) {
        let is_there = |generation: &u64| disks.iter().any(|disk| disk.generation == *generation);
        self.touches.send_if_modified(|touches| {
            touches.retain(|generation, _| is_there(generation));
            false
        });
        self.known.send_replace(disks);
        self.changes.send_modify(|changes| *changes += 1);
    }
}
