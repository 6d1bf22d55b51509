//! Stages a volume: finds its disk, formats it if it is blank, mounts it, and grows the file system to the size of
//! the disk.

use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::guest::disks::identity::{KnownDisk, Serial};
use crate::guest::disks::lookup;
use crate::guest::disks::uses::{self, Use};
use crate::guest::pod_volumes::place::{self, DEVICE};
use crate::guest::pod_volumes::{Access, Error, awaited, begin, disk, expand, group, look, publish, remove};
use crate::guest::volumes::format::{Format, Kind, format};
use crate::guest::volumes::held::Held;
use crate::guest::volumes::mount::{Mount, Source, mount};
use crate::guest::volumes::{self, intent};
use crate::sys::error_chain;
use crate::sys::superblock;

/// File system that is made if none is requested.
pub const USUAL: &str = "ext4";
/// Time limit for making a file system.
const TO_FORMAT: Duration = Duration::from_secs(30 * 60);
/// Time limit for mounting, including a check of the file system.
pub(super) const TO_MOUNT: Duration = Duration::from_secs(30 * 60);

/// Request to stage a volume.
#[derive(Debug, Clone)]
pub struct Stage {
    /// Volume, and properties of its disk.
    pub disk: disk::Wanted,
    /// Staging path in kubelet's directory.
    pub staging: String,
    /// Kind of access.
    pub access: Access,
    /// True if nobody may write to it.
    pub read_only: bool,
    /// True if it was staged before and so has a file system: none is made.
    pub again: bool,
}

/// Stages a volume, unless it is staged already.
///
/// # Errors
/// If its disk does not appear or cannot be used, or something else is mounted there.
pub async fn stage(guest: &Guest, wanted: &Stage) -> Result<(), Error> {
    let volume = &wanted.disk.volume;
    let _operation = begin(guest, volume, "it is being staged").await?;
    let place = place::existing(guest, &wanted.staging).await?;
    let found = disk::find(guest, &wanted.disk, disk::LONGEST).await?;
    from_disk(guest, wanted, &place, found).await
}

/// Stages a volume from the disk that was found, or from the next one if that disk is about to disappear.
pub(super) async fn from_disk(
    guest: &Guest,
    wanted: &Stage,
    place: &Path,
    mut found: disk::Found,
) -> Result<(), Error> {
    let volume = &wanted.disk.volume;
    let within = if wanted.again { publish::TO_RETURN } else { disk::LONGEST };
    let end = Instant::now() + within * 2;
    let new = loop {
        let disk = &found.disk;
        match stage_disk(guest, wanted, place, &found).await {
            // This was the previous disk at the address, or one that a busy kernel removes once more, too late. The
            // disk that is meant has yet to appear.
            Err(error)
                if error.is_of_a_device() && Instant::now() < end && disk::leaves(guest, disk).await =>
            {
                tracing::info!("volume {volume}: {} was removed", disk.name);
                found = disk::find(guest, &wanted.disk, within).await?;
            }
            staged => break staged?,
        }
    };
    awaited::set(guest, place, false).await?;
    if new {
        tracing::info!("volume {volume}: {} is staged at {}", found.disk.name, place.display());
    }
    Ok(())
}

async fn stage_disk(guest: &Guest, wanted: &Stage, place: &Path, found: &disk::Found) -> Result<bool, Error> {
    let held = disk::hold(guest, &wanted.disk, &found.disk).await?;
    if !found.sure && is_anothers(guest, place, &found.disk).await? {
        let (volume, disk) = (wanted.disk.volume.clone(), lookup::describe(&found.disk));
        return Err(Error::Unsure { volume, disk, what: "not detached from its present user" });
    }
    match &wanted.access {
        Access::Block => stage_device(guest, wanted, place, &held).await,
        Access::Mount { kind, options, group } => {
            let device = (found, &held);
            let new = stage_mount(guest, wanted, place, device, (kind.as_deref(), options)).await?;
            if let Some(number) = group.filter(|_| !wanted.read_only) {
                group::give(guest, place, Some(&held), number).await?;
            }
            Ok(new)
        }
    }
}

/// Returns whether a disk is in use at places that do not belong to this volume.
async fn is_anothers(guest: &Guest, place: &Path, disk: &Arc<KnownDisk>) -> Result<bool, Error> {
    let (root, disk, place) = (guest.root.clone(), Arc::clone(disk), place.to_owned());
    let asked = disk.name.clone();
    let look_at = move || {
        let all = uses::of(&root, &disk);
        let is_ours = |one: &Use| match one {
            Use::Mounted(at) | Use::Bound(at) => {
                Path::new(at) == place || Path::new(at) == place.join(DEVICE)
            }
            Use::Swap(_) | Use::Holder(_) => false,
        };
        !all.is_empty() && !all.iter().any(is_ours)
    };
    look(Path::new(&asked), look_at).await
}

