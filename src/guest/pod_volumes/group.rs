//! Gives the files of a volume to the pod's group (fsGroup).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, place};
use crate::guest::volumes::held::Held;
use crate::sys::block_stack::is_on;
use crate::sys::{blocking, folders};

/// Time limit for all files of a volume.
const PATIENCE: Duration = Duration::from_secs(30 * 60);

/// Gives all files of the mount at `place` to `group`, which may then write to them; files created later belong to
/// it as well. Skipped if the root directory already belongs to the group, as that is changed last. If `held` is
/// given, the mount has to be of that device.
pub(super) async fn give(guest: &Guest, place: &Path, held: Option<&Held>, group: u32) -> Result<(), Error> {
    let list = place::mounts(guest).await?;
    let mount = list.into_iter().rfind(|mount| Path::new(&mount.mount_point) == place);
    let mount = mount.ok_or_else(|| Error::NotThere(place.to_owned()))?;
    let root = guest.root.clone();
    let (effects, held, path) = (Arc::clone(&guest.effects), held.cloned(), place.to_owned());
    let work = blocking::run(move || {
        let failed = |error| Error::system("change the group of files in", path.clone())(error);
        let folder = effects.open_mount(&mount).map_err(failed)?;
        // The mount is opened; check that the held device is still the same.
        held.as_ref().map_or(Ok(()), Held::check)?;
        if held.as_ref().is_some_and(|held| !is_on(&root, &mount, held.number())) {
            return Err(Error::NotThere(path));
        }
        folders::give_all(folder, group).map_err(failed)
    });
    let silent = |_| Error::Silent { what: place.to_owned(), seconds: PATIENCE.as_secs() };
    tokio::time::timeout(PATIENCE, work).await.map_err(silent)?
}
