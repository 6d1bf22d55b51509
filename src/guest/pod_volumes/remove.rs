//! Unpublishes and unstages volumes. Removes all that is left of them, however many mounts there are on top of
//! each other, and also if the disk has disappeared.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::pod_volumes::place::{self, DEVICE};
use crate::guest::pod_volumes::{Error, awaited, begin, look, share};
use crate::guest::volumes;
use crate::guest::volumes::unmount::{detach, unmount};

/// Time limit for unmounting, including writing back dirty data.
const TO_UNMOUNT: Duration = Duration::from_secs(90);
/// Limit on the mounts on top of each other at one mount point.
const DEEPEST: usize = 64;

/// Unstages a volume. Does nothing if it is not staged.
///
/// # Errors
/// If it is in use; the error names the users. If it does not respond in time.
pub async fn unstage(guest: &Guest, volume: &str, staging: &str) -> Result<(), Error> {
    let _operation = begin(guest, volume, "it is being unstaged").await?;
    let Some(place) = place::resolve(guest, staging).await? else { return Ok(()) };
    let mut done = 0;
    // Only of a block volume: a file of that name inside a mounted file system is not a mount point.
    let device = place.join(DEVICE);
    let list = place::mounts(guest).await?;
    let is_mounted = |place: &Path| list.iter().any(|mount| Path::new(&mount.mount_point) == place);
    if is_mounted(&device) {
        done += take_away(guest, &device).await?;
    }
    if is_mounted(&place) {
        done += take_away(guest, &place).await?;
    }
    remove_file(&device).await?;
    awaited::set(guest, &place, false).await?;
    if done > 0 {
        tracing::info!("volume {volume}: not staged at {} any more", place.display());
    }
    Ok(())
}

/// Unpublishes a volume from a pod. Does nothing if it is not published.
///
/// # Errors
/// The errors of [`unstage`].
pub async fn unpublish(guest: &Guest, volume: &str, target: &str) -> Result<(), Error> {
    let _operation = begin(guest, volume, "it is being unpublished").await?;
    let Some(place) = place::resolve(guest, target).await? else { return Ok(()) };
    let done = take_away(guest, &place).await?;
    remove_place(&place).await?;
    if done > 0 {
        tracing::info!("volume {volume}: not published at {} any more", place.display());
    }
    Ok(())
}

/// Unmounts what is left of a disk that has disappeared.
pub(super) async fn dead(guest: &Guest, place: &Path) -> Result<(), Error> {
    tracing::warn!("unmounting {}, whose disk was removed", place.display());
    take_away(guest, place).await.map(drop)
}

/// Unmounts everything at a path, and returns the number of mounts. Processes with open files on a vanished disk
/// are not waited for, as all their operations fail.
async fn take_away(guest: &Guest, place: &Path) -> Result<usize, Error> {
    if share::at(&place::mounts(guest).await?, place).is_some() {
        return share::apart::take_away(guest, place).await;
    }
    match unmount(guest, place, TO_UNMOUNT).await {
        Err(volumes::Error::InUse { target, holders }) => {
            let (shown, _) = place::look_at(guest, place).await?;
            if shown.is_none_or(|shown| !shown.gone) {
                return Err(volumes::Error::InUse { target, holders }.into());
            }
        }
        done => return Ok(done?),
    }
    let mut done = 0;
    while done < DEEPEST {
        let list = place::mounts(guest).await?;
        let shown = place::shown_now(guest, &list, place).await?;
        if !shown.is_some_and(|shown| shown.gone) {
            break;
        }
        detach(guest, place, TO_UNMOUNT).await?;
        done += 1;
    }
    Ok(done + unmount(guest, place, TO_UNMOUNT).await?)
}

/// Removes the mount point of a volume, unless it has contents of its own.
async fn remove_place(place: &Path) -> Result<(), Error> {
    let path = place.to_owned();
    let removed = look(place, move || match std::fs::symlink_metadata(&path) {
        Ok(found) if found.is_dir() => std::fs::remove_dir(&path),
        Ok(found) if found.is_file() && found.len() == 0 => std::fs::remove_file(&path),
        Ok(_) => Err(io::ErrorKind::DirectoryNotEmpty.into()),
        Err(error) => Err(error),
    });
    match removed.await? {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
            tracing::warn!("{} is not empty, and is left as it is", place.display());
            Ok(())
        }
        removed => removed.map_err(Error::system("remove", place)),
    }
}

/// Removes the file on which a device node was bind-mounted.
async fn remove_file(file: &Path) -> Result<(), Error> {
    let path = file.to_owned();
    let removed = look(file, move || match std::fs::symlink_metadata(&path) {
        Ok(found) if found.is_file() && found.len() == 0 => std::fs::remove_file(&path),
        _ => Ok(()),
    });
    removed.await?.map_err(Error::system("remove", file))
}
