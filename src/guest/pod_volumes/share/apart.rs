//! Takes shares away from their places, also when their server is dead.
//!
//! ```text
//!  the server answers, or other ──▶ umount(2) ──done──▶ gone
//!  mounts have the file system         │ └──in use, and it answers──▶ refused, with who uses it
//!                                      └──in use, or hangs──┐
//!  it does not answer ──────────────────────────────────────┴──▶ taken out of sight (MNT_DETACH) ──▶ gone
//!                    the last mount: what waits is ended before (MNT_FORCE)
//! ```
//! `MNT_FORCE` is about the whole file system: all that waits for its server fails, for whatever mount of it, and what was not written
//! is lost. So only the last mount is taken away by it. As long as another pod has the share, what it writes waits for the server.
//!
//! The kernel takes a mount out of its list first, and says good-bye to the server after that: a thread that hangs there hangs
//! alone, and holds nothing that anybody needs.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use super::last;
use super::late::{self, Late};
use super::server::answers;
use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, look, place};
use crate::guest::volumes;
use crate::guest::volumes::holders::holders;
use crate::sys::effects::Effects;
use crate::sys::mountinfo::Mount;

/// How long a server may take to answer before what waits for it is ended: longer than one takes to come back elsewhere
/// is no use, since what pods wrote was written when they closed their files.
const TO_ANSWER: Duration = Duration::from_secs(20);
/// How long one that has answered may take until all is written.
const TO_WRITE: Duration = Duration::from_secs(60);
/// How long the kernel may take to end what waits, or to take a mount out of sight.
const TO_END: Duration = Duration::from_secs(5);
/// Mounts on top of each other, at most.
const DEEPEST: usize = 64;

/// Takes away all that is mounted at a place; how many mounts that were.
///
/// # Errors
/// If somebody uses a share whose server answers, with who does.
pub(in crate::guest::pod_volumes) async fn take_away(guest: &Guest, place: &Path) -> Result<usize, Error> {
    for done in 0..DEEPEST {
        let list = place::mounts(guest).await?;
        let Some(mount) = last(&list, place) else { return Ok(done) };
        take_one(guest, mount, &list).await?;
    }
    Err(Error::system("unmount", place)(Errno::ELOOP.into()))
}

async fn take_one(guest: &Guest, mount: &Mount, list: &[Mount]) -> Result<(), Error> {
    let failed = |error| Error::system("unmount", mount.path.clone())(error);
    // Then the server is not needed: the kernel keeps the file system for the others.
    let has_others = is_mounted_elsewhere(mount, list);
    if has_others || answers(guest, mount, TO_ANSWER).await {
        let unmount = |effects: &dyn Effects, path: &Path| effects.unmount(path);
        match attempt(guest, mount, TO_WRITE, unmount).await? {
            Attempt::Gone => return Ok(()),
            Attempt::Refused(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => {
                if !has_others || answers(guest, mount, TO_ANSWER).await {
                    return Err(in_use(guest, mount, list).await?);
                }
            }
            Attempt::Refused(error) => return Err(failed(error)),
            Attempt::Late => {}
        }
    }
    tracing::warn!("{} does not answer: detaching it from {}", mount.source, mount.path.display());
    if !is_mounted_elsewhere(mount, &place::mounts(guest).await?) {
        tracing::warn!("aborting what waits for {}; data that was not written yet is lost", mount.source);
        if let Attempt::Gone = attempt(guest, mount, TO_END, |effects, path| effects.abort(path)).await? {
            return Ok(());
        }
    }
    match attempt(guest, mount, TO_END, |effects, path| effects.detach(path)).await? {
        Attempt::Gone => Ok(()),
        Attempt::Refused(error) => Err(failed(error)),
        Attempt::Late => Err(Error::Silent { what: mount.path.clone(), seconds: TO_END.as_secs() }),
    }
}

/// Whether the file system of a mount is seen by another one, which may have something to write.
fn is_mounted_elsewhere(mount: &Mount, list: &[Mount]) -> bool {
    list.iter().any(|other| other.device == mount.device && other.id != mount.id)
}

/// What became of an attempt.
enum Attempt {
    /// The mount is not there any more.
    Gone,
    /// It is there, and the kernel says why.
    Refused(io::Error),
    /// It is there, and nothing was said in time.
    Late,
}

/// Does something to what is mounted last at its path, if that is this mount. What has not begun in time is not done any more: by
/// then something else may be there.
async fn attempt(
    guest: &Guest,
    mount: &Mount,
    patience: Duration,
    work: impl FnOnce(&dyn Effects, &Path) -> io::Result<()> + Send + 'static,
) -> Result<Attempt, Error> {
    let (effects, copy) = (Arc::clone(&guest.effects), mount.clone());
    let job = move |late: &Late| {
        // It is held only while it is looked at: what is held cannot be unmounted.
        drop(effects.open_place(&copy)?);
        late.check()?;
        work(&*effects, &copy.path)
    };
    let done = late::within(patience, job).await;
    // Whatever was said: the list has the last word.
    let list = place::mounts(guest).await?;
    let is_there = list.iter().any(|one| one.id == mount.id && one.path == mount.path);
    Ok(match done {
        _ if !is_there => Attempt::Gone,
        Some(Err(error)) => Attempt::Refused(error),
        Some(Ok(())) | None => Attempt::Late,
    })
}

async fn in_use(guest: &Guest, mount: &Mount, list: &[Mount]) -> Result<Error, Error> {
    let (root, one, all) = (guest.root.clone(), mount.clone(), list.to_vec());
    let holders = look(&mount.path, move || holders(&root, &one, &all)).await?;
    Ok(volumes::Error::InUse { target: mount.path.clone(), holders }.into())
}
