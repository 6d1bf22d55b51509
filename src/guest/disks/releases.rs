//! Remembers the addresses of SCSI disks that the kernel no longer has, although they may still be plugged: those
//! that were deleted by a release, which are recorded until the next boot, and those of other disks that
//! disappeared lately.
//!
//! A busy guest kernel can mistake the notification that a disk has been plugged for one about the previous disk
//! at the same address, or the other way round, and then has no disk there. It does not report this. A caller that
//! waits for the disk therefore scans the addresses where disks were.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::guest::disks::identity::{KnownDisk, ScsiAddress, Serial};
use crate::guest::disks::location::Bus;
use crate::guest::disks::lookup::{self, Selector};
use crate::sys::files;

/// Name of the file in the agent's runtime directory.
pub const FILE: &str = "released-disks.json";

/// Limit on the recorded releases, and on the other addresses.
const MOST: usize = 64;

/// Disk that was deleted by a release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Left {
    name: String,
    scsi: ScsiAddress,
    serials: Vec<Serial>,
    alias: Option<String>,
    wwn: Option<String>,
    /// Time of the release by this run of the agent; absent if it was an earlier run, long ago.
    #[serde(skip)]
    since: Option<Instant>,
}

impl Left {
    fn new(disk: &KnownDisk) -> Option<Self> {
        Some(Self {
            name: disk.name.clone(),
            scsi: disk.scsi?,
            serials: disk.serials.clone(),
            alias: disk.alias.clone(),
            wwn: disk.wwn.clone(),
            since: Some(Instant::now()),
        })
    }

    /// Returns a disk with the properties by which it can be looked up.
    fn disk(&self) -> Arc<KnownDisk> {
        let Self { name, scsi, serials, alias, wwn, .. } = self.clone();
        Arc::new(KnownDisk {
            name,
            file: String::new(),
            place: String::new(),
            number: (0, 0),
            generation: 0,
            sequence: None,
            bus: Bus::Scsi,
            pci: None,
            scsi: Some(scsi),
            serials,
            alias,
            wwn,
            bytes: 0,
            sector: 0,
            read_only: false,
            rotational: false,
            partitions: Vec::new(),
            holders: Vec::new(),
            silent: false,
        })
    }
}

#[derive(Debug, Default)]
struct State {
    left: Vec<Left>,
    /// Addresses of other disks that have disappeared, oldest first.
    gone: Vec<ScsiAddress>,
    file: Option<PathBuf>,
}

impl State {
    fn write(&self) {
        let Some(file) = &self.file else { return };
        let written = serde_json::to_vec(&self.left).map_err(Into::into);
        if let Err(error) = written.and_then(|bytes| files::replace(file, &bytes)) {
            tracing::warn!("the record of released disks cannot be written: {error}");
        }
    }
}

/// Addresses where disks were.
#[derive(Debug, Default)]
pub struct Releases(Mutex<State>);

impl Releases {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records releases in `folder` from now on, and adds those of the previous agent that are recorded there.
    /// Blocks only on the file system of `folder`, as do the other methods.
    pub fn keep_in(&self, folder: &Path) {
        let file = folder.join(FILE);
        let before: Vec<Left> = match files::read(&file).map(|bytes| serde_json::from_slice(&bytes)) {
            Some(Ok(left)) => left,
            Some(Err(error)) => {
                tracing::warn!("{} cannot be understood: {error}", file.display());
                Vec::new()
            }
            None => Vec::new(),
        };
        let mut state = self.locked();
        let newer = std::mem::take(&mut state.left);
        let has_newer = !newer.is_empty();
        let replaced = |old: &Left| newer.iter().any(|new| new.scsi == old.scsi);
        state.left = before.into_iter().filter(|old| !replaced(old)).collect();
        state.left.extend(newer);
        state.file = Some(file);
        if has_newer {
            state.write();
        }
    }

    /// Records a disk that is about to be deleted.
    pub(super) fn remember(&self, disk: &KnownDisk) {
        let Some(new) = Left::new(disk) else { return };
        let mut state = self.locked();
        // The address now belongs to this disk, so an older record of it is outdated.
        state.left.retain(|known| known.scsi != new.scsi);
        state.left.push(new);
        if state.left.len() > MOST {
            state.left.remove(0);
        }
        state.write();
    }

