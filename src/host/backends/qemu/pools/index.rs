//! All volumes of all pools, in memory: queries are answered from here, whatever the file systems are doing.
//!
//! ```text
//!            opened, read                        another directory is at its path
//!  closed ─────────────────▶ open ──────────────────────────────────────────────────▶ closed
//!    └─ with the reason: not tried yet, refused, or the same UUID as another pool
//! ```
//!
//! Pools are in the order of the settings. A pool that hangs after it was opened keeps its known volumes.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::super::super::catalogue::usages;
use super::super::super::volumes::{Coming, NewVolume, Room, Usages, Volume, VolumeError};
use super::super::worker::Worker;
use super::Pool;
use super::contents::{Known, Open};
use super::identity::{self, Parts};
use super::record::Stage;

/// Slots of all pools.
#[derive(Debug, Default)]
pub struct Index {
    pub slots: Vec<Slot>,
}

/// Pool of the settings.
#[derive(Debug)]
pub struct Slot {
    /// Settings of the pool.
    pub pool: Pool,
    /// Runs all operations in its directory.
    pub worker: Arc<Worker>,
    /// State of its directory.
    pub state: State,
    /// Start of the attempt to open it, while one is in progress.
    pub opening: Option<Instant>,
    /// End of the last attempt to open it.
    pub tried: Option<Instant>,
    /// True while its images are being checked.
    pub checking: bool,
    /// End of the last check.
    pub checked: Option<Instant>,
}

/// State of a pool's directory.
#[derive(Debug)]
pub enum State {
    /// The pool is unusable.
    Closed {
        /// Reason why it is closed.
        problem: String,
        /// UUID of the pool, if it could be read.
        uuid: Option<String>,
    },
    /// The pool is usable, and its volumes are known.
    Open(Box<Open>),
}

impl Slot {
    fn new(pool: Pool) -> Self {
        Self {
            worker: Arc::new(Worker::new(pool.patience)),
            pool,
            state: State::Closed { problem: "it is being opened".to_owned(), uuid: None },
            opening: None,
            tried: None,
            checking: false,
            checked: None,
        }
    }

    /// Returns its UUID, if known.
    pub fn uuid(&self) -> Option<&str> {
        match &self.state {
            State::Closed { uuid, .. } => uuid.as_deref(),
            State::Open(open) => Some(open.folder.uuid()),
        }
    }

    /// Returns its contents, if it is open.
    pub fn open(&self) -> Option<&Open> {
        match &self.state {
            State::Open(open) => Some(open),
            State::Closed { .. } => None,
        }
    }

    /// Returns the reason why it is closed, if it is.
    fn closed(&self) -> Option<String> {
        let State::Closed { problem, .. } = &self.state else { return None };
        Some(self.worker.silent().map_or_else(|| problem.clone(), |late| late.to_string()))
    }

    /// Returns the error for a pool that is unusable at present; the text is for people.
    pub fn unavailable(&self, problem: impl std::fmt::Display) -> VolumeError {
        let Pool { name, path, .. } = &self.pool;
        VolumeError::Unavailable(format!("the pool {name} ({}) cannot be used: {problem}", path.display()))
    }
}

impl Index {
    /// Adopts the pools of these settings; a pool whose path is unchanged keeps its state.
    pub fn follow(&mut self, settings: &[Pool]) {
        if self.slots.iter().map(|slot| &slot.pool).eq(settings) {
            return;
        }
        let mut before = std::mem::take(&mut self.slots);
        for pool in settings {
            let at = before.iter().position(|slot| slot.pool.path == pool.path);
            self.slots.push(match at.map(|at| before.swap_remove(at)) {
                Some(mut slot) => {
                    slot.worker.wait_for(pool.patience);
                    if let State::Open(open) = &mut slot.state {
                        open.rename(&pool.name);
                    }
                    Slot { pool: pool.clone(), ..slot }
                }
                None => Slot::new(pool.clone()),
            });
        }
    }

    /// Returns the pool at this path.
    pub fn at(&mut self, path: &Path) -> Option<&mut Slot> {
        self.slots.iter_mut().find(|slot| slot.pool.path == path)
    }

    /// Returns the contents of the pool at this path, if it is open.
    pub fn open_at(&mut self, path: &Path) -> Option<&mut Open> {
        match &mut self.at(path)?.state {
            State::Open(open) => Some(open),
            State::Closed { .. } => None,
        }
    }

    /// Returns the known size and free space of each pool.
    pub fn rooms(&self) -> Vec<Room> {
        let bytes = |slot: &Slot| slot.open()?.room.filter(|_| slot.worker.silent().is_none());
        let room = |slot: &Slot| Room { class: slot.pool.name.clone(), bytes: bytes(slot) };
        self.slots.iter().map(room).collect()
    }

    /// Describes the conflict with another pool that has the same UUID, if there is one.
    pub fn twin(&self, slot: &Slot, uuid: &str) -> Option<String> {
        let same = |other: &&Slot| other.pool.path != slot.pool.path && other.uuid() == Some(uuid);
        self.slots.iter().find(same).map(|other| {
            format!(
                "its directory and {} have the same UUID, so one is a copy of the other; remove one of them \
                 from the settings",
                other.pool.path.display()
            )
        })
    }

