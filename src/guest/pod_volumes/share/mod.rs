//! Shares: volumes that are not on a disk of this guest, but on an NFS server from which many nodes mount at a
//! time.
//!
//! ```text
//!  server ──stage──▶ mounted at the volume's place ──publish──▶ bound to a pod's place
//!           moved: it is unmounted there, and ───────────────▶ bound over that
//!                  mounted from the new one
//! ```
//! As with disks, the kernel's list of mounts decides what is staged and published. A server may be dead; a call
//! to its file system then blocks for minutes, or forever. So such calls are made only on threads that are waited
//! for only for a limited time (`server`, `mounts`); and `apart` unmounts what does not respond, without harm to
//! others that use it.
//!
//! **A server that has moved** (`moved`) has a different address for the same path. Only the agent uses the mount
//! at the volume's place, so the old mount is removed there when the new one has been made. The new one is
//! bind-mounted over the mounts of pods, so that their place is never without the share; the old mount below is
//! removed at unpublish. A running container keeps the mount with which it was started. Its operations fail (or
//! wait, if the mount options have `hard`), and it gets the new server when it is restarted.
//!
//! `options` computes the mount options, and `late` waits for threads for a limited time.

pub(super) mod apart;
mod late;
mod mounts;
mod moved;
mod options;
pub(super) mod server;

use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, begin, look, place};
use crate::guest::volumes::options::Options;
use crate::sys::mountinfo::Mount;
pub use moved::find_again;
use server::answers;

/// Time limit for a response of the server while a caller waits for its share.
const PATIENCE: Duration = Duration::from_secs(10);

/// Share, with its location as given by the host half.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Name of the volume.
    pub volume: String,
    /// Address of its server.
    pub server: IpAddr,
    /// Path under which the server exports it.
    pub path: String,
    /// Mount options that the operator of the server recommends. If empty, the agent's own are used.
    pub options: Vec<String>,
}

/// Use of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// Mount options, as for mount(8).
    pub options: Vec<String>,
    /// True if nobody on this node may write to it.
    pub read_only: bool,
    /// True if no second pod may use it.
    pub single: bool,
}

impl Share {
    /// Returns the source as the kernel lists it: `10.0.0.1:/pvc-1`.
    fn source(&self) -> String {
        match self.server {
            IpAddr::V4(address) => format!("{address}:{}", self.path),
            IpAddr::V6(address) => format!("[{address}]:{}", self.path),
        }
    }

    /// Returns whether a mount is of this share, from whatever server.
    fn is_shown_by(&self, mount: &Mount) -> bool {
        is_share(mount) && mount.source.split_once(":/").is_some_and(|(_, path)| path == &self.path[1..])
    }

    fn no_server(&self, why: impl Into<String>) -> Error {
        Error::NoServer { address: self.source(), why: why.into() }
    }
}

/// Returns whether a mount is a share.
pub(super) fn is_share(mount: &Mount) -> bool {
    matches!(mount.kind.as_str(), "nfs" | "nfs4")
}

/// Returns the last mount at a path, if that is a share.
pub(super) fn at<'m>(list: &'m [Mount], place: &Path) -> Option<&'m Mount> {
    last(list, place).filter(|mount| is_share(mount))
}

fn last<'m>(list: &'m [Mount], place: &Path) -> Option<&'m Mount> {
    list.iter().rfind(|mount| mount.path == place)
}

/// Returns the error that something else is mounted where a share is wanted.
fn otherwise(there: &Mount) -> Error {
    let found = format!("{} ({}, {})", there.source, there.kind, there.flags);
    Error::Otherwise { place: there.path.clone(), found }
}

