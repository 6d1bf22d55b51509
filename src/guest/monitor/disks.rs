//! Disks: the kernel's messages about them, the end of udev's processing, and their identity.
//!
//! ```text
//! uevent ─▶ look at that name in sysfs ─▶ Tracker ─▶ read the disk, off the event loop ───▶ Tracker ─▶ Room, events
//! messages lost, start ─▶ look at all names ──┘
//! ```
//!
//! The subscription begins before the first look at everything, so that no change is missed.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::io;
use std::panic::resume_unwind;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};

use crate::guest::Guest;
use crate::guest::disks::identity::{self, KnownDisk};
use crate::guest::disks::tracker::{Change, Seen, Tracker, Udev};
use crate::guest::disks::{release, uses};
use crate::guest::messages;
use crate::sys::block::{self, Number};
use crate::sys::root::Root;
use crate::sys::udev;
use crate::sys::uevents::{Action, Heard, Uevent, Uevents};
use crate::wire::proto::v1::{DiskAdded, DiskChanged, DiskRemoved, DiskResized};

/// Maximum number of messages that are processed, and of names that are examined, before others have their turn.
const AT_ONCE: usize = 32;
/// Delay of the second scan after messages were lost: a disk whose removal was in a lost message may still be in
/// sysfs for a moment.
const SECOND_LOOK: Duration = Duration::from_secs(1);

/// Source of messages about block devices.
pub trait News: Send {
    /// Waits for the next message. Dropping the future loses none.
    fn next(&mut self) -> impl Future<Output = io::Result<Heard>> + Send;

    /// Returns the next message if one is already available.
    ///
    /// # Errors
    /// If no further message will come.
    fn at_hand(&mut self) -> io::Result<Option<Heard>>;
}

impl News for Uevents {
    async fn next(&mut self) -> io::Result<Heard> {
        Self::next(self).await
    }

    fn at_hand(&mut self) -> io::Result<Option<Heard>> {
        Self::at_hand(self)
    }
}

/// Source that never reports anything, for use where the kernel's messages are not available.
struct Silence;

impl News for Silence {
    async fn next(&mut self) -> io::Result<Heard> {
        pending().await
    }

    fn at_hand(&mut self) -> io::Result<Option<Heard>> {
        Ok(None)
    }
}

pub(super) async fn watch(guest: Guest) -> io::Result<Infallible> {
    match Uevents::subscribe() {
        Ok(uevents) => follow(&guest, uevents).await,
        Err(error) => {
            tracing::warn!(
                "cannot watch disks being added and removed; only the present ones are known: {error}"
            );
            follow(&guest, Silence).await
        }
    }
}

/// Keeps the guest's list of disks up to date from `news`.
///
/// # Errors
/// If the source of messages fails.
pub async fn follow(guest: &Guest, mut news: impl News) -> io::Result<Infallible> {
    let mut watch = Watch {
        guest,
        tracker: Tracker::default(),
        udev: None,
        second_look: None,
        begun_anew: JoinSet::new(),
    };
    let mut reads: JoinSet<(u64, io::Result<KnownDisk>)> = JoinSet::new();
    watch.look_at_all().await;
    loop {
        watch.wait_for_udev();
        for job in watch.tracker.jobs(Instant::now()) {
            let root = guest.root.clone();
            reads.spawn_blocking(move || {
                if job.anew {
                    identity::have_asked_anew(&root, &job.place);
                }
                (job.id, identity::read(&root, &job.place, &job.asked))
            });
        }
        watch.tell();
        let deadline = [watch.tracker.deadline(), watch.second_look].into_iter().flatten().min();
        tokio::select! {
            heard = news.next() => watch.hear(heard?).await,
            Some(done) = reads.join_next() => watch.done(done),
            news = changed(watch.udev.as_ref()) => watch.udev_says(&news?),
            Some(_) = watch.begun_anew.join_next() => {}
            () = guest.disks.doubted() => watch.tracker.reset_all(),
            () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                watch.expire().await;
            }
        }
        // Process everything that has arrived by now, so that those who wait for disks see it as one change.
        while let Some(done) = reads.try_join_next() {
            watch.done(done);
        }
        for _ in 0..AT_ONCE {
            match news.at_hand()? {
                Some(heard) => watch.hear(heard).await,
                None => break,
            }
        }
    }
}

