//! Access to the pools for the rest of the program: what is known is answered at once, and what has to be done
//! is done by the worker of the pool concerned, within its timeout.
//!
//! Pools are opened and their images are checked, when this is due, on the occasion of a call to any of them,
//! but in the background. Only a pool that is being opened for the first time delays all calls, for a short
//! time, because its volumes are not known yet. While the opening of a pool is retried, only the calls that
//! concern it, or may concern it, wait.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::time::timeout_at;

use super::super::super::volumes::{Room, Volume, VolumeError};
use super::super::worker::{Late, Worker};
use super::Pool;
use super::entry::Entry;
use super::index::{Index, Slot};
use super::register::Register;
use super::store::Store;
use crate::supervise::Scope;

/// Timeouts and intervals.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// Maximum delay of all calls while a pool is being opened; less if the pool's own timeout is shorter.
    pub opening: Duration,
    /// Interval between two attempts to open it.
    pub again: Duration,
    /// Interval between two checks of its images.
    pub check: Duration,
}

const USUAL: Patience = Patience {
    opening: Duration::from_secs(5),
    again: Duration::from_secs(1),
    check: Duration::from_secs(5),
};

/// Access to the pools of the settings.
#[derive(Debug)]
pub struct Access {
    store: Arc<Store>,
    patience: Patience,
    /// Notified when an attempt to open a pool has ended.
    opened: Arc<Notify>,
    scope: Scope,
}

/// Pools that a call concerns.
#[derive(Debug, Clone, Copy)]
enum About<'c> {
    /// Known state of all pools.
    Known,
    /// Pool of this class.
    Class(&'c str),
    /// Volume with this identifier.
    Volume(&'c str),
}

impl<'c> About<'c> {
    /// Reports whether the call may concern a pool that is not open.
    fn may_be_in_closed_pool(self, index: &Index) -> impl Fn(&Slot) -> bool + use<'c> {
        let is_anywhere = matches!(self, Self::Volume(id) if !index.is_in_open_pool(id));
        move |slot| match self {
            Self::Known => false,
            Self::Class(class) => slot.pool.name == class,
            Self::Volume(_) => is_anywhere,
        }
    }
}

/// Attempt to open a pool, until it is dropped.
struct Opening {
    store: Arc<Store>,
    path: PathBuf,
    opened: Arc<Notify>,
}

impl Drop for Opening {
    fn drop(&mut self) {
        if let Some(slot) = self.store.index().at(&self.path) {
            slot.opening = None;
            slot.tried = Some(Instant::now());
        }
        self.opened.notify_waiters();
    }
}

/// Check of a pool's images, until it is dropped.
struct Checking {
    store: Arc<Store>,
    path: PathBuf,
}

impl Drop for Checking {
    fn drop(&mut self) {
        if let Some(slot) = self.store.index().at(&self.path) {
            slot.checking = false;
            slot.checked = Some(Instant::now());
        }
    }
}

impl Access {
    /// Creates access to the pools of these settings; the register says which pools they have to be.
    pub fn new(settings: watch::Receiver<Vec<Pool>>, register: Register) -> Self {
        Self::with(Store::new(settings, register), USUAL)
    }

    /// Creates access with these timeouts.
    pub fn with(store: Store, patience: Patience) -> Self {
        Self { store: Arc::new(store), patience, opened: Arc::default(), scope: Scope::new() }
    }

    /// Starts what is due in each pool. Waits for the pools that are being opened for the first time, or that the
    /// call concerns.
    async fn settle(&self, about: About<'_>) {
        let (mut to_open, mut to_check) = (Vec::new(), Vec::new());
        let is_due = |last: Option<Instant>, every| last.is_none_or(|last| last.elapsed() >= every);
        for slot in &mut self.store.index().slots {
            let job = (slot.pool.path.clone(), Arc::clone(&slot.worker));
            if slot.open().is_some() {
                if !slot.checking && is_due(slot.checked, self.patience.check) {
                    slot.checking = true;
                    to_check.push(job);
                }
            } else if slot.opening.is_none() && is_due(slot.tried, self.patience.again) {
                slot.opening = Some(Instant::now());
                to_open.push(job);
            }
        }
        for (path, worker) in to_open {
            self.open(path, worker);
        }
        for (path, worker) in to_check {
            self.check(path, worker);
        }
        loop {
            // Subscribe before checking, so that no notification is missed.
            let news = self.opened.notified();
            let ends = |slot: &Slot| Some(slot.opening? + self.opening(&slot.pool));
            let end = {
                let index = self.store.index();
                let may_be_closed = about.may_be_in_closed_pool(&index);
                let waits = |slot: &&Slot| slot.tried.is_none() || may_be_closed(slot);
                index.slots.iter().filter(waits).filter_map(ends).max()
            };
            let Some(until) = end else { return };
            if timeout_at(until.into(), news).await.is_err() {
                return;
            }
        }
    }

