//! Directory of a pool: one record and one image for each volume. Blocks.
//!
//! ```text
//! <path>/.pool               the pool's UUID, see `marker`
//! <path>/.lock               held while a host half has the pool
//! <path>/.spare              space for records that have to be written when the file system is full
//! <path>/.removed            serial numbers of removed volumes whose identifiers do not name the pool
//! <path>/<serial>.json       the record
//! <path>/<serial>.raw        the image, or .qcow2
//! <path>/….new               unfinished files
//! ```
//!
//! A record is replaced as a whole and synced before any action that depends on it. So whatever a killed
//! process leaves behind is either a volume in its previous state, or one that [`Folder::load`] finishes
//! creating or removing. Other files are left alone.
//!
//! The directory is opened once, and everything in it is accessed through its descriptor (see [`Directory`]).
//! Only QEMU is given a path: [`Folder::give`] ensures that it leads to the same file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Deref;
use std::os::unix::fs::{MetadataExt as _, fchown};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use super::super::super::disks::Format;
use super::super::claim::{self, Claim, Use};
use super::super::hotplug::{qcow2, volume::make_folder};
use super::super::link::Owner;
use super::identity;
use super::record::{Damaged, Record, Stage};
use super::register::Expected;
use super::steps::Steps;
use crate::sys::directory::{Directory, Entry};
use crate::sys::{allocation, blocking};

mod identify;
mod load;

/// Maximum size of a record in bytes: all fields are bounded, but each byte may be escaped.
const LONGEST_RECORD: u64 = 64 * 1024;
/// Number of bytes that are reserved for records.
const SPARE: u64 = 2 * LONGEST_RECORD;
/// Maximum number of removed volumes whose identifiers lack the pool's UUID that are remembered: the list fits
/// into the reserved space.
const MOST_REMOVED: usize = 4096;

/// Problem of a volume without an image.
pub(super) const GONE: &str = "its image is missing";

const MARKER: &str = ".pool";
const LOCK: &str = ".lock";
const SPARE_FILE: &str = ".spare";
const REMOVED: &str = ".removed";
const FORMATS: [Format; 2] = [Format::Raw, Format::Qcow2];

/// Directory of a pool, locked by this process.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    directory: Held,
    uuid: String,
    steps: Steps,
}

/// Directory that this process has locked. If its file system hangs, closing it may hang too, so that is not
/// left to the task that drops it.
#[derive(Debug)]
struct Held(Option<(Directory, Flock<File>)>);

impl Deref for Held {
    type Target = Directory;

    fn deref(&self) -> &Directory {
        let Some((directory, _)) = &self.0 else { unreachable!("it exists until it is dropped") };
        directory
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let held = self.0.take();
        blocking::let_go(move || drop(held));
    }
}

/// Contents of a directory.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Usable records by serial number.
    pub records: BTreeMap<String, Record>,
    /// Volumes with unusable records, by serial number.
    pub damaged: BTreeMap<String, Damaged>,
    /// Serial numbers of removed volumes whose identifiers do not name the pool.
    pub removed: BTreeSet<String>,
}