    /// Returns the contents of a pool that is open and may be used.
    ///
    /// # Errors
    /// If it is not; the text says why.
    pub fn usable<'i>(&'i self, slot: &'i Slot) -> Result<&'i Open, VolumeError> {
        let problem = match slot.uuid().and_then(|uuid| self.twin(slot, uuid)) {
            Some(problem) => Some(problem),
            None => slot.closed(),
        };
        match (problem, slot.open()) {
            (None, Some(open)) => Ok(open),
            (problem, _) => Err(slot.unavailable(problem.unwrap_or_default())),
        }
    }

    /// Returns the pool of a class.
    ///
    /// # Errors
    /// If there is no such class.
    pub fn class(&self, class: &str) -> Result<&Slot, VolumeError> {
        let found = self.slots.iter().find(|slot| slot.pool.name == class);
        found.ok_or_else(|| VolumeError::NoClass(class.to_owned()))
    }

    /// Returns a volume and its pool; `None` if the volume was removed or never existed.
    ///
    /// # Errors
    /// If it may exist: its record or its pool is unusable, or it belongs to another host.
    pub fn find(&self, id: &str, host: &str) -> Result<Option<(&Slot, &Known)>, VolumeError> {
        let Some(parts) = identity::parse(id) else { return Ok(None) };
        let mut found = None;
        for slot in &self.slots {
            let Some(open) = slot.open() else { continue };
            if let Some(known) = open.volumes().get(parts.serial).filter(|known| known.entry.record.id == id)
            {
                self.usable(slot)?;
                if found.replace((slot, known)).is_some() {
                    return Err(VolumeError::Unavailable(format!(
                        "the volume {id} is in more than one pool; one directory is a copy of another"
                    )));
                }
            } else if let Some(damaged) = open.damaged().get(parts.serial)
                && parts.uuid.is_none_or(|uuid| uuid == open.folder.uuid())
            {
                let (file, problem) = (open.folder.record(parts.serial), &damaged.problem);
                return Err(VolumeError::Damaged(format!(
                    "the record of the volume {id}, {}, cannot be used: {problem}",
                    file.display()
                )));
            }
        }
        match found {
            Some(found) => Ok(Some(found)),
            None => self.missing(id, parts, host).map(|()| None),
        }
    }

    /// Reports whether a volume with this identifier is certainly in an open pool, or in no pool at all.
    pub fn is_in_open_pool(&self, id: &str) -> bool {
        let Some(Parts { uuid, serial, .. }) = identity::parse(id) else { return true };
        self.opened().any(|open| match uuid {
            Some(uuid) => uuid == open.folder.uuid(),
            None => open.volumes().contains_key(serial),
        })
    }

    /// Checks that a volume without a record certainly does not exist.
    fn missing(&self, id: &str, parts: Parts<'_>, host: &str) -> Result<(), VolumeError> {
        let Parts { pool, uuid, serial } = parts;
        if let Some(slot) = self.slots.iter().find(|slot| uuid.is_some() && slot.uuid() == uuid) {
            return self.usable(slot).map(drop);
        }
        let is_buried = |open: &Open| open.removed.contains(serial);
        if uuid.is_none() && self.opened().any(is_buried) {
            return Ok(());
        }
        // A pool whose UUID is not known may be the one.
        let unknown = || self.slots.iter().filter(|slot| slot.open().is_none());
        let closed = unknown().find(|slot| slot.pool.name == pool).or_else(|| unknown().next());
        if let Some((slot, problem)) = closed.and_then(|slot| Some((slot, slot.closed()?))) {
            return Err(slot.unavailable(format!("{problem}; the volume {id} may be in it")));
        }
        Err(VolumeError::Elsewhere(match uuid {
            Some(uuid) => {
                format!(
                    "the volume {id} belongs to the pool {pool} ({uuid}), which is not on the host {host}"
                )
            }
            None => format!(
                "the host {host} has no record of the volume {id}, whose identifier does not show which host \
                 its pool {pool} is on"
            ),
        }))
    }

    fn opened(&self) -> impl Iterator<Item = &Open> + Clone {
        self.slots.iter().filter_map(Slot::open)
    }

    /// Returns at most `most` volumes of a cluster, or of all clusters, that sort after this identifier, with their
    /// problems.
    pub fn part(&self, cluster: Option<&str>, after: &str, most: usize) -> Vec<Volume> {
        // Each pool may contribute the whole part, so take that many of each.
        let of = |slot: usize, open: &Open| -> Vec<_> {
            open.catalogue().after(cluster, after).take(most).map(|id| (id.to_owned(), slot)).collect()
        };
        let pools = self.slots.iter().enumerate();
        let mut ids: Vec<_> = pools.filter_map(|(at, slot)| Some(of(at, slot.open()?))).flatten().collect();
        ids.sort();
        ids.truncate(most);
        let shown = ids.iter().filter_map(|(id, slot)| self.listed(self.slots.get(*slot)?, id));
        shown.collect()
    }

