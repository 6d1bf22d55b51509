//! Applies one rule to one disk, and undoes it again. The disk is held from the first look to the last step, so
//! that all steps act on the same disk and no other operation changes it in between.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use crate::guest::disk_rules::find::Device;
use crate::guest::disk_rules::give::{give, owners};
use crate::guest::disk_rules::made::{Kept, Made, Memory, Standing};
use crate::guest::disk_rules::rule::{How, Rule};
use crate::guest::disks::identity::Serial;
use crate::guest::volumes::contents::{Contents, contents};
use crate::guest::volumes::format::{Format, Kind, format};
use crate::guest::volumes::grow::{Outcome, grow};
use crate::guest::volumes::held::Held;
use crate::guest::volumes::intent;
use crate::guest::volumes::mount::{Mount, Mounted, Source, mount};
use crate::guest::volumes::swap;
use crate::guest::volumes::unmount::{detach, unmount};
use crate::guest::{Guest, accounts, volumes};
use crate::sys::mountinfo::{self, MountList};
use crate::sys::{block, blocking, error_chain, folders, program, swaps};

/// Time limit for making a file system.
const TO_FORMAT: Duration = Duration::from_secs(30 * 60);
/// Time limit for mounting, including a check of the file system.
const TO_MOUNT: Duration = Duration::from_secs(30 * 60);
/// Time limit for unmounting, including writing back dirty data.
const TO_UNMOUNT: Duration = Duration::from_secs(90);
/// Time limit for growing a partition and what is on it.
const TO_GROW: Duration = Duration::from_secs(30 * 60);
/// Time limit for looking up directories, users and groups.
const TO_LOOK: Duration = Duration::from_secs(30);

/// Reasons why a rule could not be applied or undone.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An operation on the disk failed.
    #[error(transparent)]
    Volume(#[from] volumes::Error),
    /// The mount point is unusable.
    #[error("the mount point cannot be used")]
    Folder(#[from] folders::Error),
    /// The last component of the mount point was replaced by a symbolic link while the rule was applied.
    #[error("the mount point {} leads through a symbolic link", .0.display())]
    Link(PathBuf),
    /// The owner is unknown or could not be looked up.
    #[error("the owner cannot be")]
    Owner(#[source] accounts::Error),
    /// The group does not exist.
    #[error("unknown group {0:?}")]
    NoGroup(String),
    /// The list of groups cannot be read.
    #[error("groups cannot be looked up")]
    Groups(#[source] io::Error),
    /// The disk is blank, and the rule does not allow formatting.
    #[error("{file} is blank, and the rule does not set format-if-blank")]
    Blank {
        /// The device node.
        file: String,
    },
    /// The disk has neither a serial number nor a WWN by which it could be recognised later.
    #[error(
        "{file} has neither a serial number nor a WWN by which it could be recognised later, and so is not \
         formatted"
    )]
    Nameless {
        /// The device node.
        file: String,
    },
    /// The disk reports only the beginning of the rule's serial number, and may be a different disk.
    #[error(
        "{file} shows only {said:?} of its serial number, and so is not formatted; a rule with this serial would format it"
    )]
    Cut {
        /// The device node.
        file: String,
        /// The part of the serial number that the disk reports.
        said: String,
    },
    /// Owner, group or mode of the root directory of the mount could not be set.
    #[error("owner, group and mode cannot be set")]
    Give(#[source] io::Error),
    /// The list of mounts or of swap spaces cannot be read.
    #[error("the list of mounts cannot be read")]
    Mounts(#[source] io::Error),
    /// The record of what rules have mounted cannot be written.
    #[error("the record of what rules have mounted cannot be written")]
    Note(#[source] io::Error),
    /// A different file system is mounted over the same mount point.
    #[error("{} has something else mounted on it: {over}", place.display())]
    Covered {
        /// Mount point of the rule.
        place: PathBuf,
        /// Source and type of the other mount.
        over: String,
    },
    /// A look-up did not return within its time limit.
    #[error("{what} did not answer within {} s", TO_LOOK.as_secs())]
    Silent {
        /// The object that was looked up.
        what: &'static str,
    },
    /// The engine no longer applies rules.
    #[error("the agent is stopping")]
    Ending,
}

impl Error {
    /// Returns whether the failure means that a disk does not respond.
    pub fn is_hang(&self) -> bool {
        use volumes::Error as Volume;

        matches!(
            self,
            Self::Silent { .. }
                | Self::Volume(Volume::Silent { .. } | Volume::Program(program::Error::TimedOut { .. }))
        )
    }

    /// Returns whether the failure may go away without any event that reports it, such as a device or mount point
    /// in use. The engine then retries by its timer.
    pub fn may_end(&self) -> bool {
        use volumes::Error as Volume;

        let busy = |source: &io::Error| {
            matches!(source.raw_os_error().map(Errno::from_raw), Some(Errno::EBUSY | Errno::ENOTEMPTY))
        };
        match self {
            Self::Covered { .. } | Self::Silent { .. } => true,
            Self::Volume(error) => match error {
                Volume::Busy { .. }
                | Volume::Locked { .. }
                | Volume::Claimed { .. }
                | Volume::Another { .. }
                | Volume::InUse { .. }
                | Volume::Otherwise { .. }
                | Volume::Copy { .. }
                | Volume::Silent { .. }
                | Volume::Program(program::Error::TimedOut { .. }) => true,
                Volume::Target { source, .. }
                | Volume::Mount { source, .. }
                | Volume::Unmount { source, .. } => busy(source),
                _ => false,
            },
            _ => false,
        }
    }
}

/// Result of applying a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Applied {
    /// Kind of file system, or `swap`.
    pub kind: String,
    /// True if the device was mounted by this call.
    pub new: bool,
    /// True if the device had already been mounted by somebody else.
    pub foreign: bool,
    /// True if the file system was made by this call.
    pub formatted: bool,
    /// Description of a secondary step, such as growing, that failed.
    pub remark: Option<String>,
}

/// Runs `work`, which may block, on a thread that may block, and gives up after `TO_LOOK`.
pub(super) async fn look<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    tokio::time::timeout(TO_LOOK, blocking::run(work)).await.map_err(|_| Error::Silent { what })
}

