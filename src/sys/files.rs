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
