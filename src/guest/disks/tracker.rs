//! State of all disks, as reported step by step by the kernel, by udev and by the disks themselves. Decides only,
//! without I/O: the caller looks at sysfs, carries out its [`Job`]s, and reports its [`Change`]s.
//!
//! ```text
//!                 a slot is free                      where udev runs:
//!  (new) ▶ Queued ───────────────▶ Reading ──▶ Rest   held until udev has processed it,
//!            ▲                        │  done    │     or its time is up ──▶ reported
//!            ├◀── an event came meanwhile ───────┤
//!            └◀── no response: without it ───────┘
//! ```
//!
//! A disk that udev has not processed yet is read meanwhile, as far as that is possible without opening it. What
//! is read is not affected by udev's processing, and can be reported as soon as udev is done. If it was not enough
//! to identify the disk, the disk is read again.
//!
//! A disk that no longer has a size is most likely about to disappear: the kernel removes its size before its
//! name. A disk also has no size if it was queried when it was no longer there, or while another one took its
//! place. It then keeps its state (`Doubt`), known or not, and is queried again at short intervals for as long as
//! it may take to disappear or to appear.
//!
//! At every stage a disk is dropped if it has disappeared or another one is at its path. Messages of the kernel
//! are only a reason to look: the result of the look counts, so that lost, late and duplicate messages do no harm.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::guest::disks::identity::{Asked, KnownDisk, Source};
use crate::guest::disks::room::Disks;
use crate::sys::block::Number;

/// Time that udev has to process a disk before the disk is used without udev's data.
pub const UDEV: Duration = Duration::from_secs(10);
/// Time that a disk has to report its identity before it is used without it.
pub const ANSWER: Duration = Duration::from_secs(5);
/// Limit on the remembered devices that were reset before they had a disk; more than ever exist.
const MOST_RESETS: usize = 1024;
/// Time between two queries of a disk that has no size.
pub const GOING: Duration = Duration::from_secs(1);
/// Number of such queries before the disk is reported as having no size.
pub const MOST_DOUBTS: u32 = 5;
/// Limit on the disks that are read at the same time, apart from those that do not respond.
const AT_A_TIME: usize = 4;
/// Limit on the disks that do not respond; while it is reached, no further disk is queried.
const MOST_LATE: usize = 32;

/// Progress of udev with a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Udev {
    /// udev is not running.
    Absent,
    /// udev has not processed the disk yet.
    Pending,
    /// udev has processed the disk, or an earlier one with the same device number, at that time.
    Processed(u64),
}

/// Result of a look at a path in sysfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Path in sysfs.
    pub place: String,
    /// Device number of the disk.
    pub number: Number,
    /// Number that distinguishes the disk from others that have had this path.
    pub generation: u64,
    /// Sequence number given by the kernel; none before Linux 5.15.
    pub sequence: Option<u64>,
    /// Progress of udev with the disk.
    pub udev: Udev,
}

/// Order to read a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Number of the job, to be passed to `done`.
    pub id: u64,
    /// Path of the disk in sysfs.
    pub place: String,
    /// Way in which the disk itself is queried.
    pub asked: Asked,
    /// True if the disk may have been replaced, so that the kernel has to query it again.
    pub anew: bool,
}

/// Change that is to be reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A disk has become known.
    Added(Arc<KnownDisk>),
    /// The disk has disappeared; these were its properties.
    Removed(Arc<KnownDisk>),
    /// The size of a disk has changed.
    Resized {
        /// Disk with its new size.
        disk: Arc<KnownDisk>,
        /// Previous size in bytes.
        before: u64,
    },
    /// Another property of the disk has changed.
    Changed(Arc<KnownDisk>),
    /// No property has changed, but an event was received: the disk may have been written to.
    Touched(Arc<KnownDisk>),
    /// A different disk responds in the place of a known one, which the kernel has not noticed. The known one was
    /// reported as [removed](Self::Removed); the new one is not reported until the kernel has detected it afresh.
    Usurped(Arc<KnownDisk>),
}

/// Returns whether the disk at `place` belongs to the device.
fn below(place: &str, device: &str) -> bool {
    place.strip_prefix(device).is_some_and(|rest| rest.starts_with('/'))
}

#[derive(Debug)]
enum Stage {
    Queued,
    Reading(u64),
    Doubt(Instant),
    Rest,
}

