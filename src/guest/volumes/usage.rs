//! Reports how full a mounted file system is, and discards its unused blocks.

use std::path::Path;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::volumes::{Error, PATIENCE, at_once};
use crate::sys::effects::Trimmed;
use crate::sys::usage::{self, Usage};

/// Returns the usage of the file system that `path` is on.
///
/// # Errors
/// If the path does not exist, or the file system does not respond.
pub async fn usage(guest: &Guest, path: &Path) -> Result<Usage, Error> {
    let place = guest.root.path_as_given(&path.to_string_lossy());
    let told = at_once(path, PATIENCE, move || usage::usage(&place)).await?;
    told.map_err(|source| Error::unreadable(path, source))
}

/// Discards the unused blocks of the file system that `path` is on (FITRIM), in ranges of at least `minimum`
/// bytes. Only one trim runs at a time on each path.
///
/// # Errors
/// If the file system or its disk does not support it; if it takes longer than `deadline`, and it then continues.
pub async fn trim(guest: &Guest, path: &Path, minimum: u64, deadline: Duration) -> Result<Trimmed, Error> {
    let held = guest.volumes.begin(path, "it is being trimmed")?;
    let (effects, place) = (guest.effects.clone(), path.to_owned());
    let work = move || {
        let trimmed = effects.trim(&place, minimum);
        drop(held);
        trimmed
    };
    at_once(path, deadline, work).await?.map_err(|source| Error::Trim { path: path.to_owned(), source })
}
