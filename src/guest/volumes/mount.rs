//! Mounts file systems, and bind-mounts directories and files.
//!
//! May be repeated: a mount point that already has the requested mount is left as it is; one with a different
//! mount is an error. The mount point is opened before it is checked, and the mount is made on what was checked.
//!
//! mount(2) and the list of mounts identify a device by its name. So the name is checked before, and the mount
//! afterwards: if it is of a different device, it is unmounted again.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::MsFlags;

use crate::guest::Guest;
use crate::guest::volumes::Turn;
use crate::guest::volumes::contents::{Contents, signed};
use crate::guest::volumes::fsck::{self, Checked};
use crate::guest::volumes::held::Held;
use crate::guest::volumes::options::{COMPARED, Options};
use crate::guest::volumes::{Error, PATIENCE, at_once, holding, intent, keeping};
use crate::sys::block_stack::is_on;
use crate::sys::mountinfo::{self, MountList};
use crate::sys::mounting::{How, Place, What};
use crate::sys::superblock::{self, Kind, Superblock};
use crate::sys::{block_device, root::Root};

pub use crate::sys::mounting::Propagation;

/// Source of a mount.
#[derive(Debug, Clone, Copy)]
pub enum Source<'a> {
    /// File system on a device.
    Device(&'a Held),
    /// Device node of a device, to be bind-mounted.
    File(&'a Held),
    /// Directory or file, to be bind-mounted.
    Bind(&'a Path),
}

/// Request for a mount.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct Mount<'a> {
    /// Source of the mount.
    pub source: Source<'a>,
    /// Mount point: a directory, or a file if the source is a file. The last component must not be a symbolic link.
    pub target: &'a Path,
    /// Kind of file system that is required; any if absent.
    pub kind: Option<&'a str>,
    /// Mount options as for mount(8), except for those that request something other than mounting.
    pub options: &'a [String],
    /// True if the mount is read-only.
    pub read_only: bool,
    /// True if a missing target is created; its parent directory must exist.
    pub make_target: bool,
    /// True if the target may have contents, which the mount then hides.
    pub over_contents: bool,
    /// Propagation of later mounts below this one to other namespaces.
    pub propagation: Option<Propagation>,
    /// True if the file system is checked first, and repaired where that is safe. Not done if it is mounted
    /// elsewhere already, or read-only.
    pub check: bool,
    /// Time limit for the mount.
    pub deadline: Duration,
}

/// Mount that now exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mounted {
    /// Canonical path of the mount point.
    pub target: PathBuf,
    /// Kind of file system.
    pub kind: String,
    /// True if the mount already existed.
    pub already: bool,
    /// Result of the check, if there was one.
    pub checked: Option<Checked>,
}

/// Mounts the source, unless it is mounted there already.
///
/// # Errors
/// If something else is mounted there, the target is unsuitable, or mounting fails. Nothing is then mounted,
/// unless the deadline was the reason.
pub async fn mount(guest: &Guest, wanted: &Mount<'_>) -> Result<Mounted, Error> {
    let options = Options::parse(wanted.options, wanted.read_only)?;
    let place = open_target(wanted).await?;
    let turn = guest.volumes.begin(&place.path, "another mount is in progress there")?;
    match wanted.source {
        Source::Device(held) => mount_device(guest, wanted, options, held, place, turn).await,
        Source::File(held) => {
            held.verify().await?;
            bind(guest, wanted, options.flags, (held.file(), Some(held)), place, turn).await
        }
        Source::Bind(source) => bind(guest, wanted, options.flags, (source, None), place, turn).await,
    }
}

