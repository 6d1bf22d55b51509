//! A pool's folder: one record and one image for each volume. Blocks.
//!
//! ```text
//! <path>/.lock               held while a host half has the pool
//! <path>/.spare              room for records that have to be kept when there is none
//! <path>/<serial>.json       the record; `.json.new` is one that was not finished
//! <path>/<serial>.raw        the image, or .qcow2
//! ```
//!
//! A record is replaced as a whole, synced, before anything follows from it: so whatever a run that was killed left is
//! either a volume as it was, or one that [`Folder::load`] finishes removing. Files of others are left alone.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use super::super::super::disks::Format;
use super::super::hotplug::{qcow2, volume::make_folder};
use super::super::link::Owner;
use super::identity;
use super::record::{Record, Stage};
use crate::sys::{allocation, files};

/// Bytes of the largest record: a name and what else is in it are bounded, but each byte may be escaped.
const LONGEST_RECORD: u64 = 64 * 1024;

/// Bytes that are set aside for records.
const SPARE: u64 = 2 * LONGEST_RECORD;

/// A pool's folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    steps: Steps,
}

/// What a folder holds.
#[derive(Debug, Default)]
pub struct Loaded {
    /// By serial number.
    pub records: BTreeMap<String, Record>,
    /// Serial numbers of volumes whose records cannot be read, and why.
    pub damaged: BTreeMap<String, String>,
}

/// Held while nobody else may use the folder.
#[derive(Debug)]
pub struct Lock {
    _file: Flock<File>,
}

impl Folder {
    /// The folder at `path`.
    #[cfg(not(test))]
    pub fn new(path: PathBuf) -> Self {
        Self { path, steps: Steps::default() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the folder if need be, and takes it for this process.
    ///
    /// # Errors
    /// If it cannot be made, or another process has it.
    pub fn lock(&self) -> io::Result<Lock> {
        make_folder(&self.path)?;
        let path = self.path.join(".lock");
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => {
                self.set_aside();
                Ok(Lock { _file: file })
            }
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                Err(io::Error::other("another guestlet-host uses this folder"))
            }
            Err((_, error)) => Err(error.into()),
        }
    }