    /// Remembers the address of a disk that has disappeared from the kernel for whatever reason.
    pub(in crate::guest) fn gone(&self, disk: &KnownDisk) {
        let Some(address) = disk.scsi else { return };
        let mut state = self.locked();
        state.gone.retain(|known| *known != address);
        if state.left.iter().any(|left| left.scsi == address) {
            return;
        }
        state.gone.push(address);
        if state.gone.len() > MOST {
            state.gone.remove(0);
        }
    }

    /// Returns the addresses of released disks that match the selector.
    pub(super) fn addresses(&self, selector: &Selector) -> Vec<ScsiAddress> {
        let meant = |left: &&Left| lookup::find(&[left.disk()], selector).is_ok();
        self.locked().left.iter().filter(meant).map(|left| left.scsi).collect()
    }

    /// Returns the addresses where disks were and none of `visible` is now. A disk that was released less than
    /// `lately` ago is left alone: it is about to be unplugged.
    pub(super) fn free(&self, visible: &[Arc<KnownDisk>], lately: Duration) -> Vec<ScsiAddress> {
        let is_free = |address: &ScsiAddress| visible.iter().all(|disk| disk.scsi != Some(*address));
        let state = self.locked();
        let old = |left: &&Left| left.since.is_none_or(|since| since.elapsed() >= lately);
        let left = state.left.iter().filter(old).map(|left| left.scsi);
        left.chain(state.gone.iter().copied()).filter(is_free).collect()
    }

    /// Deletes the record of a disk that was found.
    pub(super) fn forget(&self, found: &KnownDisk) {
        let mut state = self.locked();
        let before = state.left.len();
        state.left.retain(|known| Some(known.scsi) != found.scsi);
        if state.left.len() != before {
            state.write();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::disks::identity::Source;

    fn disk(unit: u32, serial: &[u8]) -> Arc<KnownDisk> {
        let left = Left {
            name: "sdb".to_owned(),
            scsi: ScsiAddress { host: 0, channel: 0, target: 1, unit },
            serials: Serial::new(Source::Page80, serial).into_iter().collect(),
            alias: Some("ua-x".to_owned()),
            wwn: None,
            since: None,
        };
        left.disk()
    }

    fn units(addresses: &[ScsiAddress]) -> Vec<u32> {
        addresses.iter().map(|address| address.unit).collect()
    }

    #[test]
    fn they_outlive_the_agent() {
        let folder = tempfile::tempdir().unwrap();
        let first = Releases::default();
        first.keep_in(folder.path());
        let [one, two] = [disk(1, b"one"), disk(2, b"\xff two")];
        first.remember(&one);
        first.remember(&two);
        let second = Releases::default();
        // This disk is released before the file of the earlier agent has been read.
        second.remember(&disk(2, b"newer"));
        second.keep_in(folder.path());
        let meant = |serial: &str| second.addresses(&Selector::Serial(serial.to_owned()));
        assert_eq!(units(&meant("one")), [1]);
        assert_eq!(units(&meant("newer")), [2]);
        assert_eq!(units(&second.addresses(&Selector::Alias("ua-x".to_owned()))), [1, 2]);
        assert!(meant("three").is_empty());
        second.forget(&one);
        assert!(meant("one").is_empty());
        second.remember(&disk(3, b"three"));
        let third = Releases::default();
        third.keep_in(folder.path());
        assert_eq!(units(&third.free(&[], Duration::ZERO)), [2, 3]);
        #[allow(clippy::disallowed_methods)]
        std::fs::write(folder.path().join(FILE), "[{").unwrap();
        third.keep_in(folder.path());
        assert_eq!(third.free(&[], Duration::ZERO).len(), 2);
    }

    #[test]
    fn places_where_a_disk_may_have_been_passed_over() {
        let all = Releases::default();
        for unit in 0..100 {
            all.gone(&disk(unit, b"x"));
        }
        assert_eq!(all.free(&[], Duration::ZERO).len(), MOST);
        let all = Releases::default();
        for unit in [1, 2, 1] {
            all.gone(&disk(unit, b"x"));
        }
        assert_eq!(units(&all.free(&[], Duration::ZERO)), [2, 1]);
        // The address is taken by a different disk.
        assert_eq!(units(&all.free(&[disk(2, b"y")], Duration::ZERO)), [1]);
        // This disk has just been released, and is about to be unplugged.
        all.remember(&disk(1, b"x"));
        all.gone(&disk(1, b"x"));
        assert_eq!(units(&all.free(&[], Duration::from_secs(60))), [2]);
        assert_eq!(units(&all.free(&[], Duration::ZERO)), [1, 2]);
    }
}
