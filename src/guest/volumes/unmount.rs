//! Unmounts file systems, and finds the users of a mount that is in use.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::guest::Guest;
use crate::guest::volumes::holders::{Holders, holders};
use crate::guest::volumes::{Error, PATIENCE, at_once, keeping};
use crate::sys::mountinfo::{Mount, MountList};

/// Limit on the mounts on top of each other at one mount point.
const DEEPEST: usize = 64;
/// Time for which a mount may be in use without a user that can be found, because a process that resolves a path
/// holds it for a moment; and the time between two attempts.
const PASSING: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(20);

/// Unmounts everything that is mounted at `target`, and returns the number of mounts: 0 if nothing was mounted, or
/// the path does not exist. The kernel flushes a file system to its disk first.
///
/// # Errors
/// If it is in use, with its users; if `target` is a symbolic link; if it takes longer than `deadline`, and it
/// then continues.
pub async fn unmount(guest: &Guest, target: &Path, deadline: Duration) -> Result<usize, Error> {
    let path = target.to_owned();
    let found = at_once(target, PATIENCE, move || place(&path)).await?;
    let found = found.map_err(|source| Error::Unmount { target: target.to_owned(), source })?;
    let Some(path) = found else { return Ok(0) };
    let held = guest.volumes.begin(&path, "an unmount is in progress there")?;
    let machine = guest.clone();
    let done = keeping(&held, target, deadline, move || all(&machine, &path)).await?;
    done.map_err(|(source, holders)| match source.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EBUSY) => Error::InUse { target: target.to_owned(), holders },
        _ => Error::Unmount { target: target.to_owned(), source },
    })
}

/// Detaches the last mount at `target` lazily although it is in use: for a file system whose disk has disappeared,
/// where all further operations fail anyway.
///
/// # Errors
/// If nothing is mounted there; if it takes longer than `deadline`, and it then continues.
pub async fn detach(guest: &Guest, target: &Path, deadline: Duration) -> Result<(), Error> {
    let held = guest.volumes.begin(target, "an unmount is in progress there")?;
    let (effects, path) = (guest.effects.clone(), target.to_owned());
    let done = keeping(&held, target, deadline, move || effects.detach(&path)).await?;
    done.map_err(|source| Error::Unmount { target: target.to_owned(), source })
}

fn all(guest: &Guest, path: &Path) -> Result<usize, (io::Error, Holders)> {
    let plain = |error: io::Error| (error, Holders::default());
    let list = MountList::open(&guest.root).map_err(plain)?;
    let (mut done, mut until) = (0, None);
    while done < DEEPEST {
        let mounts = list.read().map_err(plain)?;
        let Some(mount) = last(&mounts, path) else { return Ok(done) };
        let Err(error) = guest.effects.unmount(path) else {
            (done, until) = (done + 1, None);
            continue;
        };
        if error.raw_os_error() != Some(Errno::EBUSY as i32) {
            return Err(plain(error));
        }
        let holders = holders(&guest.root, mount, &mounts);
        let until = *until.get_or_insert_with(|| Instant::now() + PASSING);
        if !holders.are_none() || Instant::now() >= until {
            return Err((error, holders));
        }
        std::thread::sleep(AGAIN);
    }
    Err(plain(Errno::ELOOP.into()))
}

/// Returns the canonical path. Only the parent is resolved, because the file system at the mount point may not
/// respond.
fn place(target: &Path) -> io::Result<Option<PathBuf>> {
    let (Some(folder), Some(name)) = (target.parent(), target.file_name()) else {
        return Err(Errno::EINVAL.into());
    };
    let folder = match std::fs::canonicalize(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        folder => folder?,
    };
    let path = folder.join(name);
    match std::fs::read_link(&path) {
        Ok(_) => Err(Errno::ELOOP.into()),
        Err(_) => Ok(Some(path)),
    }
}

/// Returns the last mount at a path.
fn last<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts.iter().rfind(|mount| Path::new(&mount.mount_point) == path)
}
