//! Files of our own.

use std::io;
use std::path::Path;

/// Replaces the file at `path`, for root and the process's own user only: a reader sees the old bytes or the
/// new ones, never a part. For files in memory (/run); nothing is synced to a disk.
///
/// # Errors
/// As open(2), write(2) and rename(2) give them.
#[allow(clippy::disallowed_methods, reason = "this is the boundary")]
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;

    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(bytes)?;
    std::fs::rename(beside, path)
}

/// As [`replace`], and the bytes and the name are where they are kept before this returns.
///
/// # Errors
/// As open(2), write(2), fsync(2) and rename(2) give them.
#[allow(clippy::disallowed_methods, reason = "this is the boundary")]
pub fn replace_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;

    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(beside, path)?;
    match path.parent() {
        Some(folder) => std::fs::File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// Removes a file of our own, if it is there; that it is gone is kept before this returns.
///
/// # Errors
/// As unlink(2) and fsync(2) give them.
pub fn remove_synced(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed?,
    }
    match path.parent() {
        Some(folder) => std::fs::File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// The bytes of a file of our own, if it is there and can be read.
#[allow(clippy::disallowed_methods, reason = "this is the boundary")]
pub fn read(path: &Path) -> Option<Vec<u8>> {
    std::fs::read(path).ok()
}

/// Removes a file of our own, if it is there.
pub fn remove(path: &Path) {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("cannot remove {}: {error}", path.display());
        }
        _ => {}
    }
}