async fn mount_device(
    guest: &Guest,
    wanted: &Mount<'_>,
    mut options: Options,
    held: &Held,
    place: Place,
    turn: Turn,
) -> Result<Mounted, Error> {
    let device = || held.file().to_owned();
    let (root, copy) = (guest.root.clone(), held.clone());
    let read = holding(held, PATIENCE, move || Mounts::read(&root, &copy)).await?;
    let mounts = read.map_err(|source| Error::unreadable(held.file(), source))?;

    if let Some(there) = mounts.at(&place) {
        let same = mounts.is_ours(there) && there.root.trim_start_matches('/') == options.subvolume();
        let kind = wanted.kind.is_none_or(|kind| kind == there.kind);
        let described = format!("{} ({}, {})", there.source, there.kind, there.flags);
        if !same || !kind || !same_flags(&there.flags, options.flags) {
            return Err(Error::Otherwise { target: place.path, found: described });
        }
        return Ok(Mounted { target: place.path, kind: there.kind.clone(), already: true, checked: None });
    }
    let place = empty_folder(wanted, place).await?;
    let Some(found) = signed(guest, held.file()).await? else {
        return Err(Error::NoFileSystem { device: device(), found: "nothing that is known".to_owned() });
    };
    let (Some(kind), Contents::Known(signature)) = (found.kind(), &found) else {
        return Err(Error::NoFileSystem { device: device(), found: found.words() });
    };
    if wanted.kind.is_some_and(|wanted| wanted != kind) || kind == "swap" {
        return Err(Error::NoFileSystem { device: device(), found: found.words() });
    }
    unfinished(guest, held, signature.uuid.as_deref()).await?;
    mounts.clone_of(held.file(), &mut options)?;
    if held.is_read_only() {
        options.flags.insert(MsFlags::MS_RDONLY);
    }
    let mut checked = None;
    let writes = !options.flags.contains(MsFlags::MS_RDONLY);
    if wanted.check && writes && !mounts.list.iter().any(|mount| mounts.is_ours(mount)) {
        // The program would read the same mark in the superblock, and check no further.
        checked = Some(match mounts.own {
            Some(Superblock { clean: true, .. }) => Checked::Clean,
            _ => fsck::check(guest, held, kind, wanted.deadline).await?,
        });
    }
    let (machine, copy, kind) = (guest.clone(), held.clone(), kind.to_owned());
    let how = How { flags: options.flags, propagation: wanted.propagation };
    let (name, target) = (kind.clone(), place.path.clone());
    let work = move || {
        copy.check()?;
        let what = What::FileSystem { source: copy.file(), kind: &name, data: &options.data };
        let done = machine.effects.mount(&what, &place, how);
        let failed =
            |source| Error::Mount { what: copy.file().to_owned(), target: place.path.clone(), source };
        done.map_err(failed)?;
        let is_right = shows(&machine.root, &copy, &place.path).map_err(failed).and_then(|shown| {
            let another = Error::Another { device: copy.file().to_owned(), why: "another one was mounted" };
            if shown { copy.check() } else { Err(another) }
        });
        // Safe, because no other process has had time to use the mount.
        let is_right = is_right.inspect_err(|_| {
            if let Err(error) = machine.effects.unmount(&place.path) {
                tracing::warn!("{} stays mounted: {error}", place.path.display());
            }
        });
        drop(turn);
        is_right
    };
    holding(held, wanted.deadline, work).await??;
    Ok(Mounted { target, kind, already: false, checked })
}

/// Returns whether the last mount at `target` is of the device that is held.
fn shows(root: &Root, held: &Held, target: &Path) -> io::Result<bool> {
    let list = MountList::open(root)?.read()?;
    let shown = list.iter().rfind(|mount| Path::new(&mount.mount_point) == target);
    Ok(shown.is_some_and(|mount| is_on(root, mount, held.number())))
}

/// Refuses a file system whose format was interrupted.
async fn unfinished(guest: &Guest, held: &Held, uuid: Option<&str>) -> Result<(), Error> {
    let Some(uuid) = uuid.map(str::to_owned) else { return Ok(()) };
    let root = guest.root.clone();
    let found = holding(held, PATIENCE, move || intent::is_unfinished(&root, &uuid)).await?;
    match found {
        Ok(false) => Ok(()),
        Ok(true) => Err(Error::Unfinished { device: held.file().to_owned() }),
        Err(source) => Err(Error::Note { device: held.file().to_owned(), source }),
    }
}

async fn bind(
    guest: &Guest,
    wanted: &Mount<'_>,
    flags: MsFlags,
    (source, device): (&Path, Option<&Held>),
    place: Place,
    turn: Turn,
) -> Result<Mounted, Error> {
    let failed = |target: &Place| {
        let (what, target) = (source.to_owned(), target.path.clone());
        move |source| Error::Mount { what, target, source }
    };
    let (root, path, itself) = (guest.root.clone(), source.to_owned(), place.path.clone());
    let look = move || {
        let source = Place::open(&path)?;
        let (one, other) = (std::fs::metadata(&source.path)?, std::fs::metadata(&itself)?);
        let same = (one.dev(), one.ino(), one.rdev()) == (other.dev(), other.ino(), other.rdev());
        Ok((source, same, MountList::open(&root)?.read()?))
    };
    let looked: io::Result<_> = at_once(source, PATIENCE, look).await?;
    let (from, same, list) = looked.map_err(failed(&place))?;
    if let Some(held) = device
        && from.device() != Some(held.number())
    {
        return Err(Error::Another { device: source.to_owned(), why: "its name refers to something else" });
    }
    let kind_of = |number| list.iter().find(|mount| mount.id == number).map(|mount| mount.kind.clone());
    let kind = kind_of(from.mount).unwrap_or_default();
    if let Some(there) = at(&list, &place) {
        if !same || !same_flags(&there.flags, flags) {
            let found = format!("{} ({}, {})", there.source, there.kind, there.flags);
            return Err(Error::Otherwise { target: place.path, found });
        }
        return Ok(Mounted { target: place.path, kind, already: true, checked: None });
    }
    if from.is_folder != place.is_folder {
        let source = io::Error::from(if from.is_folder { Errno::ENOTDIR } else { Errno::EISDIR });
        return Err(failed(&place)(source));
    }
    let place = empty_folder(wanted, place).await?;
    let (effects, propagation) = (guest.effects.clone(), wanted.propagation);
    let (target, failure) = (place.path.clone(), failed(&place));
    let work = move || {
        effects.mount(&What::Bind { source: &from, recursive: false }, &place, How { flags, propagation })
    };
    keeping(&(turn, device.cloned()), source, wanted.deadline, work).await?.map_err(failure)?;
    Ok(Mounted { target, kind, already: false, checked: None })
}

