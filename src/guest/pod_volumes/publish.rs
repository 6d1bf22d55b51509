//! Publishes a staged volume to a pod.
//!
//! A disk may disappear after its volume was staged and come back with a different number, for example a SCSI disk
//! that gets the same address again at once, for which the kernel then handles the removal of its predecessor.
//! kubelet stages only once and would repeat the publish forever, so the volume is staged again from the disk that
//! is present now.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::pod_volumes::place::{self, DEVICE, Shown};
use crate::guest::pod_volumes::{Access, Error, awaited, begin, disk, group, remove, stage};
use crate::guest::volumes::mount::Source;
use crate::guest::volumes::options::Options;
use crate::sys::mountinfo::Mount;

/// Flags of the staged mount that are inherited by its bind mounts.
const KEPT: [&str; 3] = ["nosuid", "nodev", "noexec"];

/// Time that a vanished disk has to come back before the publish fails. kubelet then retries.
pub(super) const TO_RETURN: Duration = Duration::from_secs(5);

/// Request to publish a volume.
#[derive(Debug, Clone)]
pub struct Publish {
    /// Volume, and properties of its disk.
    pub disk: disk::Wanted,
    /// Path where it is staged.
    pub staging: String,
    /// Path in the pod's directory.
    pub target: String,
    /// Kind of access.
    pub access: Access,
    /// True if the volume is staged read-only.
    pub staged_read_only: bool,
    /// True if the pod must not write to it.
    pub read_only: bool,
    /// True if no second pod may use it.
    pub single: bool,
}

/// Publishes a volume, unless it is published already.
///
/// # Errors
/// If it is not staged, or something else is mounted at the target.
pub async fn publish(guest: &Guest, wanted: &Publish) -> Result<(), Error> {
    let volume = &wanted.disk.volume;
    let _operation = begin(guest, volume, "it is being published").await?;
    let staging = place::existing(guest, &wanted.staging).await?;
    let target = place::existing(guest, &wanted.target).await?;
    if staging == target {
        let problem = "is where the volume is staged";
        return Err(Error::Path { path: wanted.target.clone(), problem });
    }
    let (mut staged, mut list) = place::look_at(guest, &staging).await?;
    let has_left = match &staged {
        Some(staged) => staged.gone,
        None => awaited::is(guest, &staging).await?,
    };
    if has_left {
        stage_again(guest, wanted, &staging).await?;
        (staged, list) = place::look_at(guest, &staging).await?;
    }
    let not_staged = |found| Error::NotStaged { place: staging.clone(), found };
    let staged = staged.ok_or_else(|| not_staged("nothing is mounted there"))?;
    if staged.gone {
        return Err(Error::Gone(staging));
    }
    let (source, mut options, group) = match &wanted.access {
        Access::Block if staged.is_device => (staging.join(DEVICE), Vec::new(), None),
        Access::Mount { kind, options, group } if !staged.is_device => {
            if kind.as_ref().is_some_and(|kind| *kind != staged.mount.kind) {
                return Err(not_staged("it is a file system of another type"));
            }
            // Options that would be invalid for a mount are refused here, too.
            Options::parse(options, wanted.read_only)?;
            (staging.clone(), options.clone(), *group)
        }
        _ => {
            return Err(not_staged(
                "it is staged with the other volume mode: as a block device, or as a file system",
            ));
        }
    };
    if let Some(found) = disk::known(guest, &wanted.disk)?
        && staged.number.is_some_and(|number| number != found.disk.number)
    {
        return Err(not_staged("it is another disk"));
    }
    if wanted.single
        && let Some(other) = published(&list, &staged).find(|place| *place != staging && *place != target)
    {
        return Err(Error::Taken(other));
    }
    options.extend(KEPT.into_iter().filter(|word| staged.mount.has_flag(word)).map(str::to_owned));
    let read_only = wanted.read_only || staged.mount.has_flag("ro");
    if place::shown_now(guest, &list, &target).await?.is_some_and(|shown| shown.gone) {
        remove::dead(guest, &target).await?;
    }
    let new = stage::bind(guest, Source::Bind(&source), &target, read_only, &options).await?;
    if let Some(number) = group.filter(|_| !read_only) {
        group::give(guest, &target, None, number).await?;
    }
    if new {
        tracing::info!("volume {volume}: published at {}", target.display());
    }
    Ok(())
}

/// Stages a volume again whose disk has disappeared and come back. Nothing is formatted, as it had a file system.
///
/// # Errors
/// If the disk does not come back soon, or its contents are not as before.
async fn stage_again(guest: &Guest, wanted: &Publish, staging: &Path) -> Result<(), Error> {
    let found = match disk::find(guest, &wanted.disk, TO_RETURN).await {
        Err(Error::NoDisk { .. }) => return Err(Error::Gone(staging.to_owned())),
        found => found?,
    };
    tracing::warn!("volume {}: its disk was removed and is back as {}", wanted.disk.volume, found.disk.name);
    let stage = stage::Stage {
        disk: wanted.disk.clone(),
        staging: wanted.staging.clone(),
        access: wanted.access.clone(),
        read_only: wanted.staged_read_only,
        again: true,
    };
    awaited::set(guest, staging, true).await?;
    stage::from_disk(guest, &stage, staging, found).await
}

/// Returns all paths at which the staged volume is mounted.
fn published<'a>(list: &'a [Mount], staged: &'a Shown) -> impl Iterator<Item = PathBuf> + 'a {
    let device_at = Path::new(DEVICE);
    list.iter()
        .filter(|mount| mount.device == staged.mount.device && mount.root == staged.mount.root)
        .map(|mount| PathBuf::from(&mount.mount_point))
        // The device node is also in /dev itself, but that mount has a different root in its file system.
        .map(move |place| {
            let is_staged = place == Path::new(&staged.mount.mount_point) && place.ends_with(device_at);
            if is_staged { place.parent().unwrap_or(&place).to_owned() } else { place }
        })
}
