//! Paths in kubelet's directory, and the mounts there.
//!
//! A path is valid only if it leads into kubelet's directory after all symbolic links are resolved, and its last
//! component is not a link. That last component itself is never accessed, as its file system may not respond.

use std::io;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;

use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, look};
use crate::sys::block::{self, Number};
use crate::sys::block_device;
use crate::sys::mountinfo::{Mount, MountList, REMOVED};
use crate::sys::root::Root;

/// Limit on the bytes of a path.
const LONGEST: usize = 4000;
/// Name of the file in the staging directory of a block volume to which its device node is bind-mounted.
pub const DEVICE: &str = "device";

/// Checks a path without accessing the file system.
fn lexical(path: &str) -> Result<PathBuf, Error> {
    let wrong = |problem| Error::Path { path: path.chars().take(LONGEST).collect(), problem };
    if path.len() > LONGEST {
        return Err(wrong("is too long"));
    }
    if path.contains(char::is_control) {
        return Err(wrong("has a control character in it"));
    }
    let parts = Path::new(path);
    if !parts.is_absolute() {
        return Err(wrong("is not absolute"));
    }
    if parts.components().any(|part| part == Component::ParentDir) {
        return Err(wrong("has \"..\" in it"));
    }
    if parts.file_name().is_none() {
        return Err(wrong("is the whole file system"));
    }
    // Drops double slashes, single dots, and a trailing slash.
    Ok(parts.components().collect())
}

/// Resolves a path given by kubelet: the links in its parent directory are followed. Returns none if that
/// directory is missing.
///
/// # Errors
/// If the path is not below kubelet's directory.
pub async fn resolve(guest: &Guest, path: &str) -> Result<Option<PathBuf>, Error> {
    let wanted = lexical(path)?;
    let root = guest.pod_volumes.root()?.to_owned();
    let place = wanted.clone();
    let found = look(&wanted, move || resolve_in(&root, &place)).await?;
    let wrong = |problem| Error::Path { path: path.to_owned(), problem };
    match found {
        Ok(Found::Inside(place)) => Ok(Some(place)),
        Ok(Found::Missing) => Ok(None),
        Ok(Found::Outside) => Err(wrong("is not below kubelet's directory")),
        Ok(Found::Link) => Err(wrong("is a symbolic link")),
        Err(error) => Err(Error::system("look for", wanted)(error)),
    }
}

/// Resolves the path of an existing volume as [`resolve`] does. At an invalid path there is no volume.
///
/// # Errors
/// If no volume can be there.
pub async fn of_volume(guest: &Guest, path: &str) -> Result<PathBuf, Error> {
    match resolve(guest, path).await {
        Ok(Some(place)) => Ok(place),
        Ok(None) | Err(Error::Path { .. }) => Err(Error::NotThere(path.into())),
        Err(error) => Err(error),
    }
}

/// Resolves a path as [`resolve`] does whose parent directory has to exist.
///
/// # Errors
/// The errors of [`resolve`]; also if the directory is missing.
pub async fn existing(guest: &Guest, path: &str) -> Result<PathBuf, Error> {
    resolve(guest, path).await?.ok_or_else(|| Error::NoFolder(path.into()))
}

#[derive(Debug, PartialEq, Eq)]
enum Found {
    Inside(PathBuf),
    Outside,
    Missing,
    Link,
}

fn resolve_in(root: &Path, path: &Path) -> io::Result<Found> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return Ok(Found::Outside) };
    let real_root = match std::fs::canonicalize(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        found => Some(found?),
    };
    // A path that does not exist cannot be a link, so it is judged by its text.
    let is_below = |root: &Path| path.starts_with(root) && path != root;
    let missing = if is_below(root) || real_root.as_deref().is_some_and(is_below) {
        Found::Missing
    } else {
        Found::Outside
    };
    let folder = match std::fs::canonicalize(folder) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(missing);
        }
        found => found?,
    };
    let Some(root) = real_root else { return Ok(Found::Outside) };
    let place = folder.join(name);
    if !folder.starts_with(&root) || place == root {
        return Ok(Found::Outside);
    }
    // Other errors of readlink(2) come from a mounted file system that does not respond, and do not matter.
    match std::fs::read_link(&place) {
        Ok(_) => Ok(Found::Link),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(missing),
        Err(_) => Ok(Found::Inside(place)),
    }
}

/// Last mount at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// Entry in the list of mounts.
    pub mount: Mount,
    /// True if it is a bind-mounted device node, not a file system.
    pub is_device: bool,
    /// Number of the device that it is, or is on.
    pub number: Option<Number>,
    /// True if that device no longer exists.
    pub gone: bool,
}

/// Returns the last mount at `place` in the list.
pub fn shown(root: &Root, mounts: &[Mount], place: &Path) -> Option<Shown> {
    let mount = mounts.iter().rfind(|mount| Path::new(&mount.mount_point) == place)?.clone();
    let is_device = is_device_file(&mount);
    let number = if is_device {
        block_device::number_at(place)
    } else if mount.device.0 == 0 {
        // btrfs has a device number of its own; its source names one of its disks.
        Some(&mount)
            .filter(|mount| mount.kind == "btrfs")
            .and_then(|mount| block_device::number_at(&root.path(&mount.source)))
    } else {
        Some(mount.device)
    };
    // Only a missing device counts as vanished, not a different error.
    let is_missing = |error: io::Error| error.kind() == io::ErrorKind::NotFound;
    let there = number.is_some_and(|number| !block::place(root, number).is_err_and(is_missing));
    let gone = mount.root.ends_with(REMOVED) || (!there && (is_device || is_on_disk(&mount)));
    Some(Shown { mount, is_device, number, gone })
}

