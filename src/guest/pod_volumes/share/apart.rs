//! Takes shares away from their places, also when their server is dead.
//!
//! ```text
//!  the server answers ──▶ umount(2) ──done──▶ gone
//!                            │ └──in use──▶ refused, with who uses it
//!                            └──hangs─┐
//!  it does not ───────────────────────┴──▶ what waits for it is ended (MNT_FORCE) ──▶ taken out of sight (MNT_DETACH) ──▶ gone
//! ```
//! The kernel takes a mount out of its list first, and says good-bye to the server after that: a thread that hangs there hangs
//! alone, and holds nothing that anybody needs.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use super::{answers, last};
use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, look, place};
use crate::guest::volumes;
use crate::guest::volumes::holders::holders;
use crate::sys::blocking;
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
    if answers(guest, mount, TO_ANSWER).await {
        let unmount = |effects: &dyn Effects, path: &Path| effects.unmount(path);
        match attempt(guest, mount, TO_WRITE, unmount).await? {
            Attempt::Gone => return Ok(()),
            Attempt::Refused(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => {
                return Err(in_use(guest, mount, list).await?);
            }
            Attempt::Refused(error) => return Err(failed(error)),
            Attempt::Late => {}
        }
    }
    tracing::warn!(
        "{} does not answer: what waits for it is ended, and it is taken away from {}; what was not written yet is lost",
        mount.source,
        mount.path.display()
    );
    if let Attempt::Gone = attempt(guest, mount, TO_END, |effects, path| effects.abort(path)).await? {
        return Ok(());
    }
    match attempt(guest, mount, TO_END, |effects, path| effects.detach(path)).await? {
        Attempt::Gone => Ok(()),
        Attempt::Refused(error) => Err(failed(error)),
        Attempt::Late => Err(Error::Silent { what: mount.path.clone(), seconds: TO_END.as_secs() }),
    }
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

async fn attempt(
    guest: &Guest,
    mount: &Mount,
    patience: Duration,
    work: impl FnOnce(&dyn Effects, &Path) -> io::Result<()> + Send + 'static,
) -> Result<Attempt, Error> {
    let (effects, path) = (Arc::clone(&guest.effects), mount.path.clone());
    let done = tokio::time::timeout(patience, blocking::run(move || work(&*effects, &path))).await;
    // Whatever was said: the list has the last word.
    let list = place::mounts(guest).await?;
    let is_there = list.iter().any(|one| one.id == mount.id && one.path == mount.path);
    Ok(match done {
        _ if !is_there => Attempt::Gone,
        Ok(Err(error)) => Attempt::Refused(error),
        Ok(Ok(())) | Err(_) => Attempt::Late,
    })
}

async fn in_use(guest: &Guest, mount: &Mount, list: &[Mount]) -> Result<Error, Error> {
    let (root, one, all) = (guest.root.clone(), mount.clone(), list.to_vec());
    let holders = look(&mount.path, move || holders(&root, &one, &all)).await?;
    Ok(volumes::Error::InUse { target: mount.path.clone(), holders }.into())
}
