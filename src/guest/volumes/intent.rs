//! Notes about file systems that are about to be made: written before the format begins, removed when it is done.

use std::io;

use serde::{Deserialize, Serialize};

use crate::sys::files;
use crate::sys::root::Root;

/// Directory of the notes.
pub const FOLDER: &str = "/var/lib/guestlet/formats";
/// Limit on the bytes of a disk's identity.
pub const LONGEST: usize = 100;
/// Limit on the bytes of a note.
const MOST: u64 = 4096;

/// File system that was about to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// Identity of the disk, such as its serial number.
    pub identity: String,
    /// Size of the device in bytes.
    pub bytes: u64,
    /// Kind of file system, as named by blkid(8).
    pub kind: String,
    /// UUID that the file system was to get.
    pub uuid: String,
}

impl Intent {
    /// Reads the note about the disk with this `identity`. Returns none if it does not exist or is unreadable.
    ///
    /// # Errors
    /// The errors of open(2) and read(2).
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

    /// Writes the note; when this returns, it is on the disk.
    ///
    /// # Errors
    /// The errors of open(2), write(2) and fsync(2).
    pub fn write(&self, root: &Root) -> io::Result<()> {
        std::fs::create_dir_all(root.path(FOLDER))?;
        let text = serde_json::to_vec(self)?;
        files::replace_synced(&root.path(&path(&self.identity)), &text)
    }
}

/// Removes the note about a disk; when this returns, the removal is on the disk.
///
/// # Errors
/// The errors of unlink(2) and fsync(2).
pub fn remove(root: &Root, identity: &str) -> io::Result<()> {
    files::remove_synced(&root.path(&path(identity)))
}

/// Returns whether the file system `uuid` was begun and not completed.
///
/// # Errors
/// The errors of opendir(3) and read(2).
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

/// Returns a file name that is different for every identity.
fn path(identity: &str) -> String {
    let mut name = format!("{FOLDER}/");
    for byte in identity.bytes() {
        let _ = std::fmt::Write::write_fmt(&mut name, format_args!("{byte:02x}"));
    }
    name + ".json"
}