#[derive(Debug)]
struct Entry {
    seen: Seen,
    stage: Stage,
    /// Time until which the disk is held back unless udev processes it earlier.
    udev: Option<Instant>,
    /// Properties that were read while the disk is held back.
    held: Option<Box<KnownDisk>>,
    /// True if an event was received during the read.
    again: bool,
    /// Number of reads in a row that found no size although the disk may have one.
    doubts: u32,
    /// True if the disk may have been replaced.
    anew: bool,
    /// True if the disk has been replaced.
    usurped: bool,
    asked: Asked,
    known: Option<Arc<KnownDisk>>,
}

#[derive(Debug)]
struct Running {
    name: String,
    generation: u64,
    asks: bool,
    /// True if the job must not open the disk.
    unopened: bool,
    deadline: Instant,
}

/// State of all disks, with the work in progress.
#[derive(Debug, Default)]
pub struct Tracker {
    entries: BTreeMap<String, Entry>,
    queue: VecDeque<String>,
    jobs: u64,
    running: BTreeMap<u64, Running>,
    late: BTreeMap<u64, Running>,
    /// Time at which udev processed the last vanished disk of each number. Data of udev with that time belong to
    /// that disk and are ignored.
    left: HashMap<Number, u64>,
    /// Devices that were reset before they had a disk.
    resets: BTreeSet<String>,
    changes: Vec<Change>,
}

impl Tracker {
    /// Takes the result of a look for the disk `name`. `touched` says that an event of the disk was the reason to
    /// look.
    pub fn look(&mut self, name: &str, seen: Option<Seen>, touched: bool, now: Instant) {
        let Some(seen) = seen else { return self.drop_disk(name) };
        let waits = self.waits_for_udev(&seen);
        match self.entries.get_mut(name) {
            Some(entry) if entry.seen.generation == seen.generation => {
                entry.seen = seen;
                if touched && !matches!(entry.stage, Stage::Doubt(_)) {
                    self.enqueue(name);
                }
                if !waits {
                    self.processed(name, now);
                }
            }
            Some(_) => {
                self.drop_disk(name);
                self.insert(name, seen, now);
            }
            None => self.insert(name, seen, now),
        }
    }

    /// Handles the kernel's message that it is removing the disk `name` with the sequence number `sequence`. The
    /// look may still find that disk, or already another one.
    pub fn removed(&mut self, name: &str, sequence: Option<u64>, seen: Option<Seen>, now: Instant) {
        let Some(entry) = self.entries.get(name) else { return self.look(name, seen, false, now) };
        let of_one_before =
            matches!((entry.seen.sequence, sequence), (Some(here), Some(gone)) if here > gone);
        if of_one_before {
            return self.look(name, seen, false, now);
        }
        let leaving = entry.seen.generation;
        self.drop_disk(name);
        if let Some(seen) = seen.filter(|seen| seen.generation != leaving) {
            self.insert(name, seen, now);
        }
    }

    /// Handles the reset of the SCSI device at `place`.
    pub fn reset(&mut self, place: &str) {
        let is_of = |(_, entry): &(&String, &Entry)| below(&entry.seen.place, place);
        let Some(name) = self.entries.iter().find(is_of).map(|(name, _)| name.clone()) else {
            // Its disk is about to appear, and what the kernel has read of it so far may come from the previous
            // disk.
            if self.resets.len() < MOST_RESETS {
                self.resets.insert(place.to_owned());
            }
            return;
        };
        self.ask_anew(&name);
    }

    /// Assumes that any disk may have been reset.
    pub fn reset_all(&mut self) {
        self.names().iter().for_each(|name| self.ask_anew(name));
    }

    fn ask_anew(&mut self, name: &str) {
        let Some(entry) = self.entries.get_mut(name) else { return };
        entry.anew = true;
        entry.held = None;
        if !matches!(entry.stage, Stage::Doubt(_)) {
            self.enqueue(name);
        }
    }

    fn insert(&mut self, name: &str, seen: Seen, now: Instant) {
        let reset = self.resets.iter().find(|place| below(&seen.place, place)).cloned();
        let anew = reset.is_some_and(|place| self.resets.remove(&place));
        let waits = self.waits_for_udev(&seen);
        let entry = Entry {
            seen,
            stage: Stage::Rest,
            udev: waits.then_some(now + UDEV),
            held: None,
            again: false,
            doubts: 0,
            anew,
            usurped: false,
            asked: Asked::Ask,
            known: None,
        };
        self.entries.insert(name.to_owned(), entry);
        self.enqueue(name);
    }

    /// Returns whether udev has yet to process the disk that a look found.
    fn waits_for_udev(&self, seen: &Seen) -> bool {
        match seen.udev {
            Udev::Absent => false,
            Udev::Pending => true,
            Udev::Processed(time) => self.left.get(&seen.number) == Some(&time),
        }
    }