/// Mounts a share at its staging path, unless it is mounted there. It is mounted again if it is there from a
/// server at a different address which does not respond.
///
/// kubelet repeats the address from the time when the volume was attached, so a server that responds takes
/// precedence over that address.
///
/// # Errors
/// If the server does not respond or refuses, the kernel has no NFS, or something else is mounted there.
pub async fn stage(guest: &Guest, share: &Share, staging: &str, usage: &Usage) -> Result<(), Error> {
    let _operation = begin(guest, &share.volume, "it is being staged").await?;
    let place = place::existing(guest, staging).await?;
    let list = place::mounts(guest).await?;
    let source = share.source();
    match last(&list, &place) {
        None => {
            make_folder(&place).await?;
            let made = mounts::make(guest, share, usage).await?;
            mounts::put(guest, made, &place, None).await?;
            tracing::info!("volume {}: {source} is staged at {}", share.volume, place.display());
        }
        Some(there) if !share.is_shown_by(there) || there.has_flag("ro") != usage.read_only => {
            return Err(otherwise(there));
        }
        Some(there) if there.source == source || answers(guest, there, PATIENCE).await => {
            // The agent may have ended between mounting it and making the mount private.
            let (effects, there) = (Arc::clone(&guest.effects), there.clone());
            let set = move || effects.set_private(&effects.open_place(&there)?);
            look(&place, set).await?.map_err(Error::system("set private mount propagation for", &place))?;
        }
        Some(there) => {
            let made = mounts::make(guest, share, usage).await?;
            mounts::put(guest, made, &place, Some(there)).await?;
            tracing::warn!("volume {}: its server has moved from {} to {source}", share.volume, there.source);
        }
    }
    moved::follow(guest, share, &place).await
}

/// Creates the directory on which a share is mounted.
async fn make_folder(place: &Path) -> Result<(), Error> {
    let folder = place.to_owned();
    let make = move || place::ignore_existing(std::fs::DirBuilder::new().mode(0o750).create(folder));
    look(place, make).await?.map_err(Error::system("create the directory", place))
}

/// Publishes a staged share to a pod, unless it is published already.
///
/// # Errors
/// If it is not staged, its server does not respond, or something else is mounted there.
pub async fn publish(
    guest: &Guest,
    share: &Share,
    (staging, target): (&str, &str),
    usage: &Usage,
) -> Result<(), Error> {
    let _operation = begin(guest, &share.volume, "it is being published").await?;
    let path = target;
    let (staging, target) = (place::existing(guest, staging).await?, place::existing(guest, target).await?);
    if staging == target {
        let problem = "is where the volume is staged";
        return Err(Error::Path { path: path.to_owned(), problem });
    }
    let list = place::mounts(guest).await?;
    let not_staged = |found| Error::NotStaged { place: staging.clone(), found };
    let staged = last(&list, &staging).ok_or_else(|| not_staged("nothing is mounted there"))?;
    if !share.is_shown_by(staged) {
        return Err(not_staged("it is not the share"));
    }
    // A part of it that kubelet has bind-mounted for a container does not count as another pod.
    let is_other = |mount: &&Mount| {
        (mount.device, &mount.root) == (staged.device, &staged.root)
            && mount.path != staging
            && mount.path != target
    };
    if let Some(other) = list.iter().find(is_other).filter(|_| usage.single) {
        return Err(Error::Taken(other.path.clone()));
    }
    if !answers(guest, staged, PATIENCE).await {
        return Err(share.no_server(format!("it has not answered for {} s", PATIENCE.as_secs())));
    }
    let read_only = usage.read_only || staged.has_flag("ro");
    match last(&list, &target) {
        Some(there) if share.is_shown_by(there) && there.has_flag("ro") == read_only => {
            if there.device != staged.device {
                mounts::bind_over(guest, staged, there).await?;
            }
            return Ok(());
        }
        Some(there) => {
            return Err(otherwise(there));
        }
        None => {}
    }
    make_folder(&target).await?;
    // Only those options apply to a bind mount that are not the file system's own.
    let flags = Options::parse(&options::of_bind(&usage.options), read_only)?.flags;
    mounts::bind(guest, staged, &target, flags).await?;
    tracing::info!("volume {}: published at {}", share.volume, target.display());
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
