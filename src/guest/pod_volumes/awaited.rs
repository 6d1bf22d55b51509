//! Staging paths at which a publish has unmounted a dead file system, with nothing mounted in its place yet. The
//! list of mounts cannot distinguish them from paths that were never staged, so they are recorded, for the agent's
//! next run as well.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, look};
use crate::sys::files;
use crate::sys::root::Root;

/// Directory of the record: in memory, like the mounts, and lost at the next boot.
const FOLDER: &str = "/run/guestlet";
const NAME: &str = "awaited-volumes.json";
/// Limit on the bytes of the record: more than a thousand of the longest paths need.
const MOST: u64 = 4 << 20;

/// Recorded paths; none until they are first needed.
#[derive(Debug, Default)]
pub(super) struct Awaited(Mutex<Option<BTreeSet<PathBuf>>>);

/// Records whether a publish has to stage this path again. When this returns, the record outlasts the agent.
///
/// # Errors
/// If the record cannot be written.
pub(super) async fn set(guest: &Guest, place: &Path, awaited: bool) -> Result<(), Error> {
    let change = move |places: &mut BTreeSet<PathBuf>, place: PathBuf| {
        if awaited { places.insert(place) } else { places.remove(&place) }
    };
    with(guest, place, "record the state of", move |root, places, place| {
        let mut after = places.clone();
        if change(&mut after, place) {
            write(root, &after)?;
            *places = after;
        }
        Ok(())
    })
    .await
}

/// Returns whether a publish has to stage this path again.
///
/// # Errors
/// If the record cannot be read.
pub(super) async fn is(guest: &Guest, place: &Path) -> Result<bool, Error> {
    with(guest, place, "look up", |_, places, place| Ok(places.contains(&place))).await
}

async fn with<T: Send + 'static>(
    guest: &Guest,
    place: &Path,
    what: &'static str,
    work: impl FnOnce(&Root, &mut BTreeSet<PathBuf>, PathBuf) -> io::Result<T> + Send + 'static,
) -> Result<T, Error> {
    let (guest, path) = (guest.clone(), place.to_owned());
    let done = look(place, move || {
        let mut known = guest.pod_volumes.awaited.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_none() {
            *known = Some(read(&guest.root)?);
        }
        known
            .as_mut()
            .map_or_else(|| Err(io::ErrorKind::NotFound.into()), |places| work(&guest.root, places, path))
    });
    done.await?.map_err(Error::system(what, place))
}

fn read(root: &Root) -> io::Result<BTreeSet<PathBuf>> {
    let file = root.path(FOLDER).join(NAME);
    let Some(bytes) = files::read_at_most(&file, MOST)? else { return Ok(BTreeSet::new()) };
    // The paths then count as never staged, and nothing is done there.
    Ok(serde_json::from_slice(&bytes).unwrap_or_else(|error| {
        tracing::warn!("{} cannot be understood: {error}", file.display());
        BTreeSet::new()
    }))
}

fn write(root: &Root, places: &BTreeSet<PathBuf>) -> io::Result<()> {
    let folder = root.path(FOLDER);
    let file = folder.join(NAME);
    if places.is_empty() {
        return files::remove_synced(&file);
    }
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
    files::replace_synced(&file, &serde_json::to_vec(places)?)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_next_run_of_the_agent_knows_them() {
        let folder = tempfile::tempdir().unwrap();
        let run = || Guest { root: Root::at(folder.path()), ..Guest::default() };
        let (one, two) = (Path::new("/kubelet/one"), Path::new("/kubelet/two"));
        let guest = run();
        set(&guest, one, false).await.unwrap();
        assert!(!folder.path().join("run").exists(), "nothing is to be said");
        set(&guest, one, true).await.unwrap();
        set(&guest, two, true).await.unwrap();
        let next = run();
        assert!(is(&next, one).await.unwrap() && is(&next, two).await.unwrap());
        set(&next, one, false).await.unwrap();
        let last = run();
        assert!(!is(&last, one).await.unwrap() && is(&last, two).await.unwrap());
        set(&last, two, false).await.unwrap();
        let file = folder.path().join("run/guestlet").join(NAME);
        assert!(!file.exists());
        // A malformed record is an empty one, but a record that cannot be read is an error.
        std::fs::write(&file, "{").unwrap();
        assert!(!is(&run(), one).await.unwrap());
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        assert!(is(&run(), one).await.is_err());
    }
}