async fn changed(udev: Option<&udev::Watch>) -> io::Result<udev::News> {
    match udev {
        Some(watch) => watch.changed().await,
        None => pending().await,
    }
}

struct Watch<'a> {
    guest: &'a Guest,
    tracker: Tracker,
    /// Watch on udev's database; created when a disk first waits for udev.
    udev: Option<udev::Watch>,
    second_look: Option<Instant>,
    /// Tasks for disks that the kernel mistakes for others.
    begun_anew: JoinSet<()>,
}

impl Watch<'_> {
    async fn look_at_all(&mut self) {
        let root = &self.guest.root;
        let mut names = self.tracker.names();
        names.extend(block::disks(root).unwrap_or_default());
        names.sort_unstable();
        names.dedup();
        for some in names.chunks(AT_ONCE) {
            for name in some {
                self.tracker.look(name, look(root, name), true, Instant::now());
            }
            tokio::task::yield_now().await;
        }
    }

    async fn hear(&mut self, heard: Heard) {
        let Heard::Uevent(uevent) = heard else {
            tracing::info!("too many kernel events about disks, some were lost; scanning all disks");
            self.second_look = Some(Instant::now() + SECOND_LOOK);
            return self.look_at_all().await;
        };
        let Uevent { action, place, partition, disk } = uevent;
        if action == Action::Reset {
            return self.tracker.reset(&place);
        }
        if block::is_virtual(&place) {
            return self.look_below(&place);
        }
        match (partition, action) {
            (true, _) => {
                if let Some((whole, _)) = place.rsplit_once('/') {
                    self.look_at(block::name(whole));
                }
            }
            (false, Action::Remove) => {
                let name = block::name(&place);
                let seen = look(&self.guest.root, name);
                self.tracker.removed(name, disk, seen, Instant::now());
            }
            (false, Action::Add | Action::Change | Action::Reset) => self.look_at(block::name(&place)),
        }
    }

    fn look_at(&mut self, name: &str) {
        self.tracker.look(name, look(&self.guest.root, name), true, Instant::now());
    }

    /// Examines the disks that a device is, or was, made of.
    fn look_below(&mut self, place: &str) {
        let mut places: Vec<_> =
            self.tracker.held_by(block::name(place)).iter().map(|disk| disk.place.clone()).collect();
        let parts = block::parts(&self.guest.root, place).ok().flatten().unwrap_or_default();
        places.extend(parts.iter().map(|part| block::whole(part).to_owned()));
        places.retain(|place| !block::is_virtual(place));
        for place in places {
            self.look_at(block::name(&place));
        }
    }

    fn done(&mut self, done: Result<(u64, io::Result<KnownDisk>), JoinError>) {
        match done {
            Ok((id, outcome)) => self.tracker.done(id, outcome, Instant::now()),
            Err(error) => {
                if let Ok(panic) = error.try_into_panic() {
                    resume_unwind(panic)
                }
            }
        }
    }

    async fn expire(&mut self) {
        let now = Instant::now();
        self.tracker.expire(now);
        if self.second_look.is_some_and(|time| time <= now) {
            self.second_look = None;
            self.look_at_all().await;
        }
    }

    /// Watches udev for as long as a disk waits for it.
    fn wait_for_udev(&mut self) {
        let waiting = self.tracker.for_udev();
        if waiting.is_empty() {
            if let Some(watch) = &mut self.udev {
                watch.pause();
            }
        } else if !self.udev.as_ref().is_some_and(udev::Watch::listens) {
            if let Err(error) = self.listen_to_udev() {
                tracing::debug!("udev's database cannot be watched: {error}");
            }
            // Catch up on what udev did before the watch began.
            for (name, seen) in waiting {
                self.look_for_udev(&name, seen);
            }
        }
    }

    fn listen_to_udev(&mut self) -> io::Result<()> {
        let watch = match &mut self.udev {
            Some(watch) => watch,
            none => none.insert(udev::Watch::begin()),
        };
        watch.listen(&self.guest.root)
    }

    fn udev_says(&mut self, news: &udev::News) {
        for (name, seen) in self.tracker.for_udev() {
            let is_meant = match news {
                udev::News::About(numbers) => numbers.contains(&seen.number),
                udev::News::Any => true,
            };
            if is_meant {
                self.look_for_udev(&name, seen);
            }
        }
    }

    /// Examines what udev has done with the disk that was `seen`. Kept short: at that time udev is busy, and has just
    /// woken others.
    fn look_for_udev(&mut self, name: &str, seen: Seen) {
        let root = &self.guest.root;
        let udev = udev(root, seen.number);
        let is_there = block::generation(root, &seen.place) == Some(seen.generation);
        let seen = if is_there { Some(Seen { udev, ..seen }) } else { look(root, name) };
        self.tracker.look(name, seen, false, Instant::now());
    }

    /// Reports all changes: first to those who wait for a disk, then as events.
    fn tell(&mut self) {
        let changes = self.tracker.changes();
        if changes.is_empty() {
            return;
        }
        if changes.iter().any(|change| !matches!(change, Change::Touched(_))) {
            self.guest.disks.publish(self.tracker.list());
        }
        for change in changes {
            if let Change::Touched(disk) | Change::Changed(disk) | Change::Resized { disk, .. } = &change {
                self.guest.disks.touch(disk);
            }
            match change {
                Change::Added(disk) => {
                    let silent = disk.silent.then(|| disk.clone());
                    self.guest.events.tell(DiskAdded { disk: Some(messages::disk(&disk)) });
                    if let Some(disk) = silent {
                        let problem = "the disk does not identify itself".to_owned();
                        self.guest.events.tell(messages::disk_failed(&disk, problem));
                    }
                }
                Change::Removed(disk) => {
                    self.guest.releases.gone(&disk);
                    let uses = uses::of(&self.guest.root, &disk);
                    let in_use: Vec<_> = uses.iter().map(ToString::to_string).collect();
                    if !in_use.is_empty() {
                        let in_use = in_use.join(", ");
                        tracing::warn!("the disk {} was removed while in use: {in_use}", disk.name);
                    }
                    self.guest.events.tell(DiskRemoved { disk: Some(messages::disk(&disk)), in_use });
                }
                Change::Resized { disk, before } => {
                    let disk = Some(messages::disk(&disk));
                    self.guest.events.tell(DiskResized { disk, bytes_before: before });
                }
                Change::Changed(disk) => {
                    self.guest.events.tell(DiskChanged { disk: Some(messages::disk(&disk)) });
                }
                Change::Touched(_) => {}
                Change::Usurped(disk) => {
                    let guest = self.guest.clone();
                    self.begun_anew.spawn(async move { release::begin_anew(&guest, disk).await });
                }
            }
        }
    }
}

/// Returns the disk that is called `name` now, if it is one that counts.
///
/// The kernel reports the path at which a disk was when something happened to it. The report may be old: by now
/// another disk may be at that path, and the disk with that name may be at another one. A disk that is removed
/// disappears from the list of names before the kernel reports it, and while its directory still exists. A new
/// disk is in the list before the kernel reports that it was added.
fn look(root: &Root, name: &str) -> Option<Seen> {
    let place = &block::disk_place(root, name).ok()?;
    let generation = block::generation(root, place)?;
    let number = identity::counts(root, place)?;
    let sequence = root.line(&format!("{place}/diskseq")).parse().ok();
    // Check the generation again, so that all values belong to one disk: the path may have been reused in the
    // meantime.
    let seen = Seen { place: place.to_owned(), number, generation, sequence, udev: udev(root, number) };
    (block::generation(root, place) == Some(generation)).then_some(seen)
}

/// Returns the state of udev's processing of the disk with this number.
fn udev(root: &Root, number: Number) -> Udev {
    match udev::runs(root).then(|| udev::processed(root, number)) {
        None => Udev::Absent,
        Some(None) => Udev::Pending,
        Some(Some(time)) => Udev::Processed(time),
    }
}
