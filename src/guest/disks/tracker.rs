//! Which disks there are, as the kernel, udev and the disks themselves say one after the other. Decides, and does
//! nothing: who drives it looks at sysfs, does its [`Job`]s, and tells its [`Change`]s.
//!
//! ```text
//!                 a place is free                     where udev runs:
//!  (new) ▶ Queued ───────────────▶ Reading ──▶ Rest   held until udev has processed it,
//!            ▲                        │  done    │     or does not in time ──▶ told
//!            ├◀── something happened meanwhile ──┤
//!            └◀── it does not answer: without it ┘
//! ```
//!
//! A disk that udev has not processed yet is read meanwhile, as far as that is possible without opening it: what it says
//! does not change by that, and can be told as soon as udev is done. Where that was not enough to know it, it is read
//! again.
//!
//! A disk that has no size any more is most likely about to go: the kernel takes its size before its name. One that was
//! asked while it was no longer there, or while another one came to its place, has none either. It stays as it was
//! (`Doubt`), known or not, and is asked anew every moment for as long as it may take to go or to come.
//!
//! From every stage a disk goes away when it is gone, or another one is at its place. What the kernel says is no more
//! than a reason to look: what counts is what a look finds, so that lost, late and doubled messages do no harm.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::guest::disks::identity::{Asked, KnownDisk, Source};
use crate::guest::disks::room::Disks;
use crate::sys::block::Number;

/// How long udev may take before a disk is known without it.
pub const UDEV: Duration = Duration::from_secs(10);
/// How long a disk may take to say who it is before it is known without that.
pub const ANSWER: Duration = Duration::from_secs(5);
/// Devices that have begun anew and are remembered; more than there ever are.
const MOST_RESETS: usize = 1024;
/// How long a disk that has no size is left before it is asked for it again.
pub const GOING: Duration = Duration::from_secs(1);
/// How often it is asked before it is told to have none.
pub const MOST_DOUBTS: u32 = 5;
/// Disks that are read at a time, but for those that do not answer.
const AT_A_TIME: usize = 4;
/// Disks that do not answer; further ones are not asked while there are so many.
const MOST_LATE: usize = 32;

/// What udev has done with a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Udev {
    /// There is no udev.
    Absent,
    /// Nothing yet.
    Pending,
    /// It has processed it, or one that had its number before, at that time.
    Processed(u64),
}

/// What a look finds at a place in sysfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The place.
    pub place: String,
    /// The disk's number.
    pub number: Number,
    /// Tells it from others at that place.
    pub generation: u64,
    /// The kernel's count of disks; none before Linux 5.15.
    pub sequence: Option<u64>,
    /// How far udev is.
    pub udev: Udev,
}

/// A disk is to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Names the job when it is done.
    pub id: u64,
    /// Where the disk is.
    pub place: String,
    /// Whether the disk itself has to be asked.
    pub asked: Asked,
    /// It may be another one than before: the kernel has to ask it anew.
    pub anew: bool,
}

/// What is to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A disk is known.
    Added(Arc<KnownDisk>),
    /// It is gone; so it was.
    Removed(Arc<KnownDisk>),
    /// It has another size.
    Resized {
        /// As it is now.
        disk: Arc<KnownDisk>,
        /// The size that it had, in bytes.
        before: u64,
    },
    /// Something else of it changed.
    Changed(Arc<KnownDisk>),
    /// Nothing of it changed, but something happened to it: somebody has written to it, perhaps.
    Touched(Arc<KnownDisk>),
    /// This one answers in the place of another one, which the kernel has not noticed. The other one was told to be
    /// [removed](Self::Removed); this one is not a disk for anybody until the kernel begins anew with it.
    Usurped(Arc<KnownDisk>),
}

/// Whether the disk at `place` is that of a device.
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
    /// Until then it is not told, if udev has not processed it before.
    udev: Option<Instant>,
    /// What was read of it while it is not told.
    held: Option<Box<KnownDisk>>,
    /// Something happened while it was read.
    again: bool,
    /// How often it was read without a size, which it is not known to lack.
    doubts: u32,
    /// It may be another one than before.
    anew: bool,
    /// It is another one than before.
    usurped: bool,
    asked: Asked,
    known: Option<Arc<KnownDisk>>,
}

#[derive(Debug)]
struct Running {
    name: String,
    generation: u64,
    asks: bool,
    /// The disk may not be opened.
    unopened: bool,
    deadline: Instant,
}

/// The disks and what is being done about them.
#[derive(Debug, Default)]
pub struct Tracker {
    entries: BTreeMap<String, Entry>,
    queue: VecDeque<String>,
    jobs: u64,
    running: BTreeMap<u64, Running>,
    late: BTreeMap<u64, Running>,
    /// When udev processed the last disk of each number that is gone: what it says of that one counts no more.
    left: HashMap<Number, u64>,
    /// Devices that have begun anew while they had no disk yet.
    resets: BTreeSet<String>,
    changes: Vec<Change>,
}

