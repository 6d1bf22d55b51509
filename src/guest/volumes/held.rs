//! Disk, or part of one, that an operation holds: operations that write take it in place of a name.
//!
//! ```text
//! the caller ───of, called──▶ Held ──check──▶ an operation ──check──▶ the next one …
//!                              │ its turn: one key, the disk's generation, for all operations and for release
//!                              │ its descriptor: as long as that is open the kernel gives neither the disk's name nor its
//!                              │   number to another disk
//!                              └ which disk it is: path and generation in sysfs, the kernel's sequence number
//! ```
//! A [`Held`] owns the disk's turn and a descriptor, and knows which disk was meant. Each operation
//! [checks](Held::check) immediately before it acts that the descriptor is still of that disk, and that the disk's
//! name still refers to it. What can use a descriptor works on that one (`work`). What needs a name, such as
//! mount(2) and LVM, gets one that cannot pass to another disk meanwhile, and the result is checked afterwards.
//!
//! Linux before 5.15 has no sequence numbers of disks. There, a disk that shows its serial number in sysfs is
//! queried for it once more instead.

use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::disks::identity::{KnownDisk, Serial, Source};
use crate::guest::volumes::Turn;
use crate::guest::volumes::{Error, PATIENCE, at_once, holding, work};
use crate::sys::block::{self, Number};
use crate::sys::block_device::{self, Facts, Lock};
use crate::sys::blocking;
use crate::sys::root::Root;

/// Disk, partition, or device built on them, held by one operation. Clones share it; it is released with the last
/// of them.
#[derive(Debug, Clone)]
pub struct Held(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    root: Root,
    /// Canonical path of the device node.
    file: PathBuf,
    device: Open,
    facts: Facts,
    /// Path in sysfs.
    place: String,
    disk: Meant,
    turn: Turn,
}

/// Descriptor of the device. Closing the last one of a disk waits for reads in progress, so it is never closed on
/// the event loop.
#[derive(Debug)]
struct Open(Option<File>);

impl Deref for Open {
    type Target = File;

    fn deref(&self) -> &File {
        // Present until it is dropped.
        match &self.0 {
            Some(device) => device,
            None => unreachable!("a disk that is no longer held"),
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let device = self.0.take();
        blocking::let_go(move || drop(device));
    }
}

/// Identity of the disk that was meant.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Meant {
    /// Path of the whole disk in sysfs.
    place: String,
    generation: u64,
    sequence: Option<u64>,
    /// Serial number that the disk shows in sysfs.
    serial: Option<Serial>,
}

impl Meant {
    fn new(disk: &KnownDisk) -> Self {
        let told = |serial: &&Serial| serial.source == Source::Virtio;
        Self {
            place: disk.place.clone(),
            generation: disk.generation,
            sequence: disk.sequence,
            serial: disk.serials.iter().find(told).cloned(),
        }
    }

    /// Checks that the disk that was found is this one. The error is the difference.
    fn is(&self, found: &Self) -> Result<(), &'static str> {
        if (&self.place, self.generation) != (&found.place, found.generation) {
            return Err("another disk has its name");
        }
        match (self.sequence, found.sequence) {
            (Some(one), Some(other)) if one == other => Ok(()),
            (Some(_), _) => Err("another disk or another medium is in its place"),
            // The kernel has no sequence numbers, or had none when the disk was recorded.
            (None, _) if self.serial.is_none() || self.serial == found.serial => Ok(()),
            (None, _) => Err("its serial number differs"),
        }
    }
}

impl Held {
    /// Holds `disk`, or the partition with this number in its table.
    ///
    /// # Errors
    /// [`Error::Another`] if another disk has its name by now; [`Error::Busy`] if it is held, or a program of an
    /// earlier run is still working on it; if it cannot be opened.
    pub async fn of(
        guest: &Guest,
        disk: &KnownDisk,
        partition: Option<u32>,
        doing: &'static str,
    ) -> Result<Self, Error> {
        let name = match partition {
            None => disk.file.clone(),
            Some(number) => {
                let part = disk.partitions.iter().find(|part| part.index == number);
                let gone = || Error::Another {
                    device: disk.file.clone().into(),
                    why: "it does not have this partition",
                };
                block::file(&part.ok_or_else(gone)?.name)
            }
        };
        let file = guest.root.path(&name);
        // Taken before it is opened, so that a disk that does not respond is not opened again and again.
        let turn = guest.volumes.turn(disk.generation, &file, doing)?;
        let (root, path, meant) = (guest.root.clone(), file.clone(), Meant::new(disk));
        let opened = at_once(&file, PATIENCE, move || {
            let opened = Opened::new(&root, &path, meant.sequence.is_none())?;
            let another = |why| Error::Another { device: opened.file.clone(), why };
            meant.is(&opened.disk).map_err(another)?;
            let index = root.line(&format!("{}/partition", opened.place)).parse().ok();
            if index.filter(|_| opened.place != meant.place) != partition {
                return Err(another("it is another partition"));
            }
            opened.held(root, turn)
        });
        opened.await?
    }

