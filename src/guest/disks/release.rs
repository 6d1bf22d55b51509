//! Releases a disk that is to be unplugged, and finds one again that was not unplugged after all.
//!
//! ```text
//!           the rules unmount      not in use: claimed         flushed        of SCSI: deleted
//!  visible ───────────────────▶ ? ────────────────────────▶ ? ─────────▶ ? ────────────────────▶ not visible
//!     ▲                         │                                       │                          │
//!     │                         └─ in use: an error names the users     └─ of others: unused       │
//!     └──────────────────────────────────── found by a scan of its bus ◀───────────────────────────┘
//! ```
//!
//! A disk that somebody else has mounted or open is never removed. While a disk is flushed and deleted it is
//! claimed, so that nobody can begin to use it in between, and the release has the disk's turn: the agent does no
//! other operation on the disk meanwhile. A disk that is not on the SCSI bus stays visible, and can be used again
//! until it is unplugged.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::guest::Guest;
use crate::guest::disk_rules;
use crate::guest::disks::identity::{self, Asked, KnownDisk, ScsiAddress};
use crate::guest::disks::location::Bus;
use crate::guest::disks::lookup::{self, FindError, Selector};
use crate::guest::disks::room::WaitError;
use crate::guest::disks::uses::Use;
use crate::guest::disks::{openers, uses};
use crate::guest::messages;
use crate::guest::volumes;
use crate::sys::root::Root;
use crate::sys::{block, blocking, error_chain, sysfs};

/// Time limit for the whole release of a disk.
const PATIENCE: Duration = Duration::from_secs(45);
/// Time for which brief uses, such as by udev, are waited for before the disk counts as in use.
const MOMENT: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(100);
/// Time that a disk that has just appeared has to report its identity.
const UNKNOWN: Duration = Duration::from_secs(15);
/// Time that the monitor has to notice that a disk has disappeared.
const GONE: Duration = Duration::from_secs(5);
/// Time that the kernel has to report a plugged disk before the agent scans for it.
const LATE: Duration = Duration::from_secs(2);
/// Longest time between two scans for a disk that a caller waits for.
const SELDOM: Duration = Duration::from_secs(16);
/// Number of retries of an error that is most likely transient, and the time between them.
const PASSING: (u32, Duration) = (5, Duration::from_secs(1));

/// Limit on the uses that an error names.
const NAMED: usize = 12;

fn list(all: &[String]) -> String {
    let named = all.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join("; ");
    if all.len() > NAMED { format!("{named}; and {} more", all.len() - NAMED) } else { named }
}

/// Result of a release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Released {
    /// No disk matches.
    Absent,
    /// The disk is not in use and all writes are flushed. It stays visible, and can be used again.
    Unused(Arc<KnownDisk>),
    /// The kernel has removed the disk.
    Removed(Arc<KnownDisk>),
}

/// Reasons why a disk is not released.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// The selector matches several disks or is unusable.
    #[error(transparent)]
    Find(FindError),
    /// The disk is in use.
    #[error("the disk {disk} is in use: {}", list(holders))]
    InUse {
        /// Name of the disk, with what distinguishes it from others.
        disk: String,
        /// Descriptions of the users.
        holders: Vec<String>,
    },
    /// Disks in use that have not reported their identity may be the one that is meant.
    #[error(
        "no disk is known to have {selector}, but these disks do not identify themselves, and are in use: {}",
        list(disks)
    )]
    Unknown {
        /// Selector of the request.
        selector: Selector,
        /// Names of those disks.
        disks: Vec<String>,
    },
    /// The mount that a rule has made of it cannot be unmounted.
    #[error("the disk {disk} is mounted by a rule, and cannot be unmounted")]
    ByRule {
        /// Name of the disk, with what distinguishes it from others.
        disk: String,
        /// Error of the unmount.
        source: disk_rules::Error,
    },
    /// Another operation on the disk is running.
    #[error(transparent)]
    Busy(volumes::Error),
    /// The disk does not respond.
    #[error("the disk {disk} has not answered for {} s", PATIENCE.as_secs())]
    Silent {
        /// Name of the disk, with what distinguishes it from others.
        disk: String,
    },
    /// The kernel or the disk has refused the operation.
    #[error("cannot {what} the disk {disk}")]
    System {
        /// Operation that was refused.
        what: &'static str,
        /// Name of the disk, with what distinguishes it from others.
        disk: String,
        /// Error of the operation.
        source: io::Error,
    },
}