/// Returns whether a mount is a device node. On these file systems nothing else is ever bind-mounted as a single
/// file.
fn is_device_file(mount: &Mount) -> bool {
    matches!(mount.kind.as_str(), "devtmpfs" | "tmpfs") && mount.root != "/"
}

fn is_on_disk(mount: &Mount) -> bool {
    mount.device.0 != 0 || mount.kind == "btrfs"
}

/// Returns all mounts.
///
/// # Errors
/// If the list cannot be read.
pub async fn mounts(guest: &Guest) -> Result<Vec<Mount>, Error> {
    let root = guest.root.clone();
    let path = Path::new("/proc/self/mountinfo");
    let read = look(path, move || MountList::open(&root)?.read()).await?;
    read.map_err(Error::system("read", path))
}

/// Returns the last mount at `place`; for a staged block volume, that of its device node. Also returns all mounts.
///
/// # Errors
/// If the list cannot be read.
pub async fn look_at(guest: &Guest, place: &Path) -> Result<(Option<Shown>, Vec<Mount>), Error> {
    let list = mounts(guest).await?;
    let (root, path) = (guest.root.clone(), place.to_owned());
    let found = move || {
        let at = |place: &Path| shown(&root, &list, place);
        let device = || at(&path.join(DEVICE)).filter(|shown| shown.is_device);
        (at(&path).or_else(device), list)
    };
    look(place, found).await
}

/// Returns the last mount at `place` in a list that has just been read.
///
/// # Errors
/// If the device cannot be checked in time.
pub async fn shown_now(guest: &Guest, list: &[Mount], place: &Path) -> Result<Option<Shown>, Error> {
    // Only the mounts at the place matter, and nearly always there are none.
    let there: Vec<_> = list.iter().filter(|mount| Path::new(&mount.mount_point) == place).cloned().collect();
    if there.is_empty() {
        return Ok(None);
    }
    let (root, path) = (guest.root.clone(), place.to_owned());
    look(place, move || shown(&root, &there, &path)).await
}

/// Ignores the error that a directory or file already exists.
pub(super) fn ignore_existing(made: io::Result<()>) -> io::Result<()> {
    match made {
        Err(error) if error.raw_os_error() == Some(Errno::EEXIST as i32) => Ok(()),
        made => made,
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_what_is_below_kubelets_folder_counts() {
        let folder = tempfile::tempdir().unwrap();
        let above = folder.path().canonicalize().unwrap();
        let root = above.join("kubelet");
        std::fs::create_dir_all(root.join("pods/a")).unwrap();
        std::fs::create_dir(above.join("other")).unwrap();
        symlink("kubelet", above.join("link")).unwrap();
        symlink("../other", root.join("out")).unwrap();
        symlink("pods", root.join("in")).unwrap();
        std::fs::write(root.join("file"), "").unwrap();
        let inside = |path: &str| Found::Inside(root.join(path));
        for (path, expected) in [
            ("kubelet/pods/a", inside("pods/a")),
            ("kubelet/pods/new", inside("pods/new")),
            ("kubelet/new", inside("new")),
            ("link/pods/a", inside("pods/a")),
            ("kubelet/in/a", inside("pods/a")),
            ("kubelet/in", Found::Link),
            ("kubelet/pods/no/new", Found::Missing),
            ("kubelet/file/new", Found::Missing),
            ("kubelet", Found::Outside),
            ("kubelet/out/new", Found::Outside),
            ("other/new", Found::Outside),
            ("other/no/new", Found::Outside),
            ("kubelet2", Found::Outside),
        ] {
            assert_eq!(resolve_in(&root, &above.join(path)).unwrap(), expected, "{path}");
            // kubelet's directory may itself be a link.
            if expected != Found::Missing && !path.starts_with("link") {
                assert_eq!(resolve_in(&above.join("link"), &above.join(path)).unwrap(), expected, "{path}");
            }
        }
        let nowhere = above.join("nowhere");
        assert_eq!(resolve_in(&nowhere, &nowhere.join("pods/a")).unwrap(), Found::Missing);
        assert_eq!(resolve_in(&nowhere, &above.join("a")).unwrap(), Found::Outside);
    }

    proptest! {
        #[test]
        fn a_path_that_is_taken_has_nothing_odd_in_it(path in "(/|\\.|\\.\\.|[a-c\\x00\n ]|é){0,12}") {
            match lexical(&path) {
                Ok(plain) => {
                    prop_assert!(path.starts_with('/'));
                    prop_assert!(plain.is_absolute() && plain.file_name().is_some());
                    let normal = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
                    prop_assert!(plain.components().all(normal), "{plain:?}");
                    prop_assert!(!plain.to_string_lossy().contains(char::is_control));
                    prop_assert_eq!(lexical(plain.to_str().unwrap()).unwrap(), plain);
                }
                Err(Error::Path { .. }) => {}
                Err(error) => prop_assert!(false, "{error}"),
            }
        }
    }
}
