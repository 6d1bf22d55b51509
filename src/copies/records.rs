//! Records of the temporary files of copies that are under way or were interrupted: one small file per copy,
//! named by its identifier.
//!
//! An interrupted copy is remembered for a day ([`KEPT`]). Then its temporary file is removed if it is still
//! the one that was written: the same inode under the same name, not locked by anybody.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;

use super::aside;
use crate::sys::beneath::{self, Facts, Kind};
use crate::sys::blocking;

/// Time for which the remains of an interrupted copy are kept.
pub const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// Limit of the copies that are remembered; the oldest beyond it are forgotten.
pub const MAX: usize = 64;
/// Suffix of a marker's name.
const MARKER: &[u8] = b".made";
/// Limit of the bytes of a record.
const MAX_SIZE: u64 = 8192;

/// Records in a directory, or none at all; clones share the directory.
#[derive(Debug, Clone, Default)]
pub struct Records(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    folder: PathBuf,
    news: Notify,
}

/// File that a copy has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// Identifier of the copy.
    pub id: String,
    /// Path of the file.
    pub path: PathBuf,
    /// Size of the file in bytes.
    pub size: u64,
    /// Time of the last write.
    pub since: SystemTime,
}

/// Record of one copy.
#[derive(Debug, Default)]
pub struct Record {
    place: Option<(Records, PathBuf)>,
    file: Option<File>,
}

/// Temporary file, as it is stored in a record.
#[derive(Debug, PartialEq, Eq)]
struct Noted {
    device: u64,
    inode: u64,
    path: PathBuf,
}

impl Noted {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = format!("{} {} ", self.device, self.inode).into_bytes();
        bytes.extend(self.path.as_os_str().as_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut parts = bytes.splitn(3, |byte| *byte == b' ');
        let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse().ok();
        let (device, inode) = (number()?, number()?);
        let path = parts.next().filter(|path| path.starts_with(b"/"))?;
        Some(Self { device, inode, path: OsStr::from_bytes(path).into() })
    }

    /// Finds the file by its record; `None` if it no longer exists.
    fn find(&self) -> Option<(OwnedFd, &OsStr, Facts)> {
        let name = self.path.file_name()?;
        let directory = beneath::find(self.path.parent()?).ok()?;
        let facts = beneath::look(&directory, name).ok()??;
        let is_it = facts.kind == Kind::Regular
            && (facts.device, facts.inode) == (self.device, self.inode)
            && aside::is_name(name.as_bytes());
        is_it.then_some((directory, name, facts))
    }

    fn remove(&self) {
        let Some((directory, name, facts)) = self.find() else { return };
        let Ok(file) = beneath::edit(&directory, name) else { return };
        // A locked file is being written.
        let is_it = beneath::facts(&file).is_ok_and(|opened| opened.inode == facts.inode);
        if is_it && file.try_lock().is_ok() && beneath::remove(&directory, name).is_ok() {
            tracing::info!("removed {}, which was left by an interrupted copy", self.path.display());
        }
    }
}

impl Records {
    /// Returns the records in a directory, which is created with the first of them.
    pub fn at(folder: PathBuf) -> Self {
        Self(Some(Arc::new(Inner { folder, news: Notify::new() })))
    }

    /// Returns the record of a copy, and whether there already is one because the copy was interrupted.
    pub fn of(&self, id: &str) -> (Record, bool) {
        let Some(inner) = &self.0 else { return (Record::default(), false) };
        let path = inner.folder.join(id);
        let is_there = [&path, &marker(&path)].iter().any(|path| path.symlink_metadata().is_ok());
        (Record { place: Some((self.clone(), path)), file: None }, is_there)
    }

    fn all(&self) -> Vec<(SystemTime, PathBuf)> {
        let Some(inner) = &self.0 else { return Vec::new() };
        let Ok(entries) = std::fs::read_dir(&inner.folder) else { return Vec::new() };
        let mut all = Vec::new();
        let is_record = |name: &[u8]| aside::is_id(name.strip_suffix(MARKER).unwrap_or(name));
        for entry in entries.flatten().filter(|entry| is_record(entry.file_name().as_encoded_bytes())) {
            if let Ok(since) = entry.metadata().and_then(|found| found.modified()) {
                all.push((since, entry.path()));
            }
        }
        all.sort();
        all
    }

    /// Lists the files of copies that are under way or were interrupted.
    pub fn list(&self) -> Vec<Left> {
        let all = self.all().into_iter().take(MAX);
        let left = all.filter_map(|(since, record)| {
            let noted = read(&record)?;
            let (.., facts) = noted.find()?;
            let id = record.file_name()?.to_string_lossy().into_owned();
            Some(Left { id, path: noted.path, size: facts.size, since })
        });
        left.collect()
    }

    /// Removes records that are too old, and the oldest beyond the limit. Returns the time until the next one is
    /// due, if there is one.
    pub fn purge(&self, now: SystemTime) -> Option<Duration> {
        let all = self.all();
        let too_many = all.len().saturating_sub(MAX);
        let mut next = None;
        for (number, (since, record)) in all.into_iter().enumerate() {
            // A record from the future means that the clock was set back.
            let age = now.duration_since(since).unwrap_or_default();
            if number >= too_many && age < KEPT {
                next = next.or(Some(KEPT.saturating_sub(age)));
                continue;
            }
            if let Some(noted) = read(&record) {
                noted.remove();
            }
            drop(std::fs::remove_file(&record));
        }
        next
    }