    /// Handles the end of the wait for udev: it has processed the disk `name`, or the time is up.
    fn processed(&mut self, name: &str, now: Instant) {
        let Some(entry) = self.entries.get_mut(name) else { return };
        if entry.udev.take().is_none() {
            return;
        }
        let rests = matches!(entry.stage, Stage::Rest);
        match entry.held.take() {
            // Reported even if it is being read again; that read reports what has changed since.
            Some(disk) if !disk.serials.is_empty() && (rests || disk.bytes > 0) => {
                self.settle(name, Some(*disk), now);
            }
            _ if rests => self.enqueue(name),
            _ => {}
        }
    }

    fn drop_disk(&mut self, name: &str) {
        let Some(entry) = self.entries.remove(name) else { return };
        if let Udev::Processed(time) = entry.seen.udev {
            self.left.insert(entry.seen.number, time);
        }
        self.changes.extend(entry.known.map(Change::Removed));
    }

    fn enqueue(&mut self, name: &str) {
        let Some(entry) = self.entries.get_mut(name) else { return };
        match entry.stage {
            Stage::Reading(_) => entry.again = true,
            Stage::Queued => {}
            Stage::Doubt(_) | Stage::Rest => {
                entry.stage = Stage::Queued;
                self.queue.push_back(name.to_owned());
            }
        }
    }

    /// Returns the jobs that are to be started now.
    pub fn jobs(&mut self, now: Instant) -> Vec<Job> {
        let mut jobs = Vec::new();
        while self.running.len() < AT_A_TIME
            && let Some(name) = self.queue.pop_front()
        {
            let Some(entry) = self.entries.get_mut(&name) else { continue };
            if !matches!(entry.stage, Stage::Queued) {
                continue;
            }
            let asks = entry.asked == Asked::Ask && self.late.len() < MOST_LATE;
            let unopened = entry.udev.is_some();
            let asked = match &entry.asked {
                Asked::Ask if !asks => Asked::Silent,
                Asked::Ask if unopened => Asked::AskUnopened,
                asked => asked.clone(),
            };
            self.jobs += 1;
            let id = self.jobs;
            entry.stage = Stage::Reading(id);
            // A disk that has not responded yet is not queried a second time.
            let hangs = |late: &Running| late.name == name && late.generation == entry.seen.generation;
            let anew = std::mem::take(&mut entry.anew) && !self.late.values().any(hangs);
            jobs.push(Job { id, place: entry.seen.place.clone(), asked, anew });
            let generation = entry.seen.generation;
            let running = Running { name, generation, asks, unopened, deadline: now + ANSWER };
            self.running.insert(id, running);
        }
        jobs
    }

    /// Takes the outcome of a job.
    pub fn done(&mut self, id: u64, outcome: io::Result<KnownDisk>, now: Instant) {
        let Some(job) = self.running.remove(&id).or_else(|| self.late.remove(&id)) else { return };
        let Some(entry) = self.entries.get_mut(&job.name) else { return };
        if entry.seen.generation != job.generation {
            return;
        }
        let outcome = outcome.ok().filter(|disk| disk.generation == job.generation);
        if let Some(disk) = &outcome
            && job.asks
        {
            let own = disk.serials.iter().find(|serial| serial.source == Source::Virtio).cloned();
            // A SCSI disk may be a different one at the next read, and is queried only if the kernel shows no data.
            entry.asked = if disk.scsi.is_some() { Asked::Ask } else { Asked::Said(own) };
        }
        if !matches!(entry.stage, Stage::Reading(current) if current == id) {
            // The disk has responded after all. The rest of this outcome is outdated.
            return self.enqueue(&job.name);
        }
        entry.stage = Stage::Rest;
        let mut again = std::mem::take(&mut entry.again);
        if entry.udev.is_some() {
            entry.held = outcome.filter(|_| !entry.anew).map(Box::new);
        } else if job.unopened && outcome.as_ref().is_some_and(|disk| disk.serials.is_empty()) {
            again = true;
        } else {
            again &= self.settle(&job.name, outcome, now);
        }
        if again {
            self.enqueue(&job.name);
        }
    }