/// Returns all current mounts.
pub(super) async fn mounts(guest: &Guest) -> Result<Vec<mountinfo::Mount>, Error> {
    let root = guest.root.clone();
    look("the list of mounts", move || MountList::open(&root)?.read()).await?.map_err(Error::Mounts)
}

/// Returns the devices that the kernel swaps to.
async fn swaps(guest: &Guest) -> Result<Vec<String>, Error> {
    let root = guest.root.clone();
    look("the list of swap spaces", move || swaps::devices(&root)).await?.map_err(Error::Mounts)
}

async fn note(memory: &Arc<Memory>, change: impl FnOnce(&mut Kept) + Send + 'static) -> Result<(), Error> {
    let memory = Arc::clone(memory);
    look("the runtime directory", move || memory.change(change)).await?.map_err(Error::Note)
}

/// Mounts `device`, or swaps to it, as `rule` says.
///
/// # Errors
/// If that fails. Nothing is then mounted that was not mounted before.
pub async fn apply(
    guest: &Guest,
    memory: &Arc<Memory>,
    rule: &Rule,
    device: &Device,
) -> Result<Applied, Error> {
    let how = &rule.how;
    let held = Held::of(guest, &device.disk, device.partition, "a rule is being applied to it").await?;
    if how.is_swap() {
        return swap_on(guest, memory, how, device, &held).await;
    }
    let owners = owners(guest, how).await?;
    let list = mounts(guest).await?;
    let ours = memory.kept().at(&how.mount_point).cloned().filter(|made| made.is_of(device));
    let ours = ours.filter(|made| made.standing(&list, &[]) != Standing::Unmounted);
    let (mut applied, made) = match ours {
        Some(made) => {
            let found = list.iter().find(|mount| made.is(mount));
            let kind = found.map(|mount| mount.kind.clone()).unwrap_or_default();
            let made = Made { mount: found.map(|mount| mount.id), how: how.clone(), ..made };
            (Applied { kind, new: false, foreign: false, formatted: false, remark: None }, made)
        }
        None => match mount_new(guest, memory, how, (device, &held), &list).await? {
            (applied, Some(made)) => (applied, made),
            (mut applied, None) => {
                applied.remark = grown(guest, how, &held).await;
                return Ok(applied);
            }
        },
    };
    if let Err(error) = give(guest, &made, &held, owners).await {
        if applied.new {
            undo(guest, memory, &how.mount_point).await?;
        }
        return Err(error);
    }
    let before = memory.kept().at(&how.mount_point).map_or(0, |made| made.grown);
    if before != device.disk.bytes {
        applied.remark = grown(guest, how, &held).await;
    }
    let made = Made { done: true, grown: device.disk.bytes, ..made };
    note(memory, move |kept| {
        kept.forget(&made.how.mount_point);
        kept.made.push(made);
    })
    .await?;
    Ok(applied)
}

