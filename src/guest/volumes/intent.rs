//! What was about to be made on which disk: written down before it is begun, gone when it is done.

use std::io;

use serde::{Deserialize, Serialize};

use crate::sys::files;
use crate::sys::root::Root;

/// Where notes are kept.
pub const FOLDER: &str = "/var/lib/guestlet/formats";
/// Characters of what a disk is called, at most.
pub const LONGEST: usize = 100;
/// Bytes of a note, at most.
const MOST: u64 = 4096;

/// What was about to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// What the disk is called: its serial number.
    pub identity: String,
    /// The size of the device in bytes.
    pub bytes: u64,
    /// The kind of file system, in the words of blkid(8).
    pub kind: String,
    /// Which one it was to be.
    pub uuid: String,
}

impl Intent {
    /// The note about the disk called `identity`, if there is one that can be read.
    ///
    /// # Errors
    /// As open(2) and read(2) give them.
    pub fn read(root: &Root, identity: &str) -> io::Result<Option<Self>> {
        match root.read(&path(identity)) {
            Ok(bytes) => Ok(Self::parse(&bytes).filter(|intent| intent.identity == identity)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// Writes it down; it is on the disk before this returns.
    ///
    /// # Errors
    /// As open(2), write(2) and fsync(2) give them.
    pub fn write(&self, root: &Root) -> io::Result<()> {
        std::fs::create_dir_all(root.path(FOLDER))?;
        let text = serde_json::to_vec(self)?;
        files::replace_synced(&root.path(&path(&self.identity)), &text)
    }
}

/// Removes the note about a disk; that it is gone is on the disk before this returns.
///
/// # Errors
/// As unlink(2) and fsync(2) give them.
pub fn remove(root: &Root, identity: &str) -> io::Result<()> {
    files::remove_synced(&root.path(&path(identity)))
}

/// Whether making the file system `uuid` was begun and did not come to its end.
///
/// # Errors
/// As opendir(3) and read(2) give them.
pub fn is_unfinished(root: &Root, uuid: &str) -> io::Result<bool> {
    let entries = match std::fs::read_dir(root.path(FOLDER)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let small = entry.metadata().is_ok_and(|file| file.is_file() && file.len() <= MOST);
        let found = small.then(|| files::read(&entry.path())).flatten();
        if found.and_then(|bytes| Intent::parse(&bytes)).is_some_and(|intent| intent.uuid == uuid) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Every name makes a file name of its own.
fn path(identity: &str) -> String {
    let mut name = format!("{FOLDER}/");
    for byte in identity.bytes() {
        let _ = std::fmt::Write::write_fmt(&mut name, format_args!("{byte:02x}"));
    }
    name + ".json"
}
