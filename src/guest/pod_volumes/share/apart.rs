//! Unmounts shares, also when their server is dead.
//!
//! ```text
//!  the server answers, or other ──▶ umount(2) ──done──▶ removed
//!  mounts have the file system         │ └──in use, and it answers──▶ refused, with its users
//!                                      └──in use, or hangs──┐
//!  it does not answer ──────────────────────────────────────┴──▶ detached lazily (MNT_DETACH) ──▶ removed
//!                    the last mount: what waits is aborted before (MNT_FORCE)
//! ```
//! `MNT_FORCE` affects the whole file system: all operations that wait for the server fail, whichever mount they
//! used, and unwritten data is lost. So it is used only for the last mount. As long as another pod uses the share,
//! its writes wait for the server.
//!
//! The kernel first takes a mount out of its list, and then closes the session with the server. A thread that
//! hangs in that second step holds nothing that others need.

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

/// Time that a server has to respond before the operations that wait for it are aborted. A longer time than a
/// server takes to restart elsewhere is of no use, because what pods wrote was written back when they closed their
/// files.
const TO_ANSWER: Duration = Duration::from_secs(20);
/// Time limit for writing back all data to a server that has responded.
const TO_WRITE: Duration = Duration::from_secs(60);
/// Time limit for the kernel to abort the waiting operations, or to detach a mount.
const TO_END: Duration = Duration::from_secs(5);
/// Limit on the mounts on top of each other at one mount point.
const DEEPEST: usize = 64;

/// Unmounts everything at a path, and returns the number of mounts.
///
/// # Errors
/// If a share whose server responds is in use; the error names the users.
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
    // With other mounts the server is not needed: the kernel keeps the file system for those.
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

/// Returns whether the file system has another mount, which may still have data to write.
fn is_mounted_elsewhere(mount: &Mount, list: &[Mount]) -> bool {
    list.iter().any(|other| other.device == mount.device && other.id != mount.id)
}

/// Result of an attempt.
enum Attempt {
    /// The mount no longer exists.
    Gone,
    /// The mount exists, and the kernel returned this error.
    Refused(io::Error),
    /// The mount exists, and the kernel did not return in time.
    Late,
}

/// Runs `work` on the last mount at its path, if that is this mount. Work that has not begun in time is cancelled,
/// because by then something else may be mounted there.
async fn attempt(
    guest: &Guest,
    mount: &Mount,
    patience: Duration,
    work: impl FnOnce(&dyn Effects, &Path) -> io::Result<()> + Send + 'static,
) -> Result<Attempt, Error> {
    let (effects, copy) = (Arc::clone(&guest.effects), mount.clone());
    let job = move |late: &Late| {
        // Held only for this check, because a mount that is held open cannot be unmounted.
        drop(effects.open_place(&copy)?);
        late.check()?;
        work(&*effects, &copy.path)
    };
    let done = late::within(patience, job).await;
    // The list of mounts decides, whatever the result was.
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
