//! Shares: volumes that no disk of this guest holds, but an NFS server that many nodes mount from at a time.
//!
//! ```text
//!  server ──stage──▶ mounted at the volume's place ──publish──▶ bound to a pod's place
//!           moved: the new one is mounted over it ──────────────▶ and bound over those
//! ```
//! As of disks, what is staged and published is what the kernel's list of mounts says. A server may be dead, and whoever asks
//! its file system for anything then waits for minutes, or for ever. So nothing here asks it but in a thread that is waited for
//! only so long ([`answers`]), one for each share; and [`apart`] takes away what does not answer.
//!
//! **A server that has moved** is known by another address for the same path. Its file system is mounted over what is there, and
//! bound over what pods have, so that at no moment a place is without the share: what is below goes when the place is left. A
//! container that runs keeps the mount that it was started with. It gets errors from there (or waits, if the mount options say
//! `hard`), and the new server when it is started again.
//!
//! [`options`](mod@options) are the mount options.

pub(super) mod apart;
mod options;

use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::MsFlags;

use crate::guest::Guest;
use crate::guest::pod_volumes::{Error, begin, look, place, stage as disks};
use crate::guest::volumes::mount::Source;
use crate::sys::blocking;
use crate::sys::mountinfo::Mount;
use crate::sys::mounting::{How, Place, Propagation, What};
use crate::sys::usage::usage;

/// What the kernel calls the file system.
const KIND: &str = "nfs4";
/// How long a server may take to be mounted from.
const TO_MOUNT: Duration = Duration::from_secs(60);
/// How long one may take to answer where somebody waits for its share.
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

fn has(mount: &Mount, flag: &str) -> bool {
    mount.flags.split(',').any(|one| one == flag)
}

/// Mounts a share at its place, unless it is; again, if its server is another one by now.
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
            let folder = place.clone();
            let make = move || std::fs::DirBuilder::new().mode(0o750).create(folder);
            let outcome = look(&place, move || place::ignore_existing(make())).await?;
            outcome.map_err(Error::system("make the folder", &place))?;
            mount(guest, share, &place, usage).await?;
            tracing::info!("volume {}: {source} is staged at {}", share.volume, place.display());
        }
        Some(there) if !share.is_shown_by(there) || has(there, "ro") != usage.read_only => {
            let found = format!("{} ({}, {})", there.source, there.kind, there.flags);
            return Err(Error::Otherwise { place, found });
        }
        Some(there) if there.source == source => {}
        Some(there) => return mount_over(guest, share, there, usage).await.map(drop),
    }
    follow(guest, share, &place).await
}

/// Looks for the server of the share that is mounted at a path: `ask` says where it is now, and is told whether the share is
/// mounted read-only. If it is elsewhere it is mounted from there, wherever it is seen. Whether it was.
///
/// Nothing else is done to the volume meanwhile: who is asked takes the asking for a wish to have the volume, which must not
/// come after kubelet was told that it is gone.
///
/// # Errors
/// If the new server does not answer or refuses.
pub async fn find_again<F: Future<Output = Option<Share>>>(
    guest: &Guest,
    volume: &str,
    path: &str,
    ask: impl FnOnce(bool) -> F,
) -> Result<bool, Error> {
    let _operation = begin(guest, volume, "its server is looked for").await?;
    let place = place::of_volume(guest, path).await?;
    let list = place::mounts(guest).await?;
    let Some(shown) = at(&list, &place) else { return Ok(false) };
    let Some(share) = ask(has(staged(&list, shown), "ro")).await else { return Ok(false) };
    if !share.is_shown_by(shown) {
        return Ok(false);
    }
    move_to(guest, &share, &list).await
}

/// The mount of which a mount was bound: what is bound came later.
fn staged<'m>(list: &'m [Mount], shown: &'m Mount) -> &'m Mount {
    list.iter().find(|mount| mount.device == shown.device).unwrap_or(shown)
}