/// Opens the target, and creates it first if requested.
async fn open_target(wanted: &Mount<'_>) -> Result<Place, Error> {
    let (path, make) = (wanted.target.to_owned(), wanted.make_target);
    let as_file = match wanted.source {
        Source::Bind(source) => Some(source.to_owned()),
        Source::File(held) => Some(held.file().to_owned()),
        Source::Device(_) => None,
    };
    let open = move || match Place::open(&path) {
        Err(error) if make && error.kind() == io::ErrorKind::NotFound => {
            let as_file = as_file.map(std::fs::metadata).transpose()?.is_some_and(|source| !source.is_dir());
            if as_file {
                std::fs::File::options().write(true).create_new(true).mode(0o640).open(&path)?;
            } else {
                std::fs::DirBuilder::new().mode(0o750).create(&path)?;
            }
            Place::open(&path)
        }
        opened => opened,
    };
    let opened = at_once(wanted.target, PATIENCE, open).await?;
    opened.map_err(|source| Error::Target { target: wanted.target.to_owned(), source })
}

/// Checks that the target is empty, so that the mount hides nothing, unless that is allowed.
async fn empty_folder(wanted: &Mount<'_>, place: Place) -> Result<Place, Error> {
    if matches!(wanted.source, Source::Device(_)) && !place.is_folder {
        return Err(Error::Target { target: place.path, source: Errno::ENOTDIR.into() });
    }
    if wanted.over_contents || !place.is_folder {
        return Ok(place);
    }
    let path = place.path.clone();
    let empty =
        at_once(wanted.target, PATIENCE, move || Ok(std::fs::read_dir(path)?.next().is_none())).await?;
    match empty {
        Ok(true) => Ok(place),
        Ok(false) => Err(Error::Target { target: place.path, source: Errno::ENOTEMPTY.into() }),
        Err(source) => Err(Error::Target { target: place.path, source }),
    }
}

fn same_flags(there: &str, wanted: MsFlags) -> bool {
    COMPARED.iter().all(|(word, flag)| there.split(',').any(|there| there == *word) == wanted.contains(*flag))
}

/// Returns the mount at a place that was opened.
fn at<'a>(list: &'a [mountinfo::Mount], place: &Place) -> Option<&'a mountinfo::Mount> {
    list.iter().find(|mount| mount.id == place.mount && Path::new(&mount.mount_point) == place.path)
}

/// Present mounts, and their relation to a device.
struct Mounts {
    root: Root,
    list: Vec<mountinfo::Mount>,
    device: (u32, u32),
    /// Superblock of the device.
    own: Option<Superblock>,
    /// Sources and superblocks of mounted file systems of which the device may be a copy.
    others: Vec<(String, Superblock)>,
}

impl Mounts {
    fn read(root: &Root, held: &Held) -> io::Result<Self> {
        let own = superblock::read(held.device())?;
        let list = MountList::open(root)?.read()?;
        let mut mounts = Self { root: root.clone(), list, device: held.number(), own, others: Vec::new() };
        let mut others: Vec<(String, Superblock)> = Vec::new();
        let copies = |mount: &&mountinfo::Mount| matches!(mount.kind.as_str(), "xfs" | "btrfs");
        for mount in mounts.list.iter().filter(copies).filter(|mount| !mounts.is_ours(mount)) {
            let known = others.iter().any(|(source, _)| *source == mount.source);
            let read = || superblock::read(&block_device::open(&root.path(&mount.source)).ok()?).ok()?;
            if !known && let Some(found) = read() {
                others.push((mount.source.clone(), found));
            }
        }
        mounts.others = others;
        Ok(mounts)
    }

    fn at(&self, place: &Place) -> Option<&mountinfo::Mount> {
        at(&self.list, place)
    }

    /// Returns whether `mount` is of the device.
    fn is_ours(&self, mount: &mountinfo::Mount) -> bool {
        is_on(&self.root, mount, self.device)
    }

    /// Handles a copy of a mounted file system: XFS is mounted with `nouuid`; btrfs is refused, as the kernel would
    /// confuse the two.
    fn clone_of(&self, device: &Path, options: &mut Options) -> Result<(), Error> {
        let Some(own) = self.own else { return Ok(()) };
        let Some((other, _)) = self.others.iter().find(|(_, other)| other.uuid == own.uuid) else {
            return Ok(());
        };
        match own.kind {
            Kind::Xfs => options.own("nouuid"),
            Kind::Btrfs { devices: 1, .. } => {
                return Err(Error::Copy { device: device.to_owned(), other: other.clone() });
            }
            _ => {}
        }
        Ok(())
    }
}
