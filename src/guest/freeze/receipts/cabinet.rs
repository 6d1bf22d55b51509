//! Directory where receipts are kept as `<seconds since 1970>-<id>.json`, so that sorting by name sorts by time. A
//! user with root in the guest can change a receipt, but its signature is then invalid.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::receipt::{MOST_BYTES, is_id};
use crate::sys::files;

/// Limit on the number of receipts that are kept.
pub const MOST: usize = 1000;
/// Time for which they are kept.
pub const KEPT: Duration = Duration::from_secs(90 * 24 * 60 * 60);
/// Limit on the directory entries that are read, as other users may have put files there.
const MOST_ENTRIES: usize = 16 * MOST;
/// File name extension of a receipt.
const END: &str = ".json";

/// Receipt that is kept.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Entry {
    /// Time when it was filed, in seconds since 1970.
    pub filed: u64,
    /// ID of the receipt.
    pub id: String,
}

impl Entry {
    fn named(name: &str) -> Option<Self> {
        let (filed, id) = name.strip_suffix(END)?.split_once('-')?;
        let is_number = filed.len() == 10 && filed.bytes().all(|byte| byte.is_ascii_digit());
        (is_number && is_id(id))
            .then(|| filed.parse().ok().map(|filed| Self { filed, id: id.to_owned() }))
            .flatten()
    }

    fn path(&self, directory: &Path) -> PathBuf {
        directory.join(format!("{:010}-{}{END}", self.filed, self.id))
    }
}

/// Creates the directory, for root alone, if it is missing.
///
/// # Errors
/// The errors of mkdir(2).
pub fn make(directory: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Lists the receipts, oldest first. If the directory is missing, the list is empty.
///
/// # Errors
/// If the directory cannot be read.
pub fn list(directory: &Path) -> io::Result<Vec<Entry>> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let names = entries.take(MOST_ENTRIES).flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut found: Vec<_> = names.filter_map(|name| Entry::named(&name)).collect();
    found.sort_unstable();
    Ok(found)
}

/// Reads the bytes of an entry. Returns none if it has disappeared. Of a file that is too large, one byte more
/// than a receipt may have is returned.
///
/// # Errors
/// If the file cannot be read.
pub fn read(directory: &Path, entry: &Entry) -> io::Result<Option<Vec<u8>>> {
    read_file(&entry.path(directory))
}

/// Reads any file with the same limit.
///
/// # Errors
/// If the file cannot be read.
pub fn read_file(path: &Path) -> io::Result<Option<Vec<u8>>> {
    use std::io::Read as _;

    let most = MOST_BYTES as u64 + 1;
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Files an envelope. When this returns, it is on the disk.
///
/// # Errors
/// The errors of mkdir(2), open(2), write(2), fsync(2) and rename(2).
pub fn file(directory: &Path, id: &str, envelope: &str, now: SystemTime) -> io::Result<()> {
    make(directory)?;
    // A run that was killed before it could remove the receipt from the tray may have filed it already.
    let before = list(directory)?.into_iter().find(|entry| entry.id == id);
    let entry = before.unwrap_or_else(|| Entry { filed: seconds(now), id: id.to_owned() });
    files::replace_synced(&entry.path(directory), envelope.as_bytes())
}

/// Removes receipts that are too old, and the oldest of too many.
///
/// # Errors
/// If the directory cannot be read.
pub fn prune(directory: &Path, now: SystemTime) -> io::Result<()> {
    let entries = list(directory)?;
    let oldest = seconds(now).saturating_sub(KEPT.as_secs());
    let too_many = entries.len().saturating_sub(MOST);
    for (place, entry) in entries.iter().enumerate() {
        if place < too_many || entry.filed < oldest {
            files::remove(&entry.path(directory));
        }
    }
    Ok(())
}

/// Returns the time as used in file names.
pub fn seconds(time: SystemTime) -> u64 {
    // As many digits as a name has room for.
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs().min(9_999_999_999)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    fn id(number: usize) -> String {
        format!("{number:032x}")
    }

    #[test]
    fn what_is_filed_is_listed_in_the_order_of_time() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("a/receipts");
        assert_eq!(list(&directory).unwrap(), []);
        let now = SystemTime::now();
        for (number, age) in [(1, 5), (2, 10), (3, 0)] {
            file(&directory, &id(number), "text", now - Duration::from_secs(age)).unwrap();
        }
        // A receipt that is filed again stays one entry.
        file(&directory, &id(2), "again", now).unwrap();
        for other in ["x", "1-2.json", ".new", "0000000001-zz.json"] {
            std::fs::write(directory.join(other), "").unwrap();
        }
        let found = list(&directory).unwrap();
        assert_eq!(found.iter().map(|entry| entry.id.clone()).collect::<Vec<_>>(), [id(2), id(1), id(3)]);
        assert_eq!(read(&directory, &found[0]).unwrap().unwrap(), b"again");
        std::fs::write(found[0].path(&directory), vec![b'x'; 1 << 20]).unwrap();
        assert_eq!(read(&directory, &found[0]).unwrap().unwrap().len(), MOST_BYTES + 1);
    }

    #[test]
    fn what_is_too_old_or_too_much_goes() {
        let folder = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        for number in 0..MOST + 10 {
            let entry = Entry { filed: seconds(now) - 2000 + number as u64, id: id(number) };
            std::fs::write(entry.path(folder.path()), "").unwrap();
        }
        let old = Entry { filed: seconds(now) - KEPT.as_secs() - 1, id: id(5000) };
        std::fs::write(old.path(folder.path()), "").unwrap();
        prune(folder.path(), now).unwrap();
        let left = list(folder.path()).unwrap();
        assert_eq!((left.len(), &left[0].id), (MOST, &id(10)));
        prune(folder.path(), now + KEPT + Duration::from_secs(60 * 60)).unwrap();
        assert_eq!(list(folder.path()).unwrap(), []);
    }
}