/// Enables swapping to `device`.
async fn swap_on(
    guest: &Guest,
    memory: &Arc<Memory>,
    how: &How,
    device: &Device,
    held: &Held,
) -> Result<Applied, Error> {
    let made = memory.kept().at(&how.mount_point).cloned().filter(|made| made.is_of(device));
    let was_made = made.is_some();
    let formatted = made_ready(guest, how, device, held).await?;
    // Recorded first, so that an agent that is killed in between recognises the swap space as its own.
    let made = made.unwrap_or_else(|| Made::new(how, device));
    let noted = made.clone();
    note(memory, move |kept| {
        kept.forget(&noted.how.mount_point);
        kept.made.push(noted);
    })
    .await?;
    let point = how.mount_point.clone();
    let already = match swap::on(guest, held).await {
        Ok(already) => already,
        Err(error) => {
            note(memory, move |kept| kept.forget(&point)).await?;
            return Err(error.into());
        }
    };
    let foreign = already && !was_made;
    let made = Made { mount: Some(0), done: true, grown: device.disk.bytes, how: how.clone(), ..made };
    note(memory, move |kept| {
        kept.forget(&point);
        if !foreign {
            kept.made.push(made);
        }
    })
    .await?;
    Ok(Applied { kind: "swap".to_owned(), new: !already, foreign, formatted, remark: None })
}

/// Mounts the device. Returns no record if somebody else had already mounted it there.
async fn mount_new(
    guest: &Guest,
    memory: &Arc<Memory>,
    how: &How,
    (device, held): (&Device, &Held),
    list: &[mountinfo::Mount],
) -> Result<(Applied, Option<Made>), Error> {
    let point = how.mount_point.clone();
    look("the mount point", move || folders::make(&point)).await??;
    let taken = list.iter().any(|mount| Path::new(&mount.mount_point) == how.mount_point);
    let mut formatted = false;
    if !taken {
        empty(&how.mount_point).await?;
        formatted = made_ready(guest, how, device, held).await?;
        let made = Made::new(how, device);
        note(memory, move |kept| {
            kept.forget(&made.how.mount_point);
            kept.made.push(made);
        })
        .await?;
    }
    let forget = || {
        let point = how.mount_point.clone();
        note(memory, move |kept| kept.forget(&point))
    };
    let mounted = match mount(guest, &wanted(how, held)).await {
        Ok(mounted) => mounted,
        Err(error) => {
            // A mount that has timed out may still succeed later: keep its record, so that it is known to be ours.
            if !taken && !matches!(error, volumes::Error::Silent { .. }) {
                forget().await?;
            }
            return Err(error.into());
        }
    };
    let Mounted { target, kind, already, .. } = mounted;
    let applied = Applied { kind, new: !already, foreign: already, formatted, remark: None };
    if already {
        forget().await?;
        return Ok((applied, None));
    }
    if target != how.mount_point {
        unmount(guest, &target, TO_UNMOUNT).await?;
        forget().await?;
        return Err(Error::Link(how.mount_point.clone()));
    }
    let made = Made::new(how, device);
    let number = mounts(guest).await?.iter().rev().find(|mount| made.is(mount)).map(|mount| mount.id);
    let made = Made { mount: number, ..made };
    let noted = made.clone();
    note(memory, move |kept| {
        kept.forget(&noted.how.mount_point);
        kept.made.push(noted);
    })
    .await?;
    Ok((applied, Some(made)))
}

fn wanted<'a>(how: &'a How, held: &'a Held) -> Mount<'a> {
    Mount {
        source: Source::Device(held),
        target: &how.mount_point,
        kind: how.kind.as_deref(),
        options: &how.options,
        read_only: false,
        make_target: false,
        over_contents: false,
        propagation: None,
        check: true,
        deadline: TO_MOUNT,
    }
}

/// Checks that the mount point is empty before anything is done to the disk, so that the mount hides no files.
async fn empty(point: &Path) -> Result<(), Error> {
    let path = point.to_owned();
    let first = look("the mount point", move || Ok(std::fs::read_dir(path)?.next().is_none())).await?;
    let failed = |source| Error::Volume(volumes::Error::Target { target: point.to_owned(), source });
    match first {
        Ok(true) => Ok(()),
        Ok(false) => Err(failed(Errno::ENOTEMPTY.into())),
        Err(error) => Err(failed(error)),
    }
}