    /// Returns the volume of a pool that is listed under this identifier.
    fn listed(&self, slot: &Slot, id: &str) -> Option<Volume> {
        let (open, serial) = (slot.open()?, identity::parse(id)?.serial);
        let known = open.volumes().get(serial).filter(|known| known.entry.record.stage == Stage::Ready);
        match known {
            Some(known) => Some(self.show(slot, open, known)),
            None => open.damaged().get(serial).map(|damaged| damaged.volume(id.to_owned())),
        }
    }

    /// Returns the volume that is listed under this name in a cluster; the first one by identifier, if records were
    /// copied.
    pub fn named(&self, cluster: &str, name: &str) -> Option<Volume> {
        let of = |slot| {
            let open = Slot::open(slot)?;
            let id = open.catalogue().named(cluster, name).find(|entry| entry.is_listed)?.id.as_ref();
            Some((id, slot))
        };
        let found = self.slots.iter().filter_map(of).min_by_key(|(id, _)| *id);
        found.and_then(|(id, slot)| self.listed(slot, id))
    }

    /// Returns the usage of a cluster, including volumes that are coming.
    pub fn usage(&self, cluster: &str, class: &str, coming: &[Coming]) -> Usages {
        usages(&self.opened().map(Open::catalogue), cluster, class, coming)
    }

    /// Returns the identifiers of the volumes that the VM with this UUID is on record for.
    pub fn of_vm(&self, uuid: &str) -> BTreeSet<String> {
        self.opened().flat_map(|open| open.catalogue().of_vm(uuid)).map(str::to_owned).collect()
    }

    /// Returns the identifiers of the volumes with these serial numbers.
    pub fn with_serials<'s>(&self, serials: impl Iterator<Item = &'s str>) -> BTreeSet<String> {
        let in_pool = |slot: &Slot, serial: &str| {
            let open = slot.open()?;
            match (open.volumes().get(serial), open.damaged().get(serial)) {
                (Some(known), _) if known.entry.record.stage == Stage::Ready => {
                    Some(known.entry.record.id.clone())
                }
                (_, Some(damaged)) => Some(open.id_of(serial, damaged)),
                _ => None,
            }
        };
        serials.flat_map(|serial| self.slots.iter().filter_map(move |slot| in_pool(slot, serial))).collect()
    }

    /// Converts a volume for the answer to a client, with the problem that makes it unusable, if any.
    pub fn show(&self, slot: &Slot, open: &Open, known: &Known) -> Volume {
        let name = &slot.pool.name;
        // The text is shown to guests, so it must not contain paths.
        let twin =
            || self.twin(slot, open.folder.uuid()).map(|_| "another pool has the same UUID".to_owned());
        let late = || slot.worker.silent().map(|late| late.to_string());
        let pools = twin().or_else(late).map(|problem| format!("the pool {name} cannot be used: {problem}"));
        // Space that is reserved in full can be written even if the file system is full.
        let is_full = open.is_full && !known.entry.record.full;
        let full = is_full.then(|| format!("the pool {name} is full: writes of guests to new blocks fail"));
        known.entry.record.volume(pools.or_else(|| known.problem.clone()).or(full))
    }

    /// Checks that a volume with this name can be created in a pool.
    ///
    /// # Errors
    /// If the name is taken, or the pool has a volume with an unusable record that may have this name.
    pub fn check_name(&self, open: &Open, new: &NewVolume) -> Result<(), VolumeError> {
        let (cluster, name) = (&new.cluster, &new.name);
        let is_there = |open: &Open| {
            let mut named = open.catalogue().named(cluster, name).filter_map(|one| identity::parse(&one.id));
            named.any(|parts| open.volumes().contains_key(parts.serial))
        };
        if self.opened().any(is_there) {
            // The caller did not find a volume with this name before.
            return Err(VolumeError::Unavailable(format!(
                "a volume {name:?} of the cluster {cluster} is being created or removed, or was found only \
                 just now; repeat the call"
            )));
        }
        match open.damaged().iter().find(|(_, damaged)| damaged.may_be(cluster, name)) {
            Some((serial, damaged)) => Err(VolumeError::Unavailable(format!(
                "the record {} cannot be used: {}; it may be that of the volume {name:?}, so none is created \
                 in this pool; restore it from a copy, or, if nobody needs the contents of the image beside \
                 it, move both files out of the directory",
                open.folder.record(serial).display(),
                damaged.problem
            ))),
            None => Ok(()),
        }
    }

    /// Draws a serial number that no volume has.
    pub fn draw(&self) -> String {
        loop {
            let serial = identity::draw();
            let has = |open: &Open| {
                open.volumes().contains_key(&serial)
                    || open.damaged().contains_key(&serial)
                    || open.removed.contains(&serial)
            };
            if !self.opened().any(has) {
                return serial;
            }
        }
    }
}