async fn stage_mount(
    guest: &Guest,
    wanted: &Stage,
    place: &Path,
    (disk::Found { disk, sure }, held): (&disk::Found, &Held),
    (kind, options): (Option<&str>, &[String]),
) -> Result<bool, Error> {
    if let (Some(shown), _) = place::look_at(guest, place).await? {
        if shown.gone {
            remove::dead(guest, place).await?;
        } else if shown.is_device {
            let found = "a block volume is staged there".to_owned();
            return Err(Error::Otherwise { place: place.to_owned(), found });
        }
    }
    let mount_it = Mount {
        source: Source::Device(held),
        target: place,
        kind,
        options,
        read_only: wanted.read_only,
        make_target: true,
        over_contents: true,
        propagation: None,
        check: true,
        deadline: TO_MOUNT,
    };
    let mounted = match mount(guest, &mount_it).await {
        Err(volumes::Error::NoFileSystem { .. } | volumes::Error::Unfinished { .. })
            if !wanted.read_only && !wanted.again =>
        {
            if !sure {
                let (volume, disk) = (wanted.disk.volume.clone(), lookup::describe(disk));
                return Err(Error::Unsure { volume, disk, what: "not formatted" });
            }
            make(guest, &wanted.disk.volume, (disk, held), kind.unwrap_or(USUAL)).await?;
            mount(guest, &mount_it).await?
        }
        mounted => mounted?,
    };
    if !wanted.read_only && is_smaller(held).await? {
        // Not an error: the volume can be used at its present size.
        if let Err(error) = expand::grow_file_system(guest, held).await {
            tracing::warn!("volume {}: {}", wanted.disk.volume, error_chain::words(&error));
        }
    }
    Ok(!mounted.already)
}

/// Makes a file system if the disk is blank, or if an earlier format was interrupted.
async fn make(
    guest: &Guest,
    volume: &str,
    (disk, held): (&KnownDisk, &Held),
    kind: &str,
) -> Result<(), Error> {
    let Some(kind) = Kind::named(kind) else {
        return Err(Error::Unusable(format!("file systems of type {kind:?} cannot be created")));
    };
    let mut identity = disk.serial().map_or_else(|| volume.to_owned(), Serial::text);
    let end = (0..=intent::LONGEST).rev().find(|end| identity.is_char_boundary(*end)).unwrap_or(0);
    identity.truncate(end);
    let wanted = Format { identity: &identity, kind, label: None, over_data: false, deadline: TO_FORMAT };
    if format(guest, held, &wanted).await?.made {
        tracing::info!("volume {volume}: {} was blank, and has {} now", disk.name, kind.name());
    }
    Ok(())
}

/// Returns whether the file system on a device is smaller than the device, as after a restore to a larger disk.
async fn is_smaller(held: &Held) -> Result<bool, Error> {
    let bytes = held.bytes()?;
    let device = held.clone();
    let read = move || superblock::read(device.device());
    let found = look(held.file(), read).await?.map_err(Error::system("read", held.file()))?;
    Ok(found.is_some_and(|found| found.bytes.saturating_add(found.block.max(1).into()) <= bytes))
}

async fn stage_device(guest: &Guest, wanted: &Stage, place: &Path, held: &Held) -> Result<bool, Error> {
    let target = place.join(DEVICE);
    if let (Some(shown), _) = place::look_at(guest, place).await? {
        if shown.gone {
            let dead = if shown.is_device { &target } else { place };
            remove::dead(guest, dead).await?;
        } else if !shown.is_device {
            let found = format!("a volume with {} is staged there", shown.mount.kind);
            return Err(Error::Otherwise { place: place.to_owned(), found });
        }
    }
    let folder = place.to_owned();
    let made =
        look(place, move || place::ignore_existing(std::fs::DirBuilder::new().mode(0o750).create(folder)));
    made.await?.map_err(Error::system("create the directory", place))?;
    Ok(bind(guest, Source::File(held), &target, wanted.read_only, &[]).await?)
}

/// Bind-mounts a directory or file, unless that has been done. Returns whether the mount is new.
pub(super) async fn bind(
    guest: &Guest,
    source: Source<'_>,
    target: &PathBuf,
    read_only: bool,
    options: &[String],
) -> Result<bool, volumes::Error> {
    let wanted = Mount {
        source,
        target,
        kind: None,
        options,
        read_only,
        make_target: true,
        over_contents: true,
        propagation: None,
        check: false,
        deadline: TO_MOUNT,
    };
    Ok(!mount(guest, &wanted).await?.already)
}
