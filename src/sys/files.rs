//! Files of our own.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Returns the symbolic link at `path`, or on the way to it, whose target is missing, as it is while a disk is
/// not mounted. `None` if `path` itself is missing, or nothing is: only then does its absence mean that it was
/// never written.
pub fn dangling(path: &Path) -> Option<PathBuf> {
    let nearest = path.ancestors().find(|one| one.symlink_metadata().is_ok())?;
    let is_missing =
        || std::fs::metadata(nearest).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
    (nearest.is_symlink() && is_missing()).then(|| nearest.to_owned())
}

/// Replaces the file at `path`, for root and the process's own user only: a reader sees the old bytes or the
/// new ones, never a part. For files in memory (/run); nothing is synced to a disk.
///
/// # Errors
/// As open(2), write(2) and rename(2) give them; the old file is as it was.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by(path, ".new", |file| file.write_all(bytes))
}

/// As [`replace`], and the bytes and the name are where they are kept before this returns.
///
/// # Errors
/// As open(2), write(2), fsync(2) and rename(2) give them.
pub fn replace_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_by(path, ".new", |file| {
        file.write_all(bytes)?;
        file.sync_all()
    })?;
    sync_name(path)
}

/// Replaces a file that others have, too, as [`replace_synced`], and keeps its owner and mode; a new one can be read by
/// everybody. A link stays, and what it leads to is replaced.
///
/// # Errors
/// As open(2), write(2), fsync(2), chown(2) and rename(2) give them.
pub fn replace_like(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};

    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let before = std::fs::metadata(&path).ok();
    replace_by(&path, ".guestlet-new", |file| {
        let mode = before.as_ref().map_or(0o644, std::os::unix::fs::MetadataExt::mode);
        if let Some(before) = &before {
            fchown(&*file, Some(before.uid()), Some(before.gid()))?;
        }
        file.set_permissions(std::fs::Permissions::from_mode(mode & 0o7777))?;
        file.write_all(bytes)?;
        file.sync_all()
    })?;
    sync_name(&path)
}

/// Fills a file beside the one at `path`, and has it take its place; it is removed if that fails.
#[allow(clippy::disallowed_methods, reason = "this is the boundary")]
fn replace_by(path: &Path, suffix: &str, fill: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;

    let mut beside = path.as_os_str().to_owned();
    beside.push(suffix);
    let mut new = File::options().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    let replaced = fill(&mut new).and_then(|()| std::fs::rename(&beside, path));
    if replaced.is_err() {
        remove(Path::new(&beside));
    }
    replaced
}

/// Syncs the directory of a file, so that its name survives a crash.
fn sync_name(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// The bytes of a file that may be missing; one that has more than `most` is an error, as is what is no file.
///
/// # Errors
/// As open(2) and read(2) give them.
pub fn read_at_most(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    use std::io::Read as _;

    // Opening a pipe would block until its other end is opened, so the type is checked first.
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Ok(metadata) if !metadata.is_file() => return Err(io::Error::other("it is not a file")),
        Ok(metadata) if metadata.len() > most => return Err(io::Error::other("it is too large")),
        Ok(_) => {}
        Err(error) => return Err(error),
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    // It may have grown meanwhile.
    if bytes.len() as u64 > most { Err(io::Error::other("it is too large")) } else { Ok(Some(bytes)) }
}

/// Reads the text of a file that may be missing; invalid UTF-8 in it is an error.
///
/// # Errors
/// The errors of read(2).
#[allow(clippy::disallowed_methods, reason = "this is the boundary")]
pub fn text(path: &Path) -> io::Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Removes a file of this program if it exists, and syncs the directory, so that the removal survives a crash.
///
/// # Errors
/// The errors of unlink(2) and fsync(2).
pub fn remove_synced(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed?,
    }
    sync_name(path)
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_to_nothing_is_told_from_what_nobody_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("real")).unwrap();
        symlink("real", at("link")).unwrap();
        symlink("nowhere", at("lost")).unwrap();
        symlink("lost", at("chain")).unwrap();
        for name in ["real", "real/file", "link", "link/file", "missing", "missing/file"] {
            assert_eq!(dangling(&at(name)), None, "{name}");
        }
        for (name, link) in [("lost", "lost"), ("lost/a/b", "lost"), ("chain/file", "chain")] {
            assert_eq!(dangling(&at(name)), Some(at(link)), "{name}");
        }
        assert_eq!(dangling(Path::new("a-relative-path-that-is-missing")), None);
    }
}
