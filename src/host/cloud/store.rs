//! Directory of the records, with one file for each load balancer. Blocks.
//!
//! ```text
//! <state-dir>/.lock         held while a host half has the directory
//! <state-dir>/<id>.json     a record; see `record`
//! <state-dir>/<id>.json.new an unfinished record
//! <state-dir>/.forwarding   present while the kernel may have rules of this program: a line for each address
//!                           that an interface may have from it, with the interface and the address
//! ```
//!
//! A record is replaced as a whole and synced before anybody is notified of the result. So a run that is killed
//! leaves each load balancer either as it was or as it was to become. No address is in two records: the record
//! that gains an address is written after the record that lost it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

use super::forward::plan::Given;
use super::record::{Damaged, Record};
use crate::sys::directory::Directory;

/// Largest record in bytes. Its contents are bounded, but each byte may be escaped.
const LONGEST_RECORD: u64 = 1 << 20;
const LOCK: &str = ".lock";
const MARK: &str = ".forwarding";
/// Largest note in bytes.
const LONGEST_MARK: u64 = 1 << 20;
const SUFFIX: &str = ".json";
const NEW: &str = ".json.new";

/// Directory of the records, locked by this process.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    directory: Directory,
    _lock: Flock<File>,
}

/// Contents of the directory.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Records that this program can use.
    pub records: Vec<Record>,
    /// Records that cannot be used, by the identifiers in their file names.
    pub damaged: BTreeMap<String, Damaged>,
}

impl Store {
    /// Opens and locks the directory, and creates it if necessary.
    ///
    /// # Errors
    /// If it cannot be created, another process has locked it, or others may write to it.
    pub fn open(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;

        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let directory = Directory::open(path)?;
        if let Some(problem) = directory.distrust()? {
            return Err(io::Error::other(problem));
        }
        let file = directory.file_or_new(LOCK)?;
        let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => lock,
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                return Err(io::Error::other("another guestlet-host uses this directory"));
            }
            Err((_, error)) => return Err(error.into()),
        };
        Ok(Self { path: path.to_owned(), directory, _lock: lock })
    }

    /// Returns the path of a record, for messages to people.
    pub fn file(&self, id: &str) -> PathBuf {
        self.path.join(format!("{id}{SUFFIX}"))
    }

    /// Reads all records, and removes unfinished ones.
    ///
    /// # Errors
    /// If the directory cannot be listed.
    pub fn load(&self) -> io::Result<Loaded> {
        let mut loaded = Loaded::default();
        for name in self.directory.names()? {
            let Some(name) = name.to_str() else { continue };
            if name.ends_with(NEW) {
                self.directory.remove(name)?;
                continue;
            }
            let Some(id) = name.strip_suffix(SUFFIX) else { continue };
            let found = match self.directory.read(name, LONGEST_RECORD) {
                Ok(Some(bytes)) => Record::decode(id, &bytes),
                Ok(None) => continue,
                Err(error) => Err(Damaged { problem: error.to_string(), addresses: None }),
            };
            match found {
                Ok(record) => loaded.records.push(record),
                Err(damaged) => drop(loaded.damaged.insert(id.to_owned(), damaged)),
            }
        }
        Ok(loaded)
    }

    /// Writes a record durably.
    ///
    /// # Errors
    /// If the system refuses. Either the earlier record or this one is then on the disk.
    pub fn keep(&self, record: &Record) -> io::Result<()> {
        let (name, new) = (format!("{}{SUFFIX}", record.id), format!("{}{NEW}", record.id));
        self.directory.prepare(&new, &record.encode()?)?;
        self.directory.rename(&new, &name)?;
        self.directory.sync()
    }

    /// Removes a record.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        self.directory.remove(&format!("{id}{SUFFIX}"))?;
        Ok(())
    }

    /// Notes that the kernel may have rules of this program, and which addresses interfaces may have from it. `None`
    /// removes the note.
    ///
    /// # Errors
    /// If the system refuses. The earlier note then remains.
    pub fn mark(&self, forwards: Option<&Given>) -> io::Result<()> {
        if let Some(given) = forwards {
            let mut text = String::new();
            for (name, addresses) in given {
                for address in addresses {
                    // Writing to a String never fails.
                    let _ = writeln!(text, "{name} {address}");
                }
            }
            let new = format!("{MARK}.new");
            self.directory.prepare(&new, text.as_bytes())?;
            self.directory.rename(&new, MARK)?;
        } else {
            self.directory.remove(MARK)?;
        }
        self.directory.sync()
    }

    /// Reads the note that `mark` wrote, if there is one.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn marked(&self) -> io::Result<Option<Given>> {
        let Some(bytes) = self.directory.read(MARK, LONGEST_MARK)? else { return Ok(None) };
        let text = String::from_utf8_lossy(&bytes);
        let mut given = Given::new();
        // An unreadable line names no address that could be removed.
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        for (name, address) in lines.filter_map(|(name, text)| Some((name, text.parse().ok()?))) {
            given.entry(name.to_owned()).or_default().insert(address);
        }
        Ok(Some(given))
    }
}

#[cfg(test)]
mod tests {
    use super::super::wanted::Service;
    use super::*;

    fn record(id: &str) -> Record {
        let service = Service { namespace: "a".into(), name: "b".into(), uid: id.into() };
        Record::new(id.into(), "dev".into(), service)
    }

    #[test]
    fn what_is_kept_is_found_and_what_was_not_finished_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("balancers");
        let store = Store::open(&path).unwrap();
        store.keep(&record("one")).unwrap();
        store.keep(&record("two")).unwrap();
        store.remove("two").unwrap();
        store.directory.prepare("three.json.new", b"half of i").unwrap();
        store.directory.prepare("four.json", b"half of i").unwrap();
        let other = Store::open(&path).unwrap_err().to_string();
        assert!(other.contains("another guestlet-host"), "{other}");
        let loaded = store.load().unwrap();
        assert_eq!(loaded.records, [record("one")]);
        assert_eq!(loaded.damaged.keys().collect::<Vec<_>>(), ["four"]);
        assert!(!path.join("three.json.new").exists() && path.join("four.json").exists());
        assert_eq!(store.marked().unwrap(), None);
        let addresses = ["192.0.2.1", "2001:db8::1"].map(|text| text.parse().unwrap());
        for given in [Given::new(), [("eth0".to_owned(), addresses.into())].into()] {
            store.mark(Some(&given)).unwrap();
            assert_eq!(store.marked().unwrap(), Some(given));
        }
        store.mark(None).unwrap();
        assert_eq!(store.marked().unwrap(), None);
    }
}