/// Returns the disk that the selector means as soon as it is known, or fails after `within`. A disk that was
/// released, and has not become visible since, is scanned for at its last address. One that does not appear by
/// itself is scanned for at the former addresses of SCSI disks; finally all disks are read again.
///
/// # Errors
/// The errors of [`Room::wait`](super::room::Room::wait).
pub async fn find(guest: &Guest, selector: &Selector, within: Duration) -> Result<Arc<KnownDisk>, WaitError> {
    let there = guest.disks.find(selector);
    let scan = async {
        if matches!(there, Err(FindError::NotFound(_))) {
            scan_all(guest, guest.releases.addresses(selector)).await;
            let mut pause = LATE;
            loop {
                tokio::time::sleep(pause).await;
                scan_all(guest, guest.releases.free(&guest.disks.all(), LATE)).await;
                tokio::time::sleep(pause).await;
                // The kernel may have missed both that a disk was unplugged and that another was plugged in its
                // place.
                guest.disks.doubt();
                pause = SELDOM.min(2 * pause);
            }
        }
        std::future::pending().await
    };
    tokio::select! {
        found = guest.disks.wait(selector, within) => found.inspect(|disk| {
            // Brief: the file is in a directory in memory.
            guest.releases.forget(disk);
            // A caller that looks for the disk does not want it released.
            disk_rules::keep(guest, disk);
        }),
        never = scan => never,
    }
}

async fn scan_all(guest: &Guest, addresses: Vec<ScsiAddress>) {
    if !addresses.is_empty() {
        let root = guest.root.clone();
        blocking::run(move || addresses.into_iter().for_each(|address| scan(&root, address))).await;
    }
}

/// Makes the kernel detect a disk afresh that it mistakes for its predecessor, as soon as the predecessor is no
/// longer in use. What the kernel knows of the predecessor, from partitions to cached data, is wrong for this
/// disk.
pub(in crate::guest) async fn begin_anew(guest: &Guest, disk: Arc<KnownDisk>) {
    let Some(address) = disk.scsi else { return };
    let (most, moment) = PASSING;
    let mut passing = 0;
    let mut told = false;
    loop {
        let (machine, known) = (guest.clone(), Arc::clone(&disk));
        let done = blocking::run(move || -> Result<(), ReleaseError> {
            let path = machine.root.path(&known.file);
            let turn = machine.volumes.turn(known.generation, &path, "the kernel is reading it anew");
            let _turn = turn.map_err(ReleaseError::Busy)?;
            let Some(claim) = claim(&machine, &known)? else { return Ok(()) };
            let system =
                |source| ReleaseError::System { what: "delete", disk: lookup::describe(&known), source };
            sysfs::write(&machine.root, &format!("{}/device/delete", known.place), "1").map_err(system)?;
            drop(claim);
            scan(&machine.root, address);
            Ok(())
        });
        let Err(error) = done.await else { return };
        // A disk that is disappearing, or being queried again, cannot be opened for a moment.
        if matches!(error, ReleaseError::System { .. }) && passing < most {
            passing += 1;
            tokio::time::sleep(moment).await;
            continue;
        }
        if !std::mem::replace(&mut told, true) {
            let why = error_chain::words(&error);
            let problem = format!("it has replaced a disk that is in use, and cannot be used: {why}");
            tracing::warn!("{}: {problem}", disk.name);
            guest.events.tell(messages::disk_failed(&disk, problem));
        }
        // No event reports that a disk is no longer in use.
        guest.events.next_tick().await;
    }
}