/// Mounts a share from this server wherever it is seen from another. Whether it was.
async fn move_to(guest: &Guest, share: &Share, list: &[Mount]) -> Result<bool, Error> {
    let root = kubelet(guest).await?;
    let is_its = |mount: &&Mount| share.is_shown_by(mount) && mount.path.starts_with(&root);
    let Some(staged) = list.iter().find(is_its) else { return Ok(false) };
    let is_new = last(list, &staged.path).is_some_and(|last| last.source != share.source());
    if is_new {
        let options = options::of_mount(staged);
        let usage = Usage { options, read_only: has(staged, "ro"), single: false };
        return mount_over(guest, share, staged, &usage).await;
    }
    follow(guest, share, &staged.path).await?;
    Ok(false)
}

/// Mounts a share over the same from another address, wherever that is seen. Whether it was: the kernel tells whether a server
/// is the same behind both (trunking, RFC 8881), which it goes on to reach by the first.
async fn mount_over(guest: &Guest, share: &Share, there: &Mount, usage: &Usage) -> Result<bool, Error> {
    match mount(guest, share, &there.path, usage).await {
        Err(Error::System { source, .. }) if source.raw_os_error() == Some(Errno::EBUSY as i32) => {
            if answers(guest, there, PATIENCE).await {
                return Ok(false);
            }
            let why = format!("the kernel takes it for the server of {}, which is in use here", there.source);
            return Err(share.no_server(why));
        }
        mounted => mounted?,
    }
    tracing::warn!("volume {}: its server has moved from {} to {}", share.volume, there.source, share.server);
    follow(guest, share, &there.path).await?;
    Ok(true)
}

/// kubelet's folder, without links.
async fn kubelet(guest: &Guest) -> Result<PathBuf, Error> {
    let root = guest.pod_volumes.root()?.to_owned();
    look(&root.clone(), move || std::fs::canonicalize(&root).unwrap_or(root)).await
}

/// Binds what is staged over what pods have from other servers of the share.
async fn follow(guest: &Guest, share: &Share, staging: &Path) -> Result<(), Error> {
    let list = place::mounts(guest).await?;
    let (source, root) = (share.source(), kubelet(guest).await?);
    let is_old = |mount: &&Mount| {
        let is_last = last(&list, &mount.path).is_some_and(|last| last.id == mount.id);
        is_last
            && share.is_shown_by(mount)
            && mount.source != source
            && mount.path != staging
            && mount.path.starts_with(&root)
    };
    for old in list.iter().filter(is_old) {
        tracing::warn!("volume {}: {} is shown from {source} now", share.volume, old.path.display());
        bind_over(guest, staging, old).await?;
    }
    Ok(())
}

/// Binds what is staged over a mount, with its flags. What is mounted there is not asked for anything.
async fn bind_over(guest: &Guest, staging: &Path, old: &Mount) -> Result<(), Error> {
    let flags = [
        ("ro", MsFlags::MS_RDONLY),
        ("nosuid", MsFlags::MS_NOSUID),
        ("nodev", MsFlags::MS_NODEV),
        ("noexec", MsFlags::MS_NOEXEC),
    ];
    let flags = flags.into_iter().filter(|(word, _)| has(old, word)).map(|(_, flag)| flag).collect();
    let (effects, from, to) = (Arc::clone(&guest.effects), staging.to_owned(), old.path.clone());
    let work = move || {
        let (source, target) = (Place::open(&from)?, Place::open_mounted_folder(&to)?);
        let what = What::Bind { source: &source, recursive: false };
        effects.mount(&what, &target, How { flags, propagation: None })
    };
    look(&old.path, work).await?.map_err(Error::system("show the share at", &old.path))
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
    let is_same = |mount: &Mount| mount.device == staged.device;
    let is_others = |mount: &&Mount| is_same(mount) && mount.path != staging && mount.path != target;
    if let Some(other) = list.iter().find(is_others).filter(|_| usage.single) {
        return Err(Error::Taken(other.path.clone()));
    }
    if !answers(guest, staged, PATIENCE).await {
        return Err(share.no_server(format!("it has not answered for {} s", PATIENCE.as_secs())));
    }
    let read_only = usage.read_only || has(staged, "ro");
    match last(&list, &target) {
        Some(there) if share.is_shown_by(there) && has(there, "ro") == read_only => {
            if !is_same(there) {
                bind_over(guest, &staging, there).await?;
            }
            return Ok(());
        }
        Some(there) => {
            let found = format!("{} ({}, {})", there.source, there.kind, there.flags);
            return Err(Error::Otherwise { place: target, found });
        }
        None => {}
    }
    // Of the options those are for a bind mount that are no file system's own.
    disks::bind(guest, Source::Bind(&staging), &target, read_only, &options::of_bind(&usage.options)).await?;
    tracing::info!("volume {}: published at {}", share.volume, target.display());
    Ok(())
}

