//! Takes volumes away from pods, and from their places: everything that is left of it, however often something was mounted
//! there, and also if its disk is gone.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::pod_volumes::place::{self, DEVICE};
use crate::guest::pod_volumes::{Error, awaited, begin, look, share};
use crate::guest::volumes;
use crate::guest::volumes::unmount::{detach, unmount};

/// How long unmounting may take, with what is to be written before.
const TO_UNMOUNT: Duration = Duration::from_secs(90);
/// Mounts on top of each other, at most.
const DEEPEST: usize = 64;

/// Takes a volume away from its place. Nothing to do if it is not there.
///
/// # Errors
/// If somebody uses it, with who does, or it does not answer in time.
pub async fn unstage(guest: &Guest, volume: &str, staging: &str) -> Result<(), Error> {
    let _operation = begin(guest, volume, "it is being unstaged").await?;
    let Some(place) = place::resolve(guest, staging).await? else { return Ok(()) };
    let mut done = 0;
    // Of a block volume. A file of that name in a file system that is mounted there is none.
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

/// Takes a volume away from a pod. Nothing to do if it does not have it.
///
/// # Errors
/// As [`unstage`].
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

/// Unmounts what is left of a disk that is gone.
pub(super) async fn dead(guest: &Guest, place: &Path) -> Result<(), Error> {
    tracing::warn!("unmounting {}, whose disk is gone", place.display());
    take_away(guest, place).await.map(drop)
}

/// Unmounts all that is mounted at a place; how many mounts that were. Whoever still has files open on a disk that is
/// gone can do nothing with them, and is not waited for.
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

/// Removes what a volume was mounted on, unless somebody has put something there.
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

/// Removes the file that a device was bound to.
async fn remove_file(file: &Path) -> Result<(), Error> {
    let path = file.to_owned();
    let removed = look(file, move || match std::fs::symlink_metadata(&path) {
        Ok(found) if found.is_file() && found.len() == 0 => std::fs::remove_file(&path),
        _ => Ok(()),
    });
    removed.await?.map_err(Error::system("remove", file))
}
