//! Directories with the data of an application, as the kernel sees them.

use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::Problem;
use super::messages::Directory;

/// Returns a directory with all links followed, and the ID of its mount. May wait for a disk.
///
/// # Errors
/// If the path is not a directory, or this process may not access it.
pub fn directory(path: &Path) -> Result<Directory, Problem> {
    let failed = |why: &str| Problem::new(format_args!("cannot examine {}: {why}", path.display()));
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let file = open(path, flags, Mode::empty()).map_err(|error| failed(error.desc()))?;
    let number = file.as_raw_fd();
    let real = std::fs::read_link(format!("/proc/self/fd/{number}"));
    let path = real.map_err(|error| failed(&error.to_string()))?;
    // Use the mount ID: btrfs gives each subvolume a device number of its own, which the list of mounts does not have.
    let mut text = String::new();
    std::fs::File::open(format!("/proc/self/fdinfo/{number}"))
        .and_then(|info| info.take(4096).read_to_string(&mut text))
        .map_err(|error| failed(&error.to_string()))?;
    let mount = text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    let mount = mount.ok_or_else(|| failed("the kernel does not report which mount it is on"))?;
    Ok(Directory { path, mount })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mountinfo::MountList;
    use crate::sys::root::Root;

    #[test]
    fn a_directory_is_told_with_its_mount() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(folder.path(), &link).unwrap();
        let found = directory(&link).unwrap();
        assert_eq!(found.path, folder.path().canonicalize().unwrap());
        let mounts = MountList::open(&Root::default()).unwrap().read().unwrap();
        let mount = mounts.into_iter().find(|mount| mount.id == found.mount).unwrap();
        assert!(found.path.starts_with(&mount.path), "{found:?} {mount:?}");
        for missing in [folder.path().join("missing"), "/proc/version".into()] {
            let words = directory(&missing).unwrap_err().to_string();
            assert!(words.contains("irectory"), "{words}");
        }
    }
}