    /// Takes what was read of the disk `name`. Returns whether it may be read again at once.
    fn settle(&mut self, name: &str, outcome: Option<KnownDisk>, now: Instant) -> bool {
        let Some(entry) = self.entries.get_mut(name) else { return false };
        let may_have_size = entry.known.as_ref().is_none_or(|known| known.bytes > 0);
        let has_none = outcome.as_ref().is_some_and(|disk| disk.bytes == 0);
        if may_have_size && has_none && entry.doubts < MOST_DOUBTS {
            entry.doubts += 1;
            entry.anew = true;
            entry.stage = Stage::Doubt(now + GOING);
            return false;
        }
        entry.doubts = 0;
        // Without an outcome the disk has disappeared, and the kernel is about to report that.
        if let Some(disk) = outcome.filter(|_| !entry.usurped) {
            let disk = Arc::new(disk);
            if let Some(old) = entry.known.take_if(|old| old.is_another(&disk)) {
                tracing::warn!("{} is now a different disk, which the kernel has not noticed", disk.name);
                entry.usurped = true;
                self.changes.extend([Change::Removed(old), Change::Usurped(disk)]);
                return false;
            }
            let change = match entry.known.replace(Arc::clone(&disk)) {
                None => Some(Change::Added(disk)),
                Some(old) if old.bytes != disk.bytes => Some(Change::Resized { disk, before: old.bytes }),
                Some(old) if old == disk => Some(Change::Touched(disk)),
                Some(_) => Some(Change::Changed(disk)),
            };
            self.changes.extend(change);
        }
        true
    }

    /// Gives up what should have happened by now.
    pub fn expire(&mut self, now: Instant) {
        let expired: Vec<u64> =
            self.running.iter().filter(|(_, job)| job.deadline <= now).map(|(id, _)| *id).collect();
        for id in expired {
            let Some(job) = self.running.remove(&id) else { continue };
            tracing::warn!("the disk {} does not answer", job.name);
            if let Some(entry) = self.entries.get_mut(&job.name)
                && entry.seen.generation == job.generation
                && job.asks
            {
                entry.asked = Asked::Silent;
                entry.stage = Stage::Rest;
                self.enqueue(&job.name);
            }
            self.late.insert(id, job);
        }
        let doubtful = |entry: &Entry| matches!(entry.stage, Stage::Doubt(until) if until <= now);
        let names: Vec<_> = (self.entries.iter())
            .filter(|(_, entry)| doubtful(entry))
            .map(|(name, _)| name.clone())
            .collect();
        for name in names {
            self.enqueue(&name);
        }
        for name in self.waiting_for_udev(|deadline| deadline <= now) {
            tracing::warn!("udev does not process the disk {name}; it is used without udev's data");
            self.processed(&name, now);
        }
    }

    /// Returns the time of the next call of [`expire`](Self::expire).
    pub fn deadline(&self) -> Option<Instant> {
        let doubts = self.entries.values().filter_map(|entry| match entry.stage {
            Stage::Doubt(deadline) => Some(deadline),
            _ => None,
        });
        let udev = self.entries.values().filter_map(|entry| entry.udev);
        self.running.values().map(|job| job.deadline).chain(doubts).chain(udev).min()
    }

    /// Returns the names of the disks that wait for udev and whose deadline satisfies the condition.
    fn waiting_for_udev(&self, deadline: impl Fn(Instant) -> bool) -> Vec<String> {
        let waits = |entry: &Entry| entry.udev.is_some_and(&deadline);
        self.entries.iter().filter(|(_, entry)| waits(entry)).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the names of the disks that wait for udev, with what was seen of them.
    pub fn for_udev(&self) -> Vec<(String, Seen)> {
        let waiting = self.entries.iter().filter(|(_, entry)| entry.udev.is_some());
        waiting.map(|(name, entry)| (name.clone(), entry.seen.clone())).collect()
    }

    /// Returns the names of all disks, including those that are not known yet.
    pub fn names(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    /// Returns the disks on which the device `holder` is built.
    pub fn held_by(&self, holder: &str) -> Vec<Arc<KnownDisk>> {
        let held = |disk: &&Arc<KnownDisk>| disk.holders.iter().any(|known| known.name == holder);
        self.entries.values().filter_map(|entry| entry.known.as_ref()).filter(held).cloned().collect()
    }

    /// Returns the changes that are to be reported, in their order, and forgets them.
    pub fn changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Returns the known disks in the natural order of their names: `vdz` comes before `vdaa`.
    pub fn list(&self) -> Disks {
        let mut known: Vec<_> = self.entries.values().filter_map(|entry| entry.known.clone()).collect();
        known
            .sort_unstable_by(|one, other| (one.name.len(), &one.name).cmp(&(other.name.len(), &other.name)));
        known.into()
    }

    /// Returns whether no disk is being read or waited for.
    #[cfg(test)]
    pub fn is_settled(&self) -> bool {
        self.entries.values().all(|entry| matches!(entry.stage, Stage::Rest) && entry.udev.is_none())
    }
}