    /// Removes old records, for ever. Sleeps while there are none.
    pub async fn care(&self) {
        let Some(inner) = &self.0 else { return std::future::pending().await };
        loop {
            let this = self.clone();
            let next = blocking::run(move || this.purge(SystemTime::now())).await;
            match next {
                Some(next) => tokio::time::sleep(next + Duration::from_secs(1)).await,
                None => inner.news.notified().await,
            }
        }
    }
}

/// Returns the path of the marker beside a record: the copy has created a directory.
fn marker(record: &Path) -> PathBuf {
    record.with_extension("made")
}

fn read(record: &Path) -> Option<Noted> {
    let mut bytes = Vec::new();
    File::open(record).ok()?.take(MAX_SIZE).read_to_end(&mut bytes).ok()?;
    Noted::parse(&bytes)
}

impl Record {
    /// Records the file that is written from now on, by its directory and name, if that is possible. With
    /// `on_disk` the record has reached the disk when this returns.
    pub fn note(&mut self, directory: &OwnedFd, name: &OsStr, facts: &Facts, on_disk: bool) {
        if let Err(error) = self.try_note(directory, name, facts, on_disk) {
            tracing::warn!("cannot keep a record of a copy: {error}");
        }
    }

    fn try_note(
        &mut self,
        directory: &OwnedFd,
        name: &OsStr,
        facts: &Facts,
        on_disk: bool,
    ) -> io::Result<()> {
        let Some((records, path)) = &self.place else { return Ok(()) };
        if self.file.is_none() {
            if let Some(folder) = path.parent() {
                std::fs::DirBuilder::new().recursive(true).create(folder)?;
            }
            self.file = Some(File::options().create(true).truncate(false).write(true).open(path)?);
            if let Some(inner) = &records.0 {
                inner.news.notify_one();
            }
            if records.all().len() > MAX {
                let _ = records.purge(SystemTime::now());
            }
        }
        let Some(file) = &self.file else { return Ok(()) };
        let place = std::fs::read_link(beneath::itself(directory))?.join(name);
        let bytes = Noted { device: facts.device, inode: facts.inode, path: place }.bytes();
        file.write_all_at(&bytes, 0)?;
        file.set_len(bytes.len() as u64)?;
        if on_disk { file.sync_all() } else { Ok(()) }
    }

    /// Records that the named directory did not exist and was created. If the copy is continued, its target is
    /// this directory, and not a new entry in it.
    pub fn note_directory(&self) {
        let Some((records, path)) = &self.place else { return };
        let folder = path.parent().unwrap_or(path);
        let made = std::fs::DirBuilder::new().recursive(true).create(folder);
        if let Err(error) = made.and_then(|()| File::create(marker(path)).map(drop)) {
            tracing::warn!("cannot keep a record of a copy: {error}");
        }
        if let Some(inner) = &records.0 {
            inner.news.notify_one();
        }
    }

    /// Returns whether the copy has created the named directory.
    pub fn has_made_directory(&self) -> bool {
        self.place.as_ref().is_some_and(|(_, path)| marker(path).symlink_metadata().is_ok())
    }

    /// Removes the record of a completed copy.
    pub fn remove(&mut self) {
        self.file = None;
        if let Some((_, path)) = &self.place {
            drop(std::fs::remove_file(path));
            drop(std::fs::remove_file(marker(path)));
        }
    }
}

/// Returns the records of a user who copies to this machine.
pub fn of_user(state: Option<std::ffi::OsString>, home: Option<std::ffi::OsString>) -> Records {
    let folder = |path: std::ffi::OsString| Some(PathBuf::from(path)).filter(|path| path.is_absolute());
    let state = state.and_then(folder).or_else(|| Some(home.and_then(folder)?.join(".local/state")));
    state.map(|state| Records::at(state.join("guestlet/copies"))).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: &str = "0123456789abcdef";

    fn left(folder: &Path, name: &str) -> (Records, Record) {
        let records = Records::at(folder.join("records"));
        let (mut record, was_there) = records.of(ID);
        assert!(!was_there);
        let directory = beneath::find(folder).unwrap();
        let name = OsStr::new(name);
        drop(beneath::create(&directory, name).unwrap());
        let facts = beneath::look(&directory, name).unwrap().unwrap();
        record.note(&directory, name, &facts, false);
        (records, record)
    }

    #[test]
    fn what_was_interrupted_is_removed_after_a_day() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        let name = format!(".file.guestlet-{ID}");
        let (records, _) = left(&folder, &name);
        assert_eq!(records.list()[0].path, folder.join(&name));
        assert!(records.of(ID).1);
        let now = SystemTime::now();
        assert!(records.purge(now).is_some() && folder.join(&name).exists());
        assert_eq!(records.purge(now + KEPT + KEPT), None);
        assert!(!folder.join(&name).exists() && !records.of(ID).1);
    }

    #[test]
    fn another_file_of_that_name_and_one_that_is_being_written_stay() {
        let folder = tempfile::tempdir().unwrap();
        let name = format!(".file.guestlet-{ID}");
        let (records, mut record) = left(folder.path(), &name);
        let path = folder.path().join(&name);
        let held = File::options().write(true).open(&path).unwrap();
        held.try_lock().unwrap();
        records.purge(SystemTime::now() + KEPT + KEPT);
        assert!(path.exists());
        drop(held);
        record.remove();
        std::fs::rename(&path, folder.path().join("kept")).unwrap();
        let (records, _) = left(folder.path(), &name);
        std::fs::rename(folder.path().join("kept"), &path).unwrap();
        records.purge(SystemTime::now() + KEPT + KEPT);
        assert!(path.exists());
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_a_record(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Some(noted) = Noted::parse(&bytes) {
                prop_assert!(noted.path.is_absolute());
                prop_assert_eq!(Noted::parse(&noted.bytes()), Some(noted));
            }
        }
    }
}
