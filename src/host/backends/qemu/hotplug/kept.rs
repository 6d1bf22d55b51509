//! Volumes that were created together with their disks ([`volume`](super::volume)): listing and removal. Like a
//! volume of a pool, one is removed only on proof that it is not in use.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use super::super::super::authority::{Open, Said, Verdict, judge};
use super::super::super::disks::{DiskError, DiskVolume, Format};
use super::super::super::volumes::{Holder, Place};
use super::super::claim::{self, Use};
use super::authority::has_file;
use super::{Hotplug, naming, volume};
use crate::sys::directory::{Directory, Entry};

const FORMATS: [Format; 2] = [Format::Raw, Format::Qcow2];

/// File of a volume.
struct Kept {
    folder: PathBuf,
    directory: Directory,
    file_name: String,
}

impl Kept {
    /// Finds the volume of a VM with this serial number. Blocks.
    fn find(root: &Path, vm: &str, serial: &str) -> io::Result<Option<Self>> {
        let mut parts = Path::new(vm).components();
        let (Some(Component::Normal(_)), None) = (parts.next(), parts.next()) else { return Ok(None) };
        // Resolve links, because QEMU was given the resolved path.
        let folder = match root.join(vm).canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            folder => folder?,
        };
        let directory = Directory::open(&folder)?;
        for format in FORMATS {
            let file_name = naming::file_name(serial, format.name());
            if directory.entry(&file_name)? != Entry::Nothing {
                return Ok(Some(Self { folder, directory, file_name }));
            }
        }
        Ok(None)
    }

    fn path(&self) -> PathBuf {
        self.folder.join(&self.file_name)
    }

    /// Determines whether any process has it open. Blocks.
    fn look(&self) -> io::Result<Use> {
        claim::look(|| self.directory.file(&self.file_name, false))
    }

    /// Removes the volume. If `found` is a claim, no process can open the file meanwhile. Blocks.
    fn remove(&self, found: Use) -> io::Result<()> {
        self.directory.remove(&self.file_name)?;
        drop(found);
        self.directory.sync()
    }
}

impl Hotplug {
    /// Lists the volumes; see [`Disks::volumes`](super::super::super::disks::Disks::volumes).
    pub(super) async fn kept(self, vm: Option<String>) -> Result<Vec<DiskVolume>, DiskError> {
        let root = self.files.volumes().to_owned();
        let listed = self.files.in_volumes(move || list(&root, vm.as_deref())).await?;
        listed
            .map_err(|error| DiskError::System("list the volumes in", self.files.volumes().to_owned(), error))
    }

    /// Removes a volume; see [`Disks::remove_volume`](super::super::super::disks::Disks::remove_volume).
    pub(super) async fn remove_kept(self, vm: String, serial: String) -> Result<bool, DiskError> {
        let known = self.vms.borrow().get(&vm).cloned().flatten();
        let _turn = known.as_ref().map(|known| known.turn(&serial)).transpose()?;
        let (root, name) = (self.files.volumes().to_owned(), vm.clone());
        let refused = |file: PathBuf| move |error| DiskError::System("remove", file, error);
        let found = self.files.in_volumes(move || Kept::find(&root, &name, &serial)).await?;
        let Some(kept) = found.map_err(refused(self.files.volumes().join(&vm)))? else { return Ok(false) };
        let file = kept.path();
        let said = match &known {
            Some(known) => known.says(|seen| has_file(seen, &file)).await,
            None => Said::Unlisted,
        };
        let place = Place { uuid: known.map(|known| known.uuid.clone()).unwrap_or_default(), vm };
        let remembered = Some((&place, &said));
        if let Verdict::Is(holder) = judge(remembered, None) {
            return Err(held(holder, &file));
        }
        let looked = self.files.in_volumes(move || kept.look().map(|found| (kept, found))).await?;
        let (kept, found) = looked.map_err(refused(file.clone()))?;
        let open = match &found {
            Use::Nobody(_) => Open::Nobody,
            Use::Somebody => {
                let wanted = file.clone();
                match self.who(move |seen| has_file(seen, &wanted)).await {
                    Some(place) => Open::By(place),
                    None => Open::BySomebody(file.display().to_string()),
                }
            }
            Use::Untold(why) => Open::Untold(format!("{}: {why}", file.display())),
        };
        match judge(remembered, Some(open)) {
            Verdict::Is(Holder::Off) => {}
            Verdict::Is(holder) => return Err(held(holder, &file)),
            Verdict::Look => {
                return Err(DiskError::Unreachable("cannot examine a volume".to_owned()));
            }
        }
        let removed = self.files.in_volumes(move || kept.remove(found)).await?;
        removed.map_err(refused(file.clone()))?;
        tracing::info!(vm = place.vm, file = %file.display(), "removed a volume");
        Ok(true)
    }
}

/// Returns the error for a volume that is, or may be, in use.
fn held(holder: Holder, file: &Path) -> DiskError {
    let file = file.display();
    match holder {
        Holder::On(Place { vm, .. }) => {
            DiskError::Held(format!("the volume {file} is attached to the VM {vm}; detach it first"))
        }
        Holder::Unknown(why) => DiskError::Unreachable(format!("cannot remove the volume {file}: {why}")),
        Holder::Off => DiskError::Held(format!("cannot remove the volume {file}")),
    }
}

/// Lists the contents of the directory of all volumes. Blocks.
fn list(root: &Path, vm: Option<&str>) -> io::Result<Vec<DiskVolume>> {
    let root = match root.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        root => root?,
    };
    let mut all = Vec::new();
    let names = Directory::open(&root)?.names()?;
    for name in names.into_iter().filter_map(|name| name.into_string().ok()) {
        if vm.is_some_and(|vm| vm != name) {
            continue;
        }
        let folder = root.join(&name);
        let directory = match Directory::open(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => continue,
            directory => directory?,
        };
        let files = directory.names()?;
        all.extend(files.into_iter().filter_map(|file| describe(&directory, &folder, &name, file.to_str()?)));
    }
    all.sort_by(|one, other| (&one.vm, &one.serial).cmp(&(&other.vm, &other.serial)));
    Ok(all)
}

/// Describes the file with that name, if it is a volume.
fn describe(directory: &Directory, folder: &Path, vm: &str, file_name: &str) -> Option<DiskVolume> {
    let (serial, ending) = naming::serial_of(file_name)?;
    let format = FORMATS.into_iter().find(|format| format.name() == ending)?;
    let mut file = directory.file(file_name, false).ok()?;
    let allocated = file.metadata().ok()?.blocks() * 512;
    let size = volume::size_of(&mut file, format).ok();
    Some(DiskVolume { vm: vm.to_owned(), serial, file: folder.join(file_name), format, size, allocated })
}