/// Whether the server of a share that is mounted answers so soon. While a thread waits for it already it does not.
pub(super) async fn answers(guest: &Guest, mount: &Mount, patience: Duration) -> bool {
    let key = Path::new("does it answer").join(&mount.source);
    let Ok(turn) = guest.pod_volumes.busy.begin(&key, "its server is asked") else { return false };
    let path = mount.path.clone();
    let asked = blocking::run(move || {
        let told = usage(&path);
        drop(turn);
        told
    });
    match tokio::time::timeout(patience, asked).await {
        Ok(Ok(_)) => true,
        // Of other refusals it is the server that refuses.
        Ok(Err(error)) => !error.raw_os_error().map(Errno::from_raw).is_some_and(is_of_a_dead_server),
        Err(_) => false,
    }
}

fn is_of_a_dead_server(error: Errno) -> bool {
    const CODES: [Errno; 9] = [
        Errno::EIO,
        Errno::ESTALE,
        Errno::ETIMEDOUT,
        Errno::ECONNREFUSED,
        Errno::ECONNRESET,
        Errno::EHOSTUNREACH,
        Errno::EHOSTDOWN,
        Errno::ENETUNREACH,
        Errno::ENOTCONN,
    ];
    CODES.contains(&error)
}

/// Mounts a share over whatever is at a place. If nobody waits for it any more when it is mounted, it is unmounted.
async fn mount(guest: &Guest, share: &Share, place: &Path, usage: &Usage) -> Result<(), Error> {
    let options = options::of(share, &usage.options, usage.read_only)?;
    let source = share.source();
    let busy = |doing| Error::Busy { volume: share.volume.clone(), doing };
    let key = Path::new("is mounted from").join(&source);
    let turn = guest.pod_volumes.busy.begin(&key, "its server is asked for it").map_err(busy)?;
    let (effects, target, is_late) =
        (Arc::clone(&guest.effects), place.to_owned(), Arc::new(AtomicBool::new(false)));
    let (given_up, from) = (Arc::clone(&is_late), PathBuf::from(&source));
    let work = blocking::run(move || {
        // Or else what is mounted over it comes to be over all that is bound of it, and goes with any of them.
        let how = How { flags: options.flags, propagation: Some(Propagation::Private) };
        let mut done = Err(Errno::EINVAL.into());
        for data in [options.data.clone(), options::for_older_kernels(&options.data)] {
            let place = Place::open_mounted_folder(&target)?;
            done = effects.mount(&What::FileSystem { source: &from, kind: KIND, data: &data }, &place, how);
            if !matches!(&done, Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32)) {
                break;
            }
        }
        if done.is_ok() && given_up.load(Ordering::SeqCst) {
            // What is mounted there is this: nobody else does anything to the volume that would leave a mount there.
            let _ = effects.detach(&target);
        }
        drop(turn);
        done
    });
    let Ok(done) = tokio::time::timeout(TO_MOUNT, work).await else {
        is_late.store(true, Ordering::SeqCst);
        return Err(share.no_server(format!("it cannot be mounted within {} s", TO_MOUNT.as_secs())));
    };
    done.map_err(|error| match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENODEV) => Error::NoNfs,
        Some(code) if is_of_a_dead_server(code) => share.no_server(error.to_string()),
        _ => Error::system("mount the share at", place)(error),
    })
}

#[cfg(test)]
pub(crate) mod tests;
