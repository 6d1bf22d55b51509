//! Volumes: the backend's own image files, with one directory per VM and one file per serial number. They are
//! created when a disk is attached with a size, and stay when it is detached.
//!
//! ```text
//! <volumes-dir>/<vm>/<serial>.raw      sparse
//! <volumes-dir>/<vm>/<serial>.qcow2
//! ```

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown,
};
use std::path::{Path, PathBuf};

use super::super::super::disks::{DiskError, Format};
use super::super::link::Owner;
use super::{naming, qcow2};

/// Maximum size of a volume in bytes: 64 TiB.
const LARGEST: u64 = 64 << 40;
/// Unit of sizes in bytes.
const SECTOR: u64 = 512;
/// Mode of the directories: QEMU may traverse them but not list their names.
const FOLDER: u32 = 0o711;

/// Volume to be created.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Directory of all volumes.
    pub root: PathBuf,
    /// Name of the VM.
    pub vm: String,
    /// Serial number of the disk.
    pub serial: String,
    /// Format of the image.
    pub format: Format,
    /// Size in bytes.
    pub size: u64,
    /// User and group that QEMU runs as, if known.
    pub owner: Option<Owner>,
}

/// Checks the requested size of a disk.
///
/// # Errors
/// If no disk can have this size.
pub fn check_size(size: u64) -> Result<(), DiskError> {
    if size == 0 || size > LARGEST {
        return Err(DiskError::Size(format!("{size}: a disk has 512 bytes to 64 TiB")));
    }
    if !size.is_multiple_of(SECTOR) {
        return Err(DiskError::Size(format!("{size} is not a multiple of {SECTOR} bytes")));
    }
    Ok(())
}

impl Volume {
    /// Returns the path of the image.
    pub fn path(&self) -> PathBuf {
        self.path_as(self.format)
    }

    fn path_as(&self, format: Format) -> PathBuf {
        self.root.join(&self.vm).join(naming::file_name(&self.serial, format.name()))
    }

    /// Creates the volume, if it does not exist; returns whether it was created. The file appears under its name
    /// complete or not at all: a killed process leaves at most a file that ends with `.new`, which the next attempt
    /// replaces. Blocks.
    ///
    /// # Errors
    /// If it exists with a different size or format, or the system refuses.
    pub fn provide(&self) -> Result<bool, DiskError> {
        let other = self.path_as(if self.format == Format::Raw { Format::Qcow2 } else { Format::Raw });
        if exists(&other)? {
            let problem =
                format!("is this volume in another format than {}; attach it as a file", self.format);
            return Err(DiskError::File(other, problem));
        }
        let path = self.path();
        if exists(&path)? {
            let found = File::open(&path).and_then(|mut file| size_of(&mut file, self.format));
            let found = found.map_err(|error| DiskError::System("read", path.clone(), error))?;
            if found != self.size {
                let problem = format!("is this volume with {found} bytes; attach it with that size");
                return Err(DiskError::File(path, problem));
            }
            return Ok(false);
        }
        let folder = self.root.join(&self.vm);
        for folder in [&self.root, &folder] {
            make_folder(folder)
                .map_err(|error| DiskError::System("create the directory", folder.clone(), error))?;
        }
        self.make(&path).map_err(|error| DiskError::System("make", path.clone(), error))?;
        Ok(true)
    }

    /// Removes a volume that was just created, because it could not be attached. Blocks.
    pub fn unmake(&self) {
        if let Err(error) = std::fs::remove_file(self.path()) {
            tracing::warn!(path = %self.path().display(), %error, "an empty volume remains");
        }
    }

