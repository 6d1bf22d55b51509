//! The disks that this machine has, for everyone who asks or waits.
//!
//! One task, the monitor of disks, says what there is; it is the only one that does. Everyone else sees the newest
//! list, whole, at any time.
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

/// A list of disks that nobody changes any more.
pub type Disks = Arc<[Arc<KnownDisk>]>;

/// Knows the disks.
#[derive(Debug)]
pub struct Room {
    known: watch::Sender<Disks>,
    changes: watch::Sender<u64>,
    touches: watch::Sender<Touches>,
    doubts: Notify,
}

/// How often something happened to each disk, by its generation.
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

/// Why a disk that was waited for did not come.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// It cannot come, or there are several already.
    #[error(transparent)]
    Find(#[from] FindError),
    /// It did not come in time.
    #[error("no disk with {selector} has appeared within {} s", .within.as_secs_f32())]
    TooLate {
        /// What was waited for.
        selector: Selector,
        /// How long.
        within: Duration,
    },
}

impl Room {
    /// All disks, in the order of their names. Empty until the monitor has looked for the first time.
    pub fn all(&self) -> Disks {
        Arc::clone(&self.known.borrow())
    }

    /// The disk that is meant.
    ///
    /// # Errors
    /// If there is none, or more than one.
    pub fn find(&self, selector: &Selector) -> Result<Arc<KnownDisk>, FindError> {
        lookup::find(&self.known.borrow(), selector)
    }

    /// The disk that is meant, as soon as it is known, but at the latest after `within`. Dropping the future ends the
    /// wait.
    ///
    /// # Errors
    /// If it does not come in time; at once if there are several, or the selector can mean none.
    pub async fn wait(&self, selector: &Selector, within: Duration) -> Result<Arc<KnownDisk>, WaitError> {
        // Subscribed before the first look: nothing falls between.
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

    /// Counts up with everything that changes in the list: disks that come and go, and what is known of them.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Counts for each disk how often something happened to it, also where nothing changed that is known of it here: what
    /// is on it may be something else. Where udev runs it says so when a file of the disk is closed that was open for
    /// writing.
    pub fn touches(&self) -> watch::Receiver<Touches> {
        self.touches.subscribe()
    }

    /// Something happened to a disk.
    pub(in crate::guest) fn touch(&self, disk: &KnownDisk) {
        self.touches.send_modify(|touches| *touches.entry(disk.generation).or_default() += 1);
    }

    /// Has the monitor ask all disks anew who they are: any of them may be another one than is known here.
    pub(in crate::guest) fn doubt(&self) {
        self.doubts.notify_one();
    }

    /// Somebody doubts what is known.
    pub(in crate::guest) async fn doubted(&self) {
        self.doubts.notified().await;
    }

    /// From now on these are the disks.
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
