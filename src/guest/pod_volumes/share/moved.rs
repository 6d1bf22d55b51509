//! Follows a share whose server has moved to a different address, with the same path: it is staged from there, and
//! bind-mounted over the older mounts of pods.
//!
//! kubelet's record beside each path tells which mounts belong to the volume. The path on the server is not
//! enough, because a different server may export the same one.

use std::path::{Path, PathBuf};

use futures_util::future::join_all;
use serde::Deserialize;

use super::{Share, Usage, at, is_share, last, mounts, options};
use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, begin, look, place};
use crate::sys::error_chain;
use crate::sys::mountinfo::Mount;
use crate::sys::root::Root;

/// Last components of the paths where kubelet stages a volume, and publishes it to a pod.
const STAGED: &str = "globalmount";
const SHOWN: &str = "mount";
/// Name of kubelet's record of a volume, in the parent directory of its mount point.
const NOTE: &str = "vol_data.json";

/// Record that kubelet has made of a volume.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Note {
    #[serde(default)]
    volume_handle: String,
}

/// Mounts the share at `path` again, from the location that `ask` returns, at all its places. Returns whether the
/// location had changed. Other operations on the volume are excluded only while mounts are changed.
///
/// # Errors
/// If the new server does not respond or refuses.
pub async fn find_again<F: Future<Output = Option<Share>>>(
    guest: &Guest,
    path: &str,
    ask: impl FnOnce() -> F,
) -> Result<bool, Error> {
    let place = place::of_volume(guest, path).await?;
    if at(&place::mounts(guest).await?, &place).is_none() {
        return Ok(false);
    }
    let Some(share) = ask().await else { return Ok(false) };
    let list = place::mounts(guest).await?;
    let all = of_volume(guest, &share, &list).await?;
    let is_staged = |mount: &&&Mount| mount.path.ends_with(STAGED);
    let Some(staged) = all.iter().find(is_staged).filter(|_| all.iter().any(|mount| mount.path == place))
    else {
        return Ok(false);
    };
    if staged.source == share.source() {
        let _operation = begin(guest, &share.volume, "its server has moved").await?;
        follow(guest, &share, &staged.path).await?;
        return Ok(false);
    }
    let usage = Usage { options: options::of_mount(staged), read_only: staged.has_flag("ro"), single: false };
    let made = mounts::make(guest, &share, &usage).await?;
    let _operation = begin(guest, &share.volume, "its server has moved").await?;
    mounts::put(guest, made, &staged.path, Some(staged)).await?;
    tracing::warn!(
        "volume {}: its server has moved from {} to {}",
        share.volume,
        staged.source,
        share.server
    );
    follow(guest, &share, &staged.path).await?;
    Ok(true)
}

/// Bind-mounts the staged share over older mounts of it that pods have. Failures are logged, and retried the next
/// time.
pub(super) async fn follow(guest: &Guest, share: &Share, staging: &Path) -> Result<(), Error> {
    let list = place::mounts(guest).await?;
    let Some(staged) = at(&list, staging) else { return Ok(()) };
    // Usually there are none.
    let is_old = |mount: &Mount| share.is_shown_by(mount) && mount.device != staged.device;
    if !list.iter().any(is_old) {
        return Ok(());
    }
    let old: Vec<_> = of_volume(guest, share, &list).await?;
    let old = old.into_iter().filter(|mount| is_old(mount) && mount.path.ends_with(SHOWN));
    let bound = old.map(async |old| (old, mounts::bind_over(guest, staged, old).await));
    for (old, bound) in join_all(bound).await {
        let (volume, place, source) = (&share.volume, old.path.display(), &staged.source);
        match bound {
            Ok(()) => tracing::warn!("volume {volume}: {place} now uses {source}"),
            Err(error) => {
                tracing::warn!(
                    "volume {volume}: {place} still uses {}: {}",
                    old.source,
                    error_chain::words(&error)
                );
            }
        }
    }
    Ok(())
}

/// Returns the mounts of a share at places that belong to its volume.
async fn of_volume<'m>(guest: &Guest, share: &Share, list: &'m [Mount]) -> Result<Vec<&'m Mount>, Error> {
    let root = guest.pod_volumes.root()?.to_owned();
    let root = look(&root.clone(), move || std::fs::canonicalize(&root).unwrap_or(root)).await?;
    let may_be = |mount: &&Mount| {
        let is_last = last(list, &mount.path).is_some_and(|last| last.id == mount.id);
        let is_called = mount.path.ends_with(STAGED) || mount.path.ends_with(SHOWN);
        is_last && is_called && is_share(mount) && share.is_shown_by(mount) && mount.path.starts_with(&root)
    };
    let found: Vec<_> = list.iter().filter(may_be).collect();
    let places: Vec<_> = found.iter().map(|mount| mount.path.clone()).collect();
    let volume = share.volume.clone();
    let is_its =
        move || places.iter().map(|place| noted(place).as_ref() == Some(&volume)).collect::<Vec<_>>();
    let is_its = look(Path::new(NOTE), is_its).await?;
    Ok(found.into_iter().zip(is_its).filter_map(|(mount, is_its)| is_its.then_some(mount)).collect())
}

/// Returns the volume that kubelet has recorded for a place.
fn noted(place: &Path) -> Option<String> {
    let note: PathBuf = place.parent()?.join(NOTE);
    let note = Root::default().read(note.to_str()?).ok()?;
    serde_json::from_slice::<Note>(&note).ok().map(|note| note.volume_handle)
}
