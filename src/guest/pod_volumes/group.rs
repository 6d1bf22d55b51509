//! Gives a volume to a pod's group.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, place};
use crate::sys::{blocking, folders};

/// How long all files of a volume may take.
const PATIENCE: Duration = Duration::from_secs(30 * 60);

/// Gives what is mounted at `place` to `group`: all of it belongs to that group, which may write to it, and what is made
/// later belongs to it, too. Done already if its uppermost folder is so; that comes last.
pub(super) async fn give(guest: &Guest, place: &Path, group: u32) -> Result<(), Error> {
    let list = place::mounts(guest).await?;
    let mount = list.into_iter().rfind(|mount| Path::new(&mount.mount_point) == place);
    let mount = mount.ok_or_else(|| Error::NotThere(place.to_owned()))?;
    let effects = Arc::clone(&guest.effects);
    let work = blocking::run(move || folders::give_all(effects.open_mount(&mount)?, group));
    let silent = |_| Error::Silent { what: place.to_owned(), seconds: PATIENCE.as_secs() };
    let given = tokio::time::timeout(PATIENCE, work).await.map_err(silent)?;
    given.map_err(Error::system("give to its group", place))
}
