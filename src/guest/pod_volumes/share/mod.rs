//! Shares: volumes that no disk of this guest holds, but an NFS server that many nodes mount from at a time.
//!
//! ```text
//!  server ──stage──▶ mounted at the volume's place ──publish──▶ bound to a pod's place
//!           moved: it is taken away there, and ────────────────▶ bound over that
//!                  mounted from the new one
//! ```
//! As of disks, what is staged and published is what the kernel's list of mounts says. A server may be dead, and whoever asks
//! its file system for anything then waits for minutes, or for ever. So nothing here asks it but in a thread that is waited for
//! only so long (`server`, `mounts`); and `apart` takes away what does not answer, without harm to who still has it.
//!
//! **A server that has moved** (`moved`) is known by another address for the same path. Nobody but the agent uses the mount at
//! the volume's place, so the old one is taken away when the new one is made. Over what pods have the new one is bound, so that at
//! no moment their place is without the share: what is below goes when the place is left. A container that runs keeps the mount
//! that it was started with. It gets errors from there (or waits, if the mount options say `hard`), and the new server when it is
//! started again.
//!
//! `options` are the mount options, and `late` waits for threads only so long.

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

/// How long a server may take to answer where somebody waits for its share.
const PATIENCE: Duration = Duration::from_secs(10);

/// A share, as the host half says where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The volume's name.
    pub volume: String,
    /// Its server.
    pub server: IpAddr,
    /// What the server serves it as.
    pub path: String,
    /// How whoever runs the server wants it to be mounted; nothing if that is not said.
    pub options: Vec<String>,
}

/// How a share is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// As for mount(8).
    pub options: Vec<String>,
    /// Nobody on this node writes to it.
    pub read_only: bool,
    /// No second pod may have it.
    pub single: bool,
}

impl Share {
    /// As the kernel calls it: `10.0.0.1:/pvc-1`.
    fn source(&self) -> String {
        match self.server {
            IpAddr::V4(address) => format!("{address}:{}", self.path),
            IpAddr::V6(address) => format!("[{address}]:{}", self.path),
        }
    }

    /// Whether this mount is of the share, from whatever server.
    fn is_shown_by(&self, mount: &Mount) -> bool {
        is_share(mount) && mount.source.split_once(":/").is_some_and(|(_, path)| path == &self.path[1..])
    }

    fn no_server(&self, why: impl Into<String>) -> Error {
        Error::NoServer { address: self.source(), why: why.into() }
    }
}

/// Whether a mount is a share.
pub(super) fn is_share(mount: &Mount) -> bool {
    matches!(mount.kind.as_str(), "nfs" | "nfs4")
}

/// What is mounted last at a place, if that is a share.
pub(super) fn at<'m>(list: &'m [Mount], place: &Path) -> Option<&'m Mount> {
    last(list, place).filter(|mount| is_share(mount))
}

fn last<'m>(list: &'m [Mount], place: &Path) -> Option<&'m Mount> {
    list.iter().rfind(|mount| mount.path == place)
}

/// Something else is mounted where a share is wanted.
fn otherwise(there: &Mount) -> Error {
    let found = format!("{} ({}, {})", there.source, there.kind, there.flags);
    Error::Otherwise { place: there.path.clone(), found }
}

/// Mounts a share at its place, unless it is; anew, if it is there from a server at another address, which does not answer.
///
/// kubelet repeats the address that it was told when the volume was attached: what answers is better.
///
/// # Errors
/// If the server does not answer or refuses, the kernel has no NFS, or something else is there.
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
            // The agent may have ended right after it was mounted.
            let (effects, there) = (Arc::clone(&guest.effects), there.clone());
            let set = move || effects.set_private(&effects.open_place(&there)?);
            look(&place, set).await?.map_err(Error::system("keep to itself what is mounted at", &place))?;
        }
        Some(there) => {
            let made = mounts::make(guest, share, usage).await?;
            mounts::put(guest, made, &place, Some(there)).await?;
            tracing::warn!("volume {}: its server has moved from {} to {source}", share.volume, there.source);
        }
    }
    moved::follow(guest, share, &place).await
}

/// Makes the folder that a share is mounted on.
async fn make_folder(place: &Path) -> Result<(), Error> {
    let folder = place.to_owned();
    let make = move || place::ignore_existing(std::fs::DirBuilder::new().mode(0o750).create(folder));
    look(place, make).await?.map_err(Error::system("create the directory", place))
}

/// Shows a share that is staged to a pod, unless it is.
///
/// # Errors
/// If it is not staged, its server does not answer, or something else is there.
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
    // A part of it that kubelet has bound for a container is no other pod's.
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
    // Of the options those are for a bind mount that are no file system's own.
    let flags = Options::parse(&options::of_bind(&usage.options), read_only)?.flags;
    mounts::bind(guest, staged, &target, flags).await?;
    tracing::info!("volume {}: published at {}", share.volume, target.display());
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