fn scan(root: &Root, ScsiAddress { host, channel, target, unit }: ScsiAddress) {
    let path = format!("/sys/class/scsi_host/host{host}/scan");
    if let Err(error) = sysfs::write(root, &path, &format!("{channel} {target} {unit}")) {
        tracing::warn!(%error, "cannot scan for a disk at {host}:{channel}:{target}:{unit}");
    }
}

/// Releases the disk that the selector means. Succeeds if no disk matches, or if it was released before.
///
/// # Errors
/// If the disk is in use; the error names the users. If it does not respond in time: a flush that has begun then
/// continues, but no further step is begun.
pub async fn release(guest: &Guest, selector: &Selector) -> Result<Released, ReleaseError> {
    let Some(disk) = visible(guest, selector).await? else { return Ok(Released::Absent) };
    let by_rule = |source| ReleaseError::ByRule { disk: lookup::describe(&disk), source };
    disk_rules::release(guest, &disk).await.map_err(by_rule)?;
    let released = release_unmounted(guest, Arc::clone(&disk)).await;
    if released.is_err() {
        // The disk stays, and so do the mounts that rules make of it.
        disk_rules::keep(guest, &disk);
    }
    released
}

/// Releases a disk of which rules have nothing mounted.
async fn release_unmounted(guest: &Guest, disk: Arc<KnownDisk>) -> Result<Released, ReleaseError> {
    let name = lookup::describe(&disk);
    let silent = |_| ReleaseError::Silent { disk: name.clone() };
    let end = tokio::time::Instant::now() + PATIENCE;
    // Turn of the disk, which all operations on it take.
    let held = guest.volumes.turn(disk.generation, &guest.root.path(&disk.file), "it is being released");
    let held = held.map_err(ReleaseError::Busy)?;
    let (machine, known) = (guest.clone(), Arc::clone(&disk));
    let work = blocking::run(move || {
        let claim = claim(&machine, &known)?;
        if let Some(claim) = &claim {
            use std::os::fd::AsFd as _;
            let system =
                |source| ReleaseError::System { what: "flush", disk: lookup::describe(&known), source };
            machine.effects.flush_disk(claim.as_fd()).map_err(system)?;
        }
        Ok((claim, held))
    });
    let (claim, held) = tokio::time::timeout_at(end, work).await.map_err(silent)??;
    if claim.is_none() {
        return Ok(Released::Absent);
    }
    if disk.bus != Bus::Scsi || disk.scsi.is_none() {
        return Ok(Released::Unused(disk));
    }
    // Recorded before it is deleted, so that it can be found again whatever happens.
    let (root, path) = (guest.root.clone(), format!("{}/device/delete", disk.place));
    let (releases, known) = (Arc::clone(&guest.releases), Arc::clone(&disk));
    let work = blocking::run(move || {
        if !identity::is_still_there(&root, &known) {
            return Err(io::ErrorKind::NotFound.into());
        }
        releases.remember(&known);
        let deleted = sysfs::write(&root, &path, "1");
        drop((claim, held));
        deleted
    });
    match tokio::time::timeout_at(end, work).await.map_err(silent)? {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(ReleaseError::System { what: "delete", disk: name, source: error });
        }
        _ => {}
    }
    gone(guest, disk.generation).await;
    Ok(Released::Removed(disk))
}

/// Returns the disk that the selector means, also if it has only just appeared.
async fn visible(guest: &Guest, selector: &Selector) -> Result<Option<Arc<KnownDisk>>, ReleaseError> {
    let known = || match guest.disks.find(selector) {
        Ok(disk) => Ok(Some(disk)),
        Err(FindError::NotFound(_)) => Ok(None),
        Err(error) => Err(ReleaseError::Find(error)),
    };
    if let Some(disk) = known()? {
        return Ok(Some(disk));
    }
    let machine = guest.clone();
    if blocking::run(move || any_unknown(&machine)).await {
        match guest.disks.wait(selector, UNKNOWN).await {
            Ok(disk) => return Ok(Some(disk)),
            Err(WaitError::TooLate { .. }) => {}
            Err(WaitError::Find(error)) => return Err(ReleaseError::Find(error)),
        }
    }
    // A disk that was unknown at first may have become known just before the check for unknown disks.
    if let Some(disk) = known()? {
        return Ok(Some(disk));
    }
    let machine = guest.clone();
    let silent = move || {
        let all = machine.disks.all();
        let in_use = |disk: &&Arc<KnownDisk>| disk.silent && !uses::of(&machine.root, disk).is_empty();
        all.iter().filter(in_use).map(|disk| lookup::describe(disk)).collect::<Vec<_>>()
    };
    match blocking::run(silent).await {
        disks if disks.is_empty() => Ok(None),
        disks => Err(ReleaseError::Unknown { selector: selector.clone(), disks }),
    }
}