    /// Holds the device that is now called `file`, whatever it is: for devices named by people, and for devices
    /// built on a disk that is held.
    ///
    /// # Errors
    /// The errors of [`Self::of`].
    pub async fn called(guest: &Guest, file: &Path, doing: &'static str) -> Result<Self, Error> {
        Self::beside(guest, file, &[], doing).await
    }

    /// Holds a device like [`Self::called`], in addition to `others`: a device on the same disk as one of these
    /// shares its turn.
    pub(super) async fn beside(
        guest: &Guest,
        file: &Path,
        others: &[Self],
        doing: &'static str,
    ) -> Result<Self, Error> {
        let (guest, path, others) = (guest.clone(), file.to_owned(), others.to_vec());
        let opened = at_once(file, PATIENCE, move || {
            let opened = Opened::new(&guest.root, &path, false)?;
            let turn = match others.iter().find(|other| other.generation() == opened.disk.generation) {
                Some(other) => other.0.turn.clone(),
                None => guest.volumes.turn(opened.disk.generation, &opened.file, doing)?,
            };
            opened.held(guest.root.clone(), turn)
        });
        opened.await?
    }

    /// Returns the canonical path of the device node.
    pub fn file(&self) -> &Path {
        &self.0.file
    }

    /// Returns the device number.
    pub fn number(&self) -> Number {
        self.0.facts.number
    }

    /// Returns the generation of the disk, which distinguishes it from all others.
    pub fn generation(&self) -> u64 {
        self.0.disk.generation
    }

    /// Returns the path of the whole disk in sysfs.
    pub fn disk(&self) -> &str {
        &self.0.disk.place
    }

    /// Returns the size of a logical sector in bytes.
    pub(super) fn sector(&self) -> u32 {
        self.0.facts.sector
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.0.facts.read_only
    }

    /// Returns the descriptor of the device.
    pub(in crate::guest) fn device(&self) -> &File {
        &self.0.device
    }

    /// Returns the present size in bytes.
    ///
    /// # Errors
    /// If the kernel does not report it.
    pub fn bytes(&self) -> Result<u64, Error> {
        block_device::bytes(&self.0.device).map_err(|source| Error::unreadable(&self.0.file, source))
    }

    /// Checks that it is still the disk that was meant, and still has its name. Queries the disk only where the
    /// kernel has no sequence number of it, and may then block for as long as the disk does.
    ///
    /// # Errors
    /// [`Error::Another`] if not, or if that cannot be determined.
    pub fn check(&self) -> Result<(), Error> {
        let Inner { root, file, device, facts, place, disk, .. } = &*self.0;
        let another = |why| Error::Another { device: file.clone(), why };
        let now = block::place(root, facts.number).map_err(|_| another("it was removed"))?;
        if now != *place {
            return Err(another("another disk has its number"));
        }
        let found = found(root, device, place, false).map_err(|_| another("it was removed"))?;
        disk.is(&found).map_err(another)?;
        if self.bytes()? == 0 {
            return Err(another("it was removed"));
        }
        if block_device::number_at(file) != Some(facts.number) {
            return Err(another("its name refers to something else"));
        }
        Ok(())
    }

    /// Runs [`Self::check`] on a thread that may block.
    ///
    /// # Errors
    /// The errors of [`Self::check`]; also if the disk does not respond.
    pub async fn verify(&self) -> Result<(), Error> {
        let held = self.clone();
        holding(self, PATIENCE, move || held.check()).await?
    }

