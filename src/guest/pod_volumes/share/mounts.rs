//! Makes mounts of shares, attaches them, and bind-mounts them elsewhere.
//!
//! The server is contacted only while a mount is made, which is not attached yet; one that completes too late is
//! never visible. A mount is identified by its ID, and looked up again immediately before it is acted on.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::MsFlags;

use super::late::{self, Late};
use super::server::is_of_a_dead_server;
use super::{Share, Usage, apart, last, options};
use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, Thing, look, place};
use crate::sys::blocking;
use crate::sys::mountinfo::{Mount, MountList};
use crate::sys::mounting::{How, Place, What};
use crate::sys::root::Root;

/// Name of the file system in the kernel.
const KIND: &str = "nfs4";
/// Time limit for making a mount from a server.
const TO_MOUNT: Duration = Duration::from_secs(60);
/// Time limit for a bind mount.
const TO_BIND: Duration = Duration::from_secs(10);

/// Makes a mount of a share without attaching it.
pub(super) async fn make(guest: &Guest, share: &Share, usage: &Usage) -> Result<OwnedFd, Error> {
    let options = options::of(share, &usage.options, usage.read_only)?;
    let source = share.source();
    let busy = |doing| Error::Busy { volume: share.volume.clone(), doing };
    let turn = guest
        .pod_volumes
        .turns
        .take(Thing::Share(source.clone()), "its server is being queried")
        .map_err(busy)?;
    let effects = Arc::clone(&guest.effects);
    let work = blocking::run(move || {
        let made = effects.make_mount(&source, KIND, &options.data, options.flags);
        drop(turn);
        made
    });
    let Ok(made) = tokio::time::timeout(TO_MOUNT, work).await else {
        return Err(share.no_server(format!("it cannot be mounted within {} s", TO_MOUNT.as_secs())));
    };
    made.map_err(|error| match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENODEV | Errno::ENOSYS) => Error::NoNfs,
        Some(code) if is_of_a_dead_server(code) => share.no_server(error.to_string()),
        _ => Error::system("mount", share.source())(error),
    })
}

/// Attaches the mount to a directory on which nothing is mounted. A mount that it replaces (`instead`) is
/// unmounted before. Mounting over that one could block on its server, because a process that waits for the server
/// may hold the lock of the root directory.
pub(super) async fn put(
    guest: &Guest,
    made: OwnedFd,
    place: &Path,
    instead: Option<&Mount>,
) -> Result<(), Error> {
    let failed = |error| Error::system("mount the share at", place)(error);
    let list = place::mounts(guest).await?;
    if last(&list, place).map(|there| there.id) != instead.map(|there| there.id) {
        return Err(failed(Errno::ESTALE.into()));
    }
    if instead.is_some() {
        apart::take_away(guest, place).await?;
    }
    let (effects, root, path) = (Arc::clone(&guest.effects), guest.root.clone(), place.to_owned());
    let attach = move || {
        let folder = free(&root, &path)?;
        effects.attach(made.as_fd(), &folder)
    };
    look(place, attach).await?.map_err(failed)
}

/// Opens a directory on which nothing is mounted.
fn free(root: &Root, path: &Path) -> io::Result<Place> {
    let folder = Place::open_mounted_folder(path)?;
    match last(&MountList::open(root)?.read()?, path) {
        Some(_) => Err(Errno::EBUSY.into()),
        None => Ok(folder),
    }
}

/// Bind-mounts the staged mount on a directory on which nothing is mounted.
pub(super) async fn bind(guest: &Guest, staged: &Mount, place: &Path, flags: MsFlags) -> Result<(), Error> {
    let root = guest.root.clone();
    bind_to(guest, staged, place, flags, move |path| free(&root, path)).await
}

/// Bind-mounts the staged mount over another mount of the share, with the flags of that one.
pub(super) async fn bind_over(guest: &Guest, staged: &Mount, old: &Mount) -> Result<(), Error> {
    let flags = [
        ("ro", MsFlags::MS_RDONLY),
        ("nosuid", MsFlags::MS_NOSUID),
        ("nodev", MsFlags::MS_NODEV),
        ("noexec", MsFlags::MS_NOEXEC),
    ];
    let flags = flags.into_iter().filter(|(word, _)| old.has_flag(word)).map(|(_, flag)| flag).collect();
    let (effects, below) = (Arc::clone(&guest.effects), old.clone());
    bind_to(guest, staged, &old.path, flags, move |_| effects.open_place(&below)).await
}

/// Bind-mounts the staged mount on the place that `open` returns. Only one thread for each place can hang on the
/// lock of a directory of a dead server.
async fn bind_to(
    guest: &Guest,
    staged: &Mount,
    place: &Path,
    flags: MsFlags,
    open: impl FnOnce(&Path) -> io::Result<Place> + Send + 'static,
) -> Result<(), Error> {
    let busy = |doing| Error::Busy { volume: place.display().to_string(), doing };
    let turn = guest
        .pod_volumes
        .turns
        .take(Thing::Place(place.to_owned()), "the share is being bound there")
        .map_err(busy)?;
    let (effects, from, to) = (Arc::clone(&guest.effects), staged.clone(), place.to_owned());
    let work = move |late: &Late| {
        let _turn = turn;
        let (source, target) = (effects.open_place(&from)?, open(&to)?);
        late.check()?;
        let what = What::Bind { source: &source, recursive: false };
        effects.mount(&what, &target, How { flags, propagation: None })
    };
    let Some(done) = late::within(TO_BIND, work).await else {
        return Err(Error::Silent { what: place.to_owned(), seconds: TO_BIND.as_secs() });
    };
    done.map_err(|error| match error.raw_os_error().map(Errno::from_raw) {
        // The staged mount or the target disappeared in between.
        Some(Errno::ESTALE) => {
            Error::NotStaged { place: staged.path.clone(), found: "what was staged has been removed" }
        }
        _ => Error::system("bind the share to", place)(error),
    })
}