/// Formats the device if it is blank and the rule allows it, or if an earlier format was interrupted. Returns
/// whether it was formatted.
async fn made_ready(guest: &Guest, how: &How, device: &Device, held: &Held) -> Result<bool, Error> {
    let found = contents(guest, held.file()).await?;
    let kind = how.kind.as_deref().and_then(Kind::named).filter(|_| how.format);
    let Some(kind) = kind else {
        return match found {
            Contents::Blank => Err(Error::Blank { file: device.file.clone() }),
            _ => Ok(false),
        };
    };
    if found.kind() == Some(kind.name()) && !is_unfinished(guest, &found).await? {
        return Ok(false);
    }
    let refused = |blank: Error| match &found {
        Contents::Blank => blank,
        other => {
            Error::Volume(volumes::Error::NotBlank { device: held.file().to_owned(), found: other.words() })
        }
    };
    if device.cut {
        let said = device.disk.serial().map(Serial::text).unwrap_or_default();
        return Err(refused(Error::Cut { file: device.file.clone(), said }));
    }
    let identity = identity(device).ok_or_else(|| refused(Error::Nameless { file: device.file.clone() }))?;
    let wanted = Format { identity: &identity, kind, label: None, over_data: false, deadline: TO_FORMAT };
    Ok(format(guest, held, &wanted).await?.made)
}

async fn is_unfinished(guest: &Guest, found: &Contents) -> Result<bool, Error> {
    let Contents::Known(signature) = found else { return Ok(false) };
    let Some(uuid) = signature.uuid.clone() else { return Ok(false) };
    let root = guest.root.clone();
    look("the notes of formats", move || intent::is_unfinished(&root, &uuid)).await?.map_err(Error::Note)
}

/// Returns the name that identifies this device and no other: serial number or WWN, with the partition number.
fn identity(device: &Device) -> Option<String> {
    /// Bytes reserved for the partition number.
    const ROOM: usize = 12;

    let disk = &device.disk;
    let mut name = match (disk.serial(), &disk.wwn) {
        (Some(serial), _) => serial.text(),
        (None, Some(wwn)) => wwn.clone(),
        (None, None) => return None,
    };
    let most = intent::LONGEST - ROOM;
    let end = (0..=name.len().min(most)).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
    name.truncate(end);
    Some(match device.partition {
        Some(number) => format!("{name}-part{number}"),
        None => name,
    })
}

/// Grows what is on the disk if the rule says so. Returns a description of what could not be grown.
async fn grown(guest: &Guest, how: &How, held: &Held) -> Option<String> {
    if !how.grow {
        return None;
    }
    let steps = match grow(guest, held, TO_GROW).await {
        Ok(steps) => steps,
        Err(error) => return Some(format!("it cannot be grown: {}", error_chain::words(&error))),
    };
    for step in &steps {
        if let Outcome::Grown { from, to } = step.outcome {
            tracing::info!("{}: grown from {from} to {to} bytes", step.what);
        }
    }
    steps.into_iter().find_map(|step| match step.outcome {
        Outcome::Refused(why) => Some(format!("{} cannot be grown: {why}", step.what)),
        _ => None,
    })
}

/// Returns whether the kernel no longer has the disk.
async fn is_gone(guest: &Guest, made: &Made) -> Result<bool, Error> {
    let (root, disk) = (guest.root.clone(), made.disk.clone());
    look("the list of disks", move || block::generation(&root, &disk.place) != Some(disk.generation)).await
}

/// Unmounts what a rule has mounted at `point`, if it is still mounted, and deletes its record. Returns whether it
/// was mounted. If the disk has disappeared and the mount is in use, the mount is detached lazily.
///
/// # Errors
/// If the mount is in use; the error names the processes that use it.
pub async fn undo(guest: &Guest, memory: &Arc<Memory>, point: &Path) -> Result<bool, Error> {
    let Some(made) = memory.kept().at(point).cloned() else { return Ok(false) };
    let there = match made.standing(&mounts(guest).await?, &swaps(guest).await?) {
        Standing::Covered(over) => return Err(Error::Covered { place: point.to_owned(), over }),
        Standing::Unmounted => false,
        Standing::Mounted if made.how.is_swap() => {
            let held = Held::called(guest, &guest.root.path(&made.file), "it is being released").await?;
            // A different disk may have got the same device name since; its swap space does not belong to this
            // rule.
            held.generation() == made.disk.generation && swap::off(guest, &held, TO_UNMOUNT).await?
        }
        Standing::Mounted => {
            match unmount(guest, point, TO_UNMOUNT).await {
                Err(error @ volumes::Error::InUse { .. }) if is_gone(guest, &made).await? => {
                    tracing::warn!("the disk {} was removed: {}", made.disk.name, error_chain::words(&error));
                    detach(guest, point, TO_UNMOUNT).await?;
                }
                done => drop(done?),
            }
            true
        }
    };
    let point = point.to_owned();
    note(memory, move |kept| kept.forget(&point)).await?;
    Ok(there)
}