    /// Returns the time for which all calls wait while a pool is being opened.
    fn opening(&self, pool: &Pool) -> Duration {
        self.patience.opening.min(pool.patience)
    }

    fn open(&self, path: PathBuf, worker: Arc<Worker>) {
        let store = Arc::clone(&self.store);
        let opening = Opening { store, path, opened: Arc::clone(&self.opened) };
        self.scope.children().spawn(async move {
            // If this is late, it continues in the background, and until it ends the slot counts as being opened.
            if let Err(late) = worker.run(move || opening.store.open(&opening.path)).await {
                tracing::warn!("cannot open a pool: {late}");
            }
        });
    }

    fn check(&self, path: PathBuf, worker: Arc<Worker>) {
        let store = Arc::clone(&self.store);
        let checking = Checking { store: Arc::clone(&self.store), path: path.clone() };
        self.scope.children().spawn(async move {
            let _checking = checking;
            let mut after = None;
            loop {
                let (store, path) = (Arc::clone(&store), path.clone());
                // One part at a time, so that other calls to the pool get their turn in between.
                match worker.run(move || store.check(&path, after)).await {
                    Ok(Some(last)) => after = Some(last),
                    Ok(None) | Err(_) => return,
                }
            }
        });
    }

    /// Returns the result of `look` on the known volumes of all opened pools, without waiting for their file
    /// systems.
    pub async fn known<T>(&self, look: impl FnOnce(&Index) -> T) -> T {
        self.settle(About::Known).await;
        look(&self.store.index())
    }

    /// Returns the known sizes and free space of all pools, without waiting.
    pub fn rooms(&self) -> Vec<Room> {
        self.store.index().rooms()
    }

    /// Returns a volume; see [`Store::get`].
    ///
    /// # Errors
    /// The same.
    pub async fn get(&self, id: &str) -> Result<Option<Volume>, VolumeError> {
        self.settle(About::Volume(id)).await;
        self.store.volume(id)
    }

    /// Returns an existing volume; see [`Store::entry`].
    ///
    /// # Errors
    /// The same.
    pub async fn entry(&self, id: &str) -> Result<Entry, VolumeError> {
        self.settle(About::Volume(id)).await;
        self.store.entry(id)
    }

    /// Runs `work` in the pool of a class.
    ///
    /// # Errors
    /// Those of `work`; and if the pool does not answer, in which case the work may have begun.
    pub async fn in_class<T: Send + 'static>(
        &self,
        class: &str,
        work: impl FnOnce(&Store) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<T, VolumeError> {
        self.settle(About::Class(class)).await;
        let path = self.store.index().class(class)?.pool.path.clone();
        self.at(path, work).await
    }

    /// Runs `work` in the pool of a volume.
    ///
    /// # Errors
    /// Those of `work`; and if there is no such volume, or the pool does not answer, in which case the work may
    /// have begun.
    pub async fn in_pool_of<T: Send + 'static>(
        &self,
        id: &str,
        work: impl FnOnce(&Store) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<T, VolumeError> {
        let path = self.entry(id).await?.folder.path().to_owned();
        self.at(path, work).await
    }

    async fn at<T: Send + 'static>(
        &self,
        path: PathBuf,
        work: impl FnOnce(&Store) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<T, VolumeError> {
        let worker = match self.store.index().at(&path) {
            None => return Err(VolumeError::Unavailable("its pool is no longer in the settings".to_owned())),
            Some(slot) => match slot.opening.map(|since| since.elapsed()) {
                Some(late) if late >= self.opening(&slot.pool) => {
                    return Err(slot.unavailable(Late::Silent(late)));
                }
                _ => Arc::clone(&slot.worker),
            },
        };
        let store = Arc::clone(&self.store);
        match worker.run(move || work(&store)).await {
            Ok(done) => done,
            Err(late) => Err(match self.store.index().at(&path) {
                Some(slot) => slot.unavailable(late),
                None => VolumeError::Unavailable(late.to_string()),
            }),
        }
    }
}