    /// Reads all records, and removes what runs before have not finished.
    ///
    /// # Errors
    /// If the folder cannot be read. What is wrong with a single record is told in its place.
    pub fn load(&self) -> io::Result<Loaded> {
        let mut loaded = Loaded::default();
        for entry in std::fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            let Some((serial, ending)) = name.to_str().and_then(|name| name.split_once('.')) else {
                continue;
            };
            if !identity::is_serial(serial) {
                continue;
            }
            match ending {
                "json" => match self.read(serial) {
                    Ok(record) => drop(loaded.records.insert(serial.to_owned(), record)),
                    Err(problem) => drop(loaded.damaged.insert(serial.to_owned(), problem)),
                },
                "json.new" => files::remove(&self.path.join(&name)),
                _ => {}
            }
        }
        let unfinished: Vec<_> = loaded
            .records
            .iter()
            .filter(|(_, record)| record.stage != Stage::Ready)
            .map(|(serial, _)| serial.clone())
            .collect();
        for serial in unfinished {
            match self.clear(&serial) {
                Ok(()) => drop(loaded.records.remove(&serial)),
                Err(error) => {
                    tracing::warn!(pool = %self.path.display(), serial, %error, "cannot remove what is left of a volume");
                }
            }
        }
        Ok(loaded)
    }

    fn read(&self, serial: &str) -> Result<Record, String> {
        let path = self.record(serial);
        let length = path.metadata().map_err(|error| error.to_string())?.len();
        if length > LONGEST_RECORD {
            return Err(format!("it has {length} bytes"));
        }
        let bytes = files::read(&path).ok_or("it cannot be read")?;
        let record = Record::decode(&bytes)?;
        match identity::parse(&record.id) {
            Some((_, found)) if found == serial => Ok(record),
            _ => Err(format!("it is of another volume, {:?}", record.id)),
        }
    }

    fn record(&self, serial: &str) -> PathBuf {
        self.path.join(format!("{serial}.json"))
    }

    /// Where the image of a volume is.
    pub fn image(&self, serial: &str, format: Format) -> PathBuf {
        self.path.join(format!("{serial}.{}", format.name()))
    }

    /// Keeps a record.
    ///
    /// # Errors
    /// If the system refuses: then what was kept before is kept.
    pub fn keep(&self, serial: &str, record: &Record) -> io::Result<()> {
        let bytes = record.encode()?;
        self.steps.step(|| drop(File::create(self.path.join(format!("{serial}.json.new")))))?;
        files::replace_synced(&self.record(serial), &bytes)?;
        self.steps.step(|| {})
    }

    /// As [`Folder::keep`], also where the file system is full: of a volume that is taken away something has to be noted
    /// before its room is free again.
    ///
    /// # Errors
    /// If the system refuses: then what was kept before is kept.
    pub fn keep_anyhow(&self, serial: &str, record: &Record) -> io::Result<()> {
        let kept = self.keep(serial, record);
        if !kept.as_ref().is_err_and(is_full) {
            return kept;
        }
        files::remove(&self.spare());
        let kept = self.keep(serial, record);
        self.set_aside();
        kept
    }

    fn spare(&self) -> PathBuf {
        self.path.join(".spare")
    }

    /// Sets room aside for [`Folder::keep_anyhow`]. A full file system has it later.
    fn set_aside(&self) {
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(self.spare());
        if let Err(error) = file.and_then(|file| allocation::reserve(&file, 0, SPARE)) {
            tracing::warn!(pool = %self.path.display(), %error, "cannot set room aside for records");
        }
    }

    /// Makes the image of a record that is kept, and room for all of it if it is to be full.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn make(&self, serial: &str, record: &Record) -> io::Result<()> {
        let path = self.image(serial, record.format());
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
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
        file.sync_all()?;
        File::open(&self.path)?.sync_all()?;
        self.steps.step(|| {})
    }

    /// Reserves room for a volume that is to have `size` bytes, and is in full. After an error nothing more is taken.
    ///
    /// # Errors
    /// If there is no room.
    pub fn reserve(&self, serial: &str, record: &Record, size: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(self.image(serial, record.format()))?;
        // Of a qcow2 image the metadata comes first, and what it says of its clusters grows with it.
        let margin = match record.format() {
            Format::Raw => 0,
            Format::Qcow2 => qcow2::empty(size).length,
        };
        let reserved = allocation::reserve(&file, record.size + margin, size - record.size);
        if reserved.is_err() && record.format() == Format::Raw {
            // A qcow2 image may be growing just now; QEMU will use what was reserved of it.
            allocation::give_back(&file)?;
        }
        reserved
    }

    /// Makes the image of a volume that no VM has longer, where that is all there is to do.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn lengthen(&self, serial: &str, record: &Record) -> io::Result<()> {
        if record.format() == Format::Raw {
            let file = OpenOptions::new().write(true).open(self.image(serial, Format::Raw))?;
            if file.metadata()?.len() < record.size {
                file.set_len(record.size)?;
                file.sync_all()?;
            }
        }
        Ok(())
    }

    /// Gives the image to the user that QEMU runs as.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn give(&self, serial: &str, record: &Record, owner: Owner) -> io::Result<()> {
        let file = File::open(self.image(serial, record.format()))?;
        let found = file.metadata()?;
        if (found.uid(), found.gid()) == (owner.uid, owner.gid) {
            return Ok(());
        }
        fchown(&file, Some(owner.uid), Some(owner.gid))
    }

    /// Why the image cannot be used, if it cannot.
    pub fn problem(&self, serial: &str, record: &Record) -> Option<String> {
        match self.image(serial, record.format()).metadata() {
            Ok(found) if found.is_file() => None,
            Ok(_) => Some("its image is no regular file".to_owned()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Some("its image is gone".to_owned()),
            Err(error) => Some(format!("its image cannot be looked at: {error}")),
        }
    }

    /// Removes the image, and then the record, whatever is there of them.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn clear(&self, serial: &str) -> io::Result<()> {
        for format in [Format::Raw, Format::Qcow2] {
            self.steps.step(|| {})?;
            files::remove_synced(&self.image(serial, format))?;
        }
        self.steps.step(|| {})?;
        files::remove_synced(&self.record(serial))?;
        self.steps.step(|| {})
    }
}

/// Whether there was no room for it.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The moments at which a test kills the program.
#[derive(Debug)]
#[cfg_attr(not(test), derive(Default))]
struct Steps {
    /// So many are done before.
    #[cfg(test)]
    left: std::sync::atomic::AtomicUsize,
}

impl Steps {
    #[cfg(not(test))]
    #[allow(clippy::unused_self, clippy::unnecessary_wraps, reason = "only a test's program is killed")]
    fn step(&self, _: impl FnOnce()) -> io::Result<()> {
        Ok(())
    }

    #[cfg(test)]
    fn step(&self, last: impl FnOnce()) -> io::Result<()> {
        use std::sync::atomic::Ordering::SeqCst;
        if self.left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Ok(());
        }
        last();
        Err(io::Error::other("killed"))
    }
}

#[cfg(test)]
impl Folder {
    /// One whose program is killed after so many steps.
    pub fn killed_after(path: PathBuf, steps: usize) -> Self {
        Self { path, steps: Steps { left: steps.into() } }
    }
}
