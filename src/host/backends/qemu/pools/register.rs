//! Register of the pools by path, stored beside the keys. It keeps a directory that is not the pool, such as a
//! mount point whose file system is not mounted, from being taken for a new pool. Blocks.
//!
//! ```text
//! <trust.state-dir>/pools.json    {"version":1,"readers":1,"pools":{"/srv/fast":"0f1e2d3c4b5a69788796a5b4c3d2e1f0"}}
//! ```
//!
//! A path gets its entry when its directory becomes a pool, and keeps it even if the settings change: only an
//! administrator removes it. The file is read again for each use, so that manual changes take effect at once.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::identity;
use crate::sys::directory::Directory;

/// Name of the file.
const FILE: &str = "pools.json";
/// Version of the format that this program writes, and the newest one that it can read.
const VERSION: u32 = 1;
/// Maximum size of the file in bytes.
const LONGEST: u64 = 1 << 20;

/// Handle to the stored register.
#[derive(Debug)]
pub struct Register {
    folder: PathBuf,
    /// Held while the file is being changed, because each pool has its own worker.
    turn: Mutex<()>,
}

/// Contents of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    version: u32,
    /// Oldest format version whose programs may use it.
    readers: u32,
    /// UUIDs of the pools by path.
    pools: BTreeMap<PathBuf, String>,
}

/// Pool that was at a path before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// UUID of the pool.
    pub uuid: String,
    /// Advice for people, in case the directory is not the pool.
    pub advice: String,
}

impl Register {
    /// Creates a register in that directory, which must exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder, turn: Mutex::default() }
    }

    /// Returns the pool that was at this path before, if there was one.
    ///
    /// # Errors
    /// If the file cannot be read, so that the pool is unknown.
    pub fn expected(&self, path: &Path) -> io::Result<Option<Expected>> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let uuid = self.read()?.pools.remove(path);
        let advice = || {
            format!(
                "mount its file system there; or, to begin another pool at this path, remove the line of {} from {}",
                path.display(),
                self.folder.join(FILE).display()
            )
        };
        Ok(uuid.map(|uuid| Expected { uuid, advice: advice() }))
    }

    /// Records durably that this pool is at this path.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn remember(&self, path: &Path, uuid: &str) -> io::Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut kept = self.read()?;
        if kept.pools.get(path).is_some_and(|known| known == uuid) {
            return Ok(());
        }
        kept.pools.insert(path.to_owned(), uuid.to_owned());
        let mut bytes = serde_json::to_vec_pretty(&kept)?;
        bytes.push(b'\n');
        let new = format!("{FILE}.new");
        let written = Directory::open(&self.folder).and_then(|directory| {
            directory.prepare(&new, &bytes)?;
            directory.rename(&new, FILE)?;
            directory.sync()
        });
        written.map_err(|error| self.wrong("write", &error))
    }

    fn read(&self) -> io::Result<Kept> {
        let found = Directory::open(&self.folder).and_then(|directory| directory.read(FILE, LONGEST));
        let Some(bytes) = found.map_err(|error| self.wrong("read", &error))? else {
            return Ok(Kept { version: VERSION, readers: VERSION, pools: BTreeMap::new() });
        };
        let kept: Kept = serde_json::from_slice(&bytes).map_err(|error| self.wrong("use", &error))?;
        if kept.readers > VERSION {
            let words = format!(
                "it needs a program that supports version {}; run a newer guestlet-host",
                kept.readers
            );
            return Err(self.wrong("use", &words));
        }
        if let Some(uuid) = kept.pools.values().find(|uuid| !identity::is_uuid(uuid)) {
            let words = format!("{uuid:?} is not a UUID of 32 hexadecimal digits");
            return Err(self.wrong("use", &words));
        }
        Ok(kept)
    }

    /// Returns the error for a register from which the pool of a path cannot be determined.
    fn wrong(&self, what: &str, problem: &dyn std::fmt::Display) -> io::Error {
        let file = self.folder.join(FILE);
        io::Error::other(format!("cannot {what} {}, which lists the known pools: {problem}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::disallowed_methods, reason = "a test lays out what is there")]

    use super::*;

    const ONE: &str = "0f1e2d3c4b5a69788796a5b4c3d2e1f0";
    const OTHER: &str = "00000000000000000000000000000001";

    #[test]
    fn a_path_keeps_its_pool_until_its_line_is_taken_out() {
        let folder = tempfile::tempdir().unwrap();
        let (fast, slow) = (Path::new("/srv/fast"), Path::new("/srv/slow"));
        let register = Register::new(folder.path().to_owned());
        assert_eq!(register.expected(fast).unwrap(), None);
        register.remember(fast, ONE).unwrap();
        register.remember(slow, OTHER).unwrap();
        let again = Register::new(folder.path().to_owned());
        for (path, uuid) in [(fast, ONE), (slow, OTHER)] {
            let expected = again.expected(path).unwrap().unwrap();
            assert_eq!(expected.uuid, uuid);
            assert!(expected.advice.contains(path.to_str().unwrap()), "{}", expected.advice);
        }
        let file = folder.path().join(FILE);
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.replace(&format!("    \"/srv/fast\": \"{ONE}\",\n"), "")).unwrap();
        assert_eq!(register.expected(fast).unwrap(), None);
        assert_eq!(register.expected(slow).unwrap().unwrap().uuid, OTHER);
    }

    #[test]
    fn what_cannot_be_read_is_no_empty_register() {
        let folder = tempfile::tempdir().unwrap();
        let register = Register::new(folder.path().to_owned());
        for (text, words) in [
            ("{", "EOF"),
            (r#"{"version":2,"readers":2,"pools":{}}"#, "that supports version 2"),
            (r#"{"version":1,"readers":1,"pools":{"/a":"x"}}"#, "is not a UUID"),
        ] {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            for outcome in
                [register.expected(Path::new("/a")).map(drop), register.remember(Path::new("/a"), ONE)]
            {
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains(words) && error.contains(FILE), "{error}");
            }
            assert_eq!(std::fs::read_to_string(folder.path().join(FILE)).unwrap(), text);
        }
        let nowhere = Register::new(folder.path().join("nowhere"));
        assert!(
            nowhere.expected(Path::new("/a")).is_err() && nowhere.remember(Path::new("/a"), ONE).is_err()
        );
    }
}