/// Returns whether the kernel has a disk whose identity is not known yet.
fn any_unknown(guest: &Guest) -> bool {
    let known = guest.disks.all();
    let is_known = |generation| known.iter().any(|disk| disk.generation == generation);
    let unknown = |name: &String| {
        block::disk_place(&guest.root, name).is_ok_and(|place| {
            identity::counts(&guest.root, &place).is_some()
                && block::generation(&guest.root, &place).is_some_and(|generation| !is_known(generation))
        })
    };
    block::disks(&guest.root).unwrap_or_default().iter().any(unknown)
}

/// Claims a disk that is not in use. Returns no claim if it has disappeared.
fn claim(guest: &Guest, disk: &KnownDisk) -> Result<Option<std::os::fd::OwnedFd>, ReleaseError> {
    let until = Instant::now() + MOMENT;
    let in_use = |holders| ReleaseError::InUse { disk: lookup::describe(disk), holders };
    loop {
        // Read the present state, without querying the disk.
        let fresh = match identity::read(&guest.root, &disk.place, &Asked::Silent) {
            Ok(fresh) if fresh.generation == disk.generation => fresh,
            _ => return Ok(None),
        };
        let uses = uses::of(&guest.root, &fresh);
        if !uses.is_empty() {
            return Err(in_use(uses.iter().map(|one| words(guest, one)).collect()));
        }
        let claim = match guest.effects.claim_disk(&guest.root.path(&disk.file)) {
            Ok(claim) => Some(claim),
            Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => None,
            Err(source) => {
                return Err(ReleaseError::System { what: "open", disk: lookup::describe(disk), source });
            }
        };
        let mut openers = openers::of(&guest.root, &fresh);
        if claim.is_none() && openers.as_ref().is_ok_and(Vec::is_empty) {
            openers = openers::mounts_elsewhere(&guest.root, &fresh);
        }
        let mut holders = match openers {
            Ok(openers) => openers.iter().map(ToString::to_string).collect::<Vec<_>>(),
            Err(too_many) => vec![too_many.to_string()],
        };
        if claim.is_some() && holders.is_empty() {
            // The device name may have passed to another disk before it was opened; it cannot do so any longer.
            let same = identity::is_still_there(&guest.root, disk);
            return Ok(claim.filter(|_| same));
        }
        if holders.is_empty() {
            holders.push("it is opened exclusively by something that cannot be found".to_owned());
        }
        if Instant::now() >= until {
            return Err(in_use(holders));
        }
        std::thread::sleep(AGAIN);
    }
}

fn words(guest: &Guest, one: &Use) -> String {
    match one {
        Use::Mounted(place) | Use::Bound(place) if guest.pod_volumes.is_kubelets(place) => {
            format!("staged for kubelet at {place}")
        }
        Use::Mounted(place) => format!("mounted at {place}"),
        Use::Bound(place) => format!("bound to {place}"),
        Use::Swap(device) => format!("swap space on {device}"),
        Use::Holder(device) => format!("{device} is built on it"),
    }
}

/// Waits until the monitor knows that the disk has disappeared.
async fn gone(guest: &Guest, generation: u64) {
    let mut changes = guest.disks.changes();
    let going = async {
        while guest.disks.all().iter().any(|disk| disk.generation == generation) {
            // The sender lives as long as the guest.
            let _ = changes.changed().await;
        }
    };
    if tokio::time::timeout(GONE, going).await.is_err() {
        tracing::warn!("the kernel does not report that a deleted disk is gone");
    }
}