    fn make(&self, path: &Path) -> io::Result<()> {
        let mut beside = path.as_os_str().to_owned();
        beside.push(".new");
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        match self.format {
            Format::Raw => file.set_len(self.size)?,
            Format::Qcow2 => {
                let empty = qcow2::empty(self.size);
                file.write_all(&empty.start)?;
                file.set_len(empty.length)?;
            }
        }
        let found = file.metadata()?;
        if let Some(owner) = self.owner.filter(|owner| (owner.uid, owner.gid) != (found.uid(), found.gid())) {
            fchown(&file, Some(owner.uid), Some(owner.gid))?;
        }
        file.sync_all()?;
        std::fs::rename(beside, path)?;
        match path.parent() {
            Some(folder) => File::open(folder)?.sync_all(),
            None => Ok(()),
        }
    }
}

/// Returns the size in bytes that a guest sees of an image.
///
/// # Errors
/// If the image cannot be read, or is not of that format.
pub fn size_of(file: &mut File, format: Format) -> io::Result<u64> {
    match format {
        Format::Raw => Ok(file.metadata()?.len()),
        Format::Qcow2 => {
            let mut header = [0; 32];
            file.read_exact(&mut header)?;
            qcow2::size(&header).ok_or_else(|| io::Error::other("it is not a qcow2 image"))
        }
    }
}

fn exists(path: &Path) -> Result<bool, DiskError> {
    path.try_exists().map_err(|error| DiskError::System("examine", path.to_owned(), error))
}

/// Creates the directory and its parents, if they do not exist.
///
/// # Errors
/// Those of mkdir(2) and chmod(2).
pub fn make_folder(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(FOLDER).create(path)?;
    // Set the mode explicitly, because the umask may have restricted it.
    std::fs::set_permissions(path, Permissions::from_mode(FOLDER))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(root: &Path, format: Format, size: u64) -> Volume {
        Volume {
            root: root.join("volumes"),
            vm: "a".into(),
            serial: "data 1".into(),
            format,
            size,
            owner: None,
        }
    }

    #[test]
    fn a_volume_is_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let raw = volume(folder.path(), Format::Raw, 1 << 30);
        assert!(raw.provide().unwrap());
        let path = raw.path();
        assert_eq!(path, folder.path().join("volumes/a/data%201.raw"));
        let made = path.metadata().unwrap();
        assert_eq!((made.len(), made.mode() & 0o777), (1 << 30, 0o600));
        assert!(made.blocks() < 64, "it is sparse");
        assert_eq!(path.parent().unwrap().metadata().unwrap().mode() & 0o777, FOLDER);
        OpenOptions::new().write(true).open(&path).unwrap().write_all(b"bytes of the guest").unwrap();
        assert!(!raw.provide().unwrap());
        let mut start = [0; 18];
        File::open(&path).unwrap().read_exact(&mut start).unwrap();
        assert_eq!(&start, b"bytes of the guest", "what is there stays");

        let other = volume(folder.path(), Format::Raw, 1 << 20).provide().unwrap_err().to_string();
        assert!(other.contains("with 1073741824 bytes"), "{other}");
        let other = volume(folder.path(), Format::Qcow2, 1 << 30).provide().unwrap_err().to_string();
        assert!(other.contains("another format than qcow2"), "{other}");
    }

    #[test]
    fn what_a_killed_run_left_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let qcow2 = volume(folder.path(), Format::Qcow2, 5 << 30);
        std::fs::create_dir_all(folder.path().join("volumes/a")).unwrap();
        let left = folder.path().join("volumes/a/data%201.qcow2.new");
        File::create(&left).unwrap().set_len(1 << 20).unwrap();
        assert!(qcow2.provide().unwrap());
        let path = qcow2.path();
        assert!(!left.exists());
        assert_eq!(size_of(&mut File::open(&path).unwrap(), Format::Qcow2).unwrap(), 5 << 30);
        assert!(!qcow2.provide().unwrap());
        qcow2.unmake();
        assert!(!path.exists());
    }

    #[test]
    fn sizes() {
        for (size, good) in [(512, true), (LARGEST, true), (0, false), (513, false), (LARGEST + 512, false)] {
            assert_eq!(check_size(size).is_ok(), good, "{size}");
        }
    }
}