impl Tracker {
    /// Somebody looked for the disk called `name`, because something happened to it if it was `touched`.
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

    /// The kernel takes the disk called `name` away, which was the one with the number `sequence` in its count. A look
    /// may still find it, or another one already.
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

    /// The SCSI device at `place` has begun anew.
    pub fn reset(&mut self, place: &str) {
        let is_of = |(_, entry): &(&String, &Entry)| below(&entry.seen.place, place);
        let Some(name) = self.entries.iter().find(is_of).map(|(name, _)| name.clone()) else {
            // Its disk is about to come, and what the kernel has asked it so far may have been another one's answer.
            if self.resets.len() < MOST_RESETS {
                self.resets.insert(place.to_owned());
            }
            return;
        };
        self.ask_anew(&name);
    }

    /// Any disk may have begun anew.
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

    /// Whether udev has yet to process what a look found.
    fn waits_for_udev(&self, seen: &Seen) -> bool {
        match seen.udev {
            Udev::Absent => false,
            Udev::Pending => true,
            Udev::Processed(time) => self.left.get(&seen.number) == Some(&time),
        }
    }

    /// udev has processed the disk called `name`, or is not waited for any longer.
    fn processed(&mut self, name: &str, now: Instant) {
        let Some(entry) = self.entries.get_mut(name) else { return };
        if entry.udev.take().is_none() {
            return;
        }
        let rests = matches!(entry.stage, Stage::Rest);
        match entry.held.take() {
            // It is told even if it is being read again, which tells what has changed since.
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

    /// What is to be read now.
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
            // One that has not answered yet is not asked once more.
            let hangs = |late: &Running| late.name == name && late.generation == entry.seen.generation;
            let anew = std::mem::take(&mut entry.anew) && !self.late.values().any(hangs);
            jobs.push(Job { id, place: entry.seen.place.clone(), asked, anew });
            let generation = entry.seen.generation;
            let running = Running { name, generation, asks, unopened, deadline: now + ANSWER };
            self.running.insert(id, running);
        }
        jobs
    }

    /// A job is done.
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
            // A SCSI disk may be another one the next time, and is asked only if the kernel has not.
            entry.asked = if disk.scsi.is_some() { Asked::Ask } else { Asked::Said(own) };
        }
        if !matches!(entry.stage, Stage::Reading(current) if current == id) {
            // It answers after all. What else was read then is no news.
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

    /// This was read of the disk called `name`. Returns whether it may be read again at once.
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
        // Without an outcome it is gone, which the kernel is about to say.
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

    /// What should have happened by now is given up.
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

    /// When to [`expire`](Self::expire).
    pub fn deadline(&self) -> Option<Instant> {
        let doubts = self.entries.values().filter_map(|entry| match entry.stage {
            Stage::Doubt(deadline) => Some(deadline),
            _ => None,
        });
        let udev = self.entries.values().filter_map(|entry| entry.udev);
        self.running.values().map(|job| job.deadline).chain(doubts).chain(udev).min()
    }

    /// The names of the disks that wait for udev, with such a deadline.
    fn waiting_for_udev(&self, deadline: impl Fn(Instant) -> bool) -> Vec<String> {
        let waits = |entry: &Entry| entry.udev.is_some_and(&deadline);
        self.entries.iter().filter(|(_, entry)| waits(entry)).map(|(name, _)| name.clone()).collect()
    }

    /// The names, numbers and places of the disks that wait for udev.
    pub fn for_udev(&self) -> Vec<(String, Seen)> {
        let waiting = self.entries.iter().filter(|(_, entry)| entry.udev.is_some());
        waiting.map(|(name, entry)| (name.clone(), entry.seen.clone())).collect()
    }

    /// The names of all disks, also of those that are not known yet.
    pub fn names(&self) -> Vec<String> {
        self.entries.keys().cloned().collect()
    }

    /// The disks that are held by the device called `holder`.
    pub fn held_by(&self, holder: &str) -> Vec<Arc<KnownDisk>> {
        let held = |disk: &&Arc<KnownDisk>| disk.holders.iter().any(|known| known.name == holder);
        self.entries.values().filter_map(|entry| entry.known.as_ref()).filter(held).cloned().collect()
    }

    /// What is to be told, in its order.
    pub fn changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// The disks that are known, in the order of their names as people have it: `vdz` comes before `vdaa`.
    pub fn list(&self) -> Disks {
        let mut known: Vec<_> = self.entries.values().filter_map(|entry| entry.known.clone()).collect();
        known
            .sort_unstable_by(|one, other| (one.name.len(), &one.name).cmp(&(other.name.len(), &other.name)));
        known.into()
    }

    /// Nothing is waited for, or being read.
    #[cfg(test)]
    pub fn is_settled(&self) -> bool {
        self.entries.values().all(|entry| matches!(entry.stage, Stage::Rest) && entry.udev.is_none())
    }
}
