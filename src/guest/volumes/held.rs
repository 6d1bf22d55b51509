//! A disk, or a part of one, that is held: what verbs that write are given in the place of a name.
//!
//! ```text
//! who decides ──of, called──▶ Held ──check──▶ a verb acts ──check──▶ the next one …
//!                              │ its turn: one key, the disk's generation, for all verbs and for release
//!                              │ its descriptor: as long as that is open the kernel gives neither the disk's name nor its
//!                              │   number to another disk
//!                              └ which disk it is: place and generation in sysfs, the kernel's number of it
//! ```
//! A [`Held`] owns the disk's turn and a descriptor, and knows which disk was meant. Each verb [checks](Held::check)
//! immediately before it acts that the descriptor is still of that disk, and that the disk's name still leads to it. What
//! can take a descriptor works on that one (`work`); what has to have a name, such as mount(2) and LVM, is given one
//! that cannot become another disk's meanwhile, and is looked at afterwards.
//!
//! Linux before 5.15 has no number of its own for a disk. A disk that tells its serial number in sysfs is asked for that
//! once more instead.

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

/// A disk, a partition, or a device that is made of them, in the hands of one operation. Clones share it, and it is let
/// go of with the last of them.
#[derive(Debug, Clone)]
pub struct Held(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    root: Root,
    /// Its name, without links.
    file: PathBuf,
    device: Open,
    facts: Facts,
    /// Where it is in sysfs.
    place: String,
    disk: Meant,
    turn: Turn,
}

/// The descriptor. The last one of a disk waits, as it is closed, for what is still read from it: never on the event loop.
#[derive(Debug)]
struct Open(Option<File>);

impl Deref for Open {
    type Target = File;

    fn deref(&self) -> &File {
        // It is there until it is dropped.
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

/// Which disk it has to be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Meant {
    /// Where the whole disk is in sysfs.
    place: String,
    generation: u64,
    sequence: Option<u64>,
    /// What the disk said of itself in sysfs.
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

    /// Whether the disk that was found is this one; why not.
    fn is(&self, found: &Self) -> Result<(), &'static str> {
        if (&self.place, self.generation) != (&found.place, found.generation) {
            return Err("another disk has its name");
        }
        match (self.sequence, found.sequence) {
            (Some(one), Some(other)) if one == other => Ok(()),
            (Some(_), _) => Err("another disk or another medium is in its place"),
            // What the kernel does not number, or did not when it was known.
            (None, _) if self.serial.is_none() || self.serial == found.serial => Ok(()),
            (None, _) => Err("its serial number differs"),
        }
    }
}

impl Held {
    /// Holds `disk`, or the partition of it that has this number in its table.
    ///
    /// # Errors
    /// [`Error::Another`] if another disk has its name by now; [`Error::Busy`] if it is held, or a program of an earlier
    /// run is at work on it; if it cannot be opened.
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
        // Taken first: one that does not answer is not opened again and again.
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

    /// Holds what is called `file` now, whatever that is: for what people name, and for devices that are made of a disk that
    /// is held.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub async fn called(guest: &Guest, file: &Path, doing: &'static str) -> Result<Self, Error> {
        Self::beside(guest, file, &[], doing).await
    }

    /// As [`Self::called`], beside what is held already: what is on the same disk as one of these shares its turn.
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

    /// Its name, without links.
    pub fn file(&self) -> &Path {
        &self.0.file
    }

    /// Its number.
    pub fn number(&self) -> Number {
        self.0.facts.number
    }

    /// Tells its disk from all others.
    pub fn generation(&self) -> u64 {
        self.0.disk.generation
    }

    /// Where the whole disk is in sysfs.
    pub fn disk(&self) -> &str {
        &self.0.disk.place
    }

    /// Bytes of its logical sectors.
    pub(super) fn sector(&self) -> u32 {
        self.0.facts.sector
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.0.facts.read_only
    }

    /// The descriptor.
    pub(in crate::guest) fn device(&self) -> &File {
        &self.0.device
    }

    /// Its size now.
    ///
    /// # Errors
    /// If the kernel does not say it.
    pub fn bytes(&self) -> Result<u64, Error> {
        block_device::bytes(&self.0.device).map_err(|source| Error::unreadable(&self.0.file, source))
    }

    /// Whether it is still the disk that was meant, and still has its name. Asks a disk only where the kernel has no
    /// number of it, and may then block for as long as the disk does.
    ///
    /// # Errors
    /// [`Error::Another`] if not, or if that cannot be told.
    pub fn check(&self) -> Result<(), Error> {
        let Inner { root, file, device, facts, place, disk, .. } = &*self.0;
        let another = |why| Error::Another { device: file.clone(), why };
        let now = block::place(root, facts.number).map_err(|_| another("it is gone"))?;
        if now != *place {
            return Err(another("another disk has its number"));
        }
        let found = found(root, device, place, false).map_err(|_| another("it is gone"))?;
        disk.is(&found).map_err(another)?;
        if self.bytes()? == 0 {
            return Err(another("it is gone"));
        }
        if block_device::number_at(file) != Some(facts.number) {
            return Err(another("its name refers to something else"));
        }
        Ok(())
    }

    /// As [`Self::check`], beside the event loop.
    ///
    /// # Errors
    /// As [`Self::check`], and if the disk does not answer.
    pub async fn verify(&self) -> Result<(), Error> {
        let held = self.clone();
        holding(self, PATIENCE, move || held.check()).await?
    }

    /// Takes the lock of the whole disk that programs like udev keep to (flock(2), as `sfdisk --lock` has it), and checks
    /// that it is still the disk that was meant.
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
            // That was waited for.
            held.check()?;
            Ok(Arc::new(locked))
        };
        holding(self, patience + PATIENCE, lock).await?
    }
}

/// A device that was opened, and what was found out about it.
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
        // Looked up after it was opened: from then on the number is nobody else's.
        let place = block::place(root, facts.number).map_err(unreadable)?;
        let disk = found(root, &device, &place, asks).map_err(unreadable)?;
        Ok(Self { file, device, facts, place, disk })
    }

    /// What is at work on it from before is in the way.
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

/// Which disk an open device is of, which is at `place`. It is asked for its serial number if the kernel has no number of
/// it, or if that is said.
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