    /// Takes the lock of the whole disk that programs like udev honour (flock(2), as `sfdisk --lock` does), and
    /// checks that it is still the disk that was meant.
    ///
    /// # Errors
    /// [`Error::Locked`] if another program still has it after `patience`.
    pub(super) async fn lock(&self, patience: Duration) -> Result<Arc<Lock>, Error> {
        let held = self.clone();
        let lock = move || {
            let whole = held.0.root.path(&block::file(block::name(held.disk())));
            let opened = if held.disk() == held.0.place {
                block_device::reopen(held.device(), false)
            } else {
                block_device::open(&whole)
            };
            let locked = opened.and_then(|disk| block_device::lock(disk, patience));
            let locked = locked.map_err(|source| match source.kind() {
                io::ErrorKind::WouldBlock => Error::Locked { device: whole.clone() },
                _ => Error::unreadable(&whole, source),
            })?;
            // The disk may have changed during the wait for the lock.
            held.check()?;
            Ok(Arc::new(locked))
        };
        holding(self, patience + PATIENCE, lock).await?
    }
}

/// Opened device, with its properties.
struct Opened {
    file: PathBuf,
    device: File,
    facts: Facts,
    place: String,
    disk: Meant,
}

impl Opened {
    fn new(root: &Root, path: &Path, asks: bool) -> Result<Self, Error> {
        let unreadable = |source| Error::unreadable(path, source);
        let file = std::fs::canonicalize(path).map_err(unreadable)?;
        let device = block_device::open(&file).map_err(unreadable)?;
        let facts = block_device::facts_of(&device).map_err(unreadable)?;
        if facts.bytes == 0 {
            return Err(Error::Empty { device: file });
        }
        // Looked up after the device was opened: from then on no other device can get the number.
        let place = block::place(root, facts.number).map_err(unreadable)?;
        let disk = found(root, &device, &place, asks).map_err(unreadable)?;
        Ok(Self { file, device, facts, place, disk })
    }

    /// Completes the hold, unless a program of an earlier run is still working on the disk.
    fn held(self, root: Root, turn: Turn) -> Result<Held, Error> {
        let Self { file, device, facts, place, disk } = self;
        match work::at_work(&root, disk.generation) {
            Ok(false) => {
                let device = Open(Some(device));
                Ok(Held(Arc::new(Inner { root, file, device, facts, place, disk, turn })))
            }
            Ok(true) => Err(Error::Busy {
                what: file,
                doing: "a program that was started earlier is still working on it",
            }),
            Err(source) => Err(Error::Note { device: file, source }),
        }
    }
}

/// Returns the identity of the disk that the open device at `place` is on. The disk is queried for its serial
/// number if the kernel has no sequence number of it, or if `asks`.
fn found(root: &Root, device: &File, place: &str, asks: bool) -> io::Result<Meant> {
    let whole = block::whole(place);
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    let generation = block::generation(root, whole).ok_or_else(gone)?;
    let sequence = block_device::sequence(device)?;
    let told = (asks || sequence.is_none()).then(|| root.read(&format!("{whole}/serial")).ok());
    let serial = told.flatten().and_then(|told| Serial::new(Source::Virtio, &told));
    Ok(Meant { place: whole.to_owned(), generation, sequence, serial })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_disk_is_there() {
        let meant = |generation, sequence, serial: Option<&[u8]>| Meant {
            place: "/sys/devices/x/block/vdb".to_owned(),
            generation,
            sequence,
            serial: serial.and_then(|serial| Serial::new(Source::Virtio, serial)),
        };
        let (one, other): (Option<&[u8]>, Option<&[u8]>) = (Some(b"data-1"), Some(b"data-2"));
        for (case, wanted, found, is_it) in [
            ("the same", meant(1, Some(7), one), meant(1, Some(7), None), true),
            ("came anew", meant(1, Some(7), one), meant(2, Some(8), None), false),
            ("another medium", meant(1, Some(7), one), meant(1, Some(8), None), false),
            ("that is not told any more", meant(1, Some(7), one), meant(1, None, one), false),
            ("an old kernel", meant(1, None, one), meant(1, None, one), true),
            ("an old kernel, another serial number", meant(1, None, one), meant(1, None, other), false),
            ("an old kernel, no answer", meant(1, None, one), meant(1, None, None), false),
            ("known before it had a number", meant(1, None, one), meant(1, Some(7), one), true),
            ("of a kind that tells none in sysfs", meant(1, None, None), meant(1, None, None), true),
        ] {
            assert_eq!(wanted.is(&found).is_ok(), is_it, "{case}");
        }
        let elsewhere = Meant { place: "/sys/devices/x/block/vdc".to_owned(), ..meant(1, Some(7), None) };
        assert_eq!(meant(1, Some(7), None).is(&elsewhere), Err("another disk has its name"));
    }
}