impl Folder {
    /// Opens the directory at `path` for this process. Creates it if it is missing, unless a pool was there before.
    ///
    /// # Errors
    /// If it cannot be created, another process has it, other users may write to it, or it is not the pool that was
    /// there before.
    pub fn open(path: &Path, expected: Option<&Expected>, steps: Steps) -> io::Result<Self> {
        steps.wait();
        if expected.is_none() {
            make_folder(path)?;
        }
        let directory = Directory::open(path).map_err(|error| match expected {
            Some(expected) if error.kind() == io::ErrorKind::NotFound => {
                io::Error::other(format!("{error}; {}", expected.advice))
            }
            _ => error,
        })?;
        if let Some(problem) = directory.distrust()? {
            return Err(io::Error::other(problem));
        }
        if let Some(expected) = expected
            && directory.entry(MARKER)? == Entry::Nothing
            && directory.entry(LOCK)? == Entry::Nothing
        {
            // Write nothing to a directory that belongs to another pool.
            return Err(identify::not_it(path, expected));
        }
        let file = directory.file_or_new(LOCK)?;
        let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                return Err(io::Error::other("another guestlet-host uses this directory"));
            }
            Err((_, error)) => return Err(error.into()),
        };
        let directory = Held(Some((directory, lock)));
        let mut folder = Self { path: path.to_owned(), directory, uuid: String::new(), steps };
        folder.uuid = folder.identify(expected)?;
        folder.set_aside();
        Ok(folder)
    }

    /// Returns the path under which the directory was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the pool's UUID.
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Returns the path of a volume's record, for people.
    pub fn record(&self, serial: &str) -> PathBuf {
        self.path.join(format!("{serial}.json"))
    }

    /// Returns the path of a volume's image, for QEMU and people.
    pub fn image(&self, serial: &str, format: Format) -> PathBuf {
        self.path.join(image_name(serial, format))
    }

    /// Reports whether the path leads to a different directory by now.
    ///
    /// # Errors
    /// Those of stat(2).
    pub fn has_moved(&self) -> io::Result<bool> {
        self.steps.wait();
        match self.path.metadata() {
            Ok(found) => Ok((found.dev(), found.ino()) != self.directory.itself()?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Returns the total and free bytes of its file system.
    ///
    /// # Errors
    /// Those of fstatvfs(3).
    pub fn room(&self) -> io::Result<(u64, u64)> {
        self.steps.wait();
        self.directory.room()
    }

    /// Stores a record durably.
    ///
    /// # Errors
    /// If the system refuses; the previous record then remains.
    pub fn keep(&self, serial: &str, record: &Record) -> io::Result<()> {
        self.keep_until_power_loss(serial, record)?;
        self.directory.sync()
    }

    /// Stores a record so that it survives the end of this program. After a power loss, either this record or the
    /// previous one is there.
    ///
    /// # Errors
    /// If the system refuses; the previous record then remains.
    pub fn keep_until_power_loss(&self, serial: &str, record: &Record) -> io::Result<()> {
        let name = format!("{serial}.json");
        self.steps.step(|| drop(self.directory.file_or_new(&format!("{name}.new"))))?;
        self.replace(&name, &record.encode()?)?;
        self.steps.step(|| {})
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let new = format!("{name}.new");
        self.directory.prepare(&new, bytes)?;
        self.directory.rename(&new, name)
    }

    /// Runs `keep`, and makes it succeed even if the file system is full, by freeing the reserved space: to remove
    /// a volume, its record has to be updated before its space becomes free.
    ///
    /// # Errors
    /// Those of `keep`.
    pub fn anyhow(&self, keep: impl Fn(&Self) -> io::Result<()>) -> io::Result<()> {
        let kept = keep(self);
        if !kept.as_ref().is_err_and(is_full) {
            return kept;
        }
        self.directory.remove(SPARE_FILE)?;
        let kept = keep(self);
        self.set_aside();
        kept
    }

    /// Reserves space for [`Folder::anyhow`]. If the file system is full, this is tried again later.
    fn set_aside(&self) {
        let file = self.directory.file_or_new(SPARE_FILE);
        if let Err(error) = file.and_then(|file| allocation::reserve(&file, 0, SPARE)) {
            tracing::warn!(pool = %self.path.display(), %error, "cannot reserve space for records");
        }
    }

    /// Creates the image of a volume, fully allocated if the record says so, and then its record. Both are durable
    /// when this returns.
    ///
    /// # Errors
    /// If the system refuses; the caller removes the remains with [`Folder::clear`].
    pub fn make(&self, serial: &str, record: &Record) -> io::Result<()> {
        let (image, kept) = (image_name(serial, record.format()), format!("{serial}.json"));
        let (new, new_record) = (format!("{image}.new"), format!("{kept}.new"));
        let mut file = self.directory.new_file(&new)?;
        self.steps.step(|| {})?;
        let start = match record.format() {
            Format::Raw => {
                file.set_len(record.size)?;
                0
            }
            Format::Qcow2 => {
                let empty = qcow2::empty(record.size);
                file.write_all(&empty.start)?;
                file.set_len(empty.length)?;
                empty.length
            }
        };
        self.steps.step(|| {})?;
        if record.full {
            allocation::reserve(&file, start, record.size)?;
        }
        self.directory.sync_file(&file)?;
        self.steps.step(|| {})?;
        self.directory.prepare(&new_record, &record.encode()?)?;
        self.steps.step(|| {})?;
        // The record is renamed first: an image without a record would belong to no volume.
        self.directory.rename(&new_record, &kept)?;
        self.steps.step(|| {})?;
        self.directory.rename(&new, &image)?;
        self.steps.step(|| {})?;
        self.directory.sync()?;
        self.steps.step(|| {})
    }

    /// Opens an image, which must be a regular file with a single link.
    fn open_image(&self, serial: &str, format: Format, write: bool) -> io::Result<File> {
        let file = self.directory.file(&image_name(serial, format), write)?;
        match file.metadata()?.nlink() {
            1 => Ok(file),
            links => Err(io::Error::other(linked(links))),
        }
    }

    /// Reserves space for a fully allocated volume that is to have `size` bytes. After an error no additional space
    /// is kept.
    ///
    /// # Errors
    /// If there is not enough space.
    pub fn reserve(&self, serial: &str, record: &Record, size: u64) -> io::Result<()> {
        let file = self.open_image(serial, record.format(), true)?;
        // A qcow2 image begins with its metadata, which grows with the number of clusters.
        let margin = match record.format() {
            Format::Raw => 0,
            Format::Qcow2 => qcow2::empty(size).length,
        };
        let reserved = allocation::reserve(&file, record.size + margin, size - record.size);
        if reserved.is_err() && record.format() == Format::Raw {
            // A qcow2 image may be growing at this moment; QEMU will use the space that was reserved.
            allocation::give_back(&file)?;
        }
        reserved
    }

    /// Expands the image of a volume that no VM has, if that takes no more than setting its length.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn lengthen(&self, serial: &str, record: &Record) -> io::Result<()> {
        if record.format() == Format::Raw {
            let file = self.open_image(serial, Format::Raw, true)?;
            if file.metadata()?.len() < record.size {
                file.set_len(record.size)?;
                self.directory.sync_file(&file)?;
            }
        }
        Ok(())
    }

    /// Checks that the path that QEMU gets leads to the image, and gives the image to the user that QEMU runs as.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn give(&self, serial: &str, record: &Record, owner: Option<Owner>) -> io::Result<()> {
        self.steps.wait();
        let file = self.open_image(serial, record.format(), false)?;
        let found = file.metadata()?;
        let named = self.image(serial, record.format()).symlink_metadata()?;
        if (named.dev(), named.ino()) != (found.dev(), found.ino()) {
            return Err(io::Error::other("another directory has replaced that of its pool"));
        }
        match owner {
            Some(owner) if (found.uid(), found.gid()) != (owner.uid, owner.gid) => {
                fchown(&file, Some(owner.uid), Some(owner.gid))
            }
            _ => Ok(()),
        }
    }

    /// Returns the reason why the image is unusable, if it is.
    pub fn problem(&self, serial: &str, record: &Record) -> Option<String> {
        self.steps.wait();
        match self.directory.entry(&image_name(serial, record.format())) {
            Ok(Entry::File { links: 1, .. }) => None,
            Ok(Entry::File { links, .. }) => Some(linked(links)),
            Ok(Entry::Nothing) => Some(GONE.to_owned()),
            Ok(Entry::Link) => Some("its image is a symbolic link".to_owned()),
            Ok(Entry::Other) => Some("its image is not a regular file".to_owned()),
            Err(error) => Some(format!("its image cannot be examined: {error}")),
        }
    }

    /// Determines whether any process has the image open; `None` if there is no image.
    ///
    /// # Errors
    /// If the system refuses, or the file under the image's name is not an image.
    pub fn used(&self, serial: &str, record: &Record) -> io::Result<Option<Use>> {
        match claim::look(|| self.open_image(serial, record.format(), false)) {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Claims all existing images of a volume, so that they can be removed.
    ///
    /// # Errors
    /// If the system refuses, the file under an image's name is not an image, or a process has it open
    /// ([`io::ErrorKind::ResourceBusy`]).
    pub fn claim(&self, serial: &str) -> io::Result<Vec<Claim>> {
        let mut claims = Vec::new();
        for format in FORMATS {
            match claim::claim(|| self.open_image(serial, format, false)) {
                Ok(claim) => claims.push(claim),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(claims)
    }

    /// Removes the claimed images and then the record, as far as they exist.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn clear(&self, serial: &str, _claims: Vec<Claim>) -> io::Result<()> {
        let mut removed = false;
        for format in FORMATS {
            self.steps.step(|| {})?;
            removed |= self.directory.remove(&image_name(serial, format))?;
            self.directory.remove(&format!("{}.new", image_name(serial, format)))?;
        }
        // The record is removed only after the image. If it reappears after a crash, its stage says that the volume is
        // being removed.
        if removed {
            self.directory.sync()?;
        }
        self.steps.step(|| {})?;
        self.directory.remove(&format!("{serial}.json.new"))?;
        self.directory.remove(&format!("{serial}.json"))?;
        self.steps.step(|| {})
    }

    /// Remembers the removal of a volume whose identifier does not show that it was in this pool. If there are too
    /// many, the oldest are dropped.
    ///
    /// # Errors
    /// If the system refuses for a reason other than lack of space.
    pub fn bury(&self, removed: &mut BTreeSet<String>, record: &Record) -> io::Result<()> {
        let Some(identity::Parts { uuid: None, serial, .. }) = identity::parse(&record.id) else {
            return Ok(());
        };
        if record.stage == Stage::Making || removed.contains(serial) {
            return Ok(());
        }
        let known = self.directory.read(REMOVED, LONGEST_REMOVED)?.unwrap_or_default();
        let mut known: Vec<_> = String::from_utf8_lossy(&known).lines().map(str::to_owned).collect();
        known.push(serial.to_owned());
        known.drain(..known.len().saturating_sub(MOST_REMOVED));
        let text = known.join("\n") + "\n";
        let kept = self.anyhow(|folder| folder.replace(REMOVED, text.as_bytes()));
        match kept {
            // Freeing the space is more important than the most precise answer to a repeated call.
            Err(error) if is_full(&error) => {
                tracing::warn!(pool = %self.path.display(), serial, %error, "cannot remember that a volume was removed");
            }
            kept => kept?,
        }
        removed.insert(serial.to_owned());
        Ok(())
    }

    fn removed(&self) -> io::Result<BTreeSet<String>> {
        let bytes = self.directory.read(REMOVED, LONGEST_REMOVED)?.unwrap_or_default();
        Ok(String::from_utf8_lossy(&bytes)
            .lines()
            .filter(|line| identity::is_serial(line))
            .map(str::to_owned)
            .collect())
    }

    /// Returns the number of syncs so far.
    #[cfg(test)]
    pub fn syncs(&self) -> usize {
        self.directory.syncs()
    }
}

/// Maximum size in bytes of the list of removed volumes.
const LONGEST_REMOVED: u64 = 128 * 1024;

fn image_name(serial: &str, format: Format) -> String {
    format!("{serial}.{}", format.name())
}

fn linked(links: u64) -> String {
    format!("its image has {links} hard links, and so may belong to another volume; remove the others")
}

/// Reports whether an operation failed for lack of space.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
