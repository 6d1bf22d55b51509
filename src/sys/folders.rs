//! Folders at paths that lead through no link: made, and given to somebody.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{Gid, fchownat};

/// Everybody may look into it, and root may change it, whatever the process's own umask is.
const USUAL: u32 = 0o755;

/// Why a folder is not there.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A link is on the way.
    #[error("{} is a symbolic link", .0.display())]
    Link(PathBuf),
    /// Something else is there.
    #[error("{} is no folder", .0.display())]
    NoFolder(PathBuf),
    /// It cannot be opened or made.
    #[error("cannot make the folder {}", .0.display())]
    Unmade(PathBuf, #[source] io::Error),
}

/// Makes the folder at the absolute `path` and those above it, as far as they are not there.
///
/// # Errors
/// If a link or something else is on the way; then nothing is made below it.
pub fn make(path: &Path) -> Result<(), Error> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut at = PathBuf::from("/");
    let unmade = |at: &Path| {
        let at = at.to_owned();
        move |error: Errno| Error::Unmade(at, error.into())
    };
    let mut folder = open(&at, flags, Mode::empty()).map_err(unmade(&at))?;
    for part in path.components() {
        let Component::Normal(name) = part else { continue };
        at.push(name);
        folder = match openat(&folder, name, flags, Mode::empty()) {
            Err(Errno::ENOENT) => {
                match mkdirat(&folder, name, Mode::S_IRWXU) {
                    Ok(()) | Err(Errno::EEXIST) => {}
                    Err(error) => return Err(unmade(&at)(error)),
                }
                let made = File::from(openat(&folder, name, flags, Mode::empty()).map_err(unmade(&at))?);
                made.set_permissions(Permissions::from_mode(USUAL))
                    .map_err(|error| Error::Unmade(at.clone(), error))?;
                made.into()
            }
            // The kernel says the same of a link that may not be followed.
            Err(Errno::ENOTDIR | Errno::ELOOP) => {
                let is_link = std::fs::symlink_metadata(&at).is_ok_and(|found| found.is_symlink());
                return Err(if is_link { Error::Link(at) } else { Error::NoFolder(at) });
            }
            opened => opened.map_err(unmade(&at))?,
        };
    }
    Ok(())
}

/// Gives an opened folder to a user and a group, and sets its permissions; what is so already stays untouched.
///
/// # Errors
/// As chown(2) and chmod(2) give them: `EROFS`, or `EPERM` where the file system knows no owners.
pub fn give(folder: OwnedFd, user: Option<u32>, group: Option<u32>, mode: Option<u32>) -> io::Result<()> {
    let folder = File::from(folder);
    let found = folder.metadata()?;
    let user = user.filter(|user| *user != found.uid());
    let group = group.filter(|group| *group != found.gid());
    if user.is_some() || group.is_some() {
        fchown(&folder, user, group)?;
    }
    // A change of owner takes some permissions away.
    match mode {
        Some(mode) if mode != folder.metadata()?.mode() & 0o7777 => {
            folder.set_permissions(Permissions::from_mode(mode))
        }
        _ => Ok(()),
    }
}

/// What a group may do with files that are its own, and with folders; what is made in those is its own, too.
const GROUPS_FILE: u32 = 0o060;
const GROUPS_FOLDER: u32 = 0o2070;
/// Folders in each other.
const DEEPEST: usize = 1000;

/// Gives an opened folder and all that is in it, on the same file system, to a group, which may read and write it. The
/// opened one itself comes last; if it is so already, nothing is done.
///
/// # Errors
/// As open(2), chown(2) and chmod(2) give them; `ELOOP` where folders are too deep in each other.
pub fn give_all(folder: OwnedFd, group: u32) -> io::Result<()> {
    let found = File::from(folder.try_clone()?).metadata()?;
    if found.gid() == group && found.mode() & GROUPS_FOLDER == GROUPS_FOLDER {
        return Ok(());
    }
    give_below(&folder, found.dev(), group, DEEPEST)?;
    give(folder, None, Some(group), Some(found.mode() & 0o7777 | GROUPS_FOLDER))
}

/// Nothing that somebody moves meanwhile leads out of the folder: each part is opened in the one above it, and no link
/// is followed.
fn give_below(folder: &OwnedFd, device: u64, group: u32, depth: usize) -> io::Result<()> {
    let depth = depth.checked_sub(1).ok_or(Errno::ELOOP)?;
    for entry in std::fs::read_dir(format!("/proc/self/fd/{}", folder.as_raw_fd()))? {
        let name = entry?.file_name();
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let opened = match openat(folder, name.as_os_str(), flags, Mode::empty()) {
            // Somebody has removed it.
            Err(Errno::ENOENT) => continue,
            opened => File::from(opened?),
        };
        let found = opened.metadata()?;
        if found.dev() != device {
            continue;
        }
        if found.is_dir() {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            give_below(&openat(&opened, ".", flags, Mode::empty())?, device, group, depth)?;
        }
        if found.gid() != group {
            let itself = AtFlags::AT_EMPTY_PATH;
            fchownat(&opened, "", None, Some(Gid::from_raw(group)), itself)?;
        }
        let more = match () {
            () if found.is_dir() => GROUPS_FOLDER,
            () if found.is_file() => GROUPS_FILE,
            () => continue,
        };
        // A change of owner takes some permissions away.
        let permissions = Permissions::from_mode(found.mode() & 0o7777 | more);
        std::fs::set_permissions(format!("/proc/self/fd/{}", opened.as_raw_fd()), permissions)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_made_but_not_through_links() {
        let above = tempfile::tempdir().unwrap();
        let above = above.path().canonicalize().unwrap();
        let path = above.join("a/b/c");
        make(&path).unwrap();
        make(&path).unwrap();
        assert_eq!(std::fs::metadata(above.join("a")).unwrap().mode() & 0o7777, USUAL);
        std::os::unix::fs::symlink("a", above.join("link")).unwrap();
        std::fs::write(above.join("file"), "").unwrap();
        assert!(matches!(make(&above.join("link/d")), Err(Error::Link(link)) if link == above.join("link")));
        assert!(matches!(make(&above.join("link")), Err(Error::Link(_))));
        assert!(matches!(make(&above.join("file/d")), Err(Error::NoFolder(_))));
        assert!(matches!(make(Path::new("/proc/no/folder")), Err(Error::Unmade(..))));
        assert!(!above.join("a/d").exists());
    }

    #[test]
    fn a_folder_is_given_away() {
        let folder = tempfile::tempdir().unwrap();
        let given = |mode| {
            let opened = File::open(folder.path()).unwrap();
            let me = opened.metadata().unwrap();
            give(opened.into(), Some(me.uid()), Some(me.gid()), mode).unwrap();
            std::fs::metadata(folder.path()).unwrap().mode() & 0o7777
        };
        assert_eq!(given(Some(0o2751)), 0o2751);
        assert_eq!(given(None), 0o2751);
        assert_eq!(given(Some(0o700)), 0o700);
    }

    #[test]
    fn all_of_a_folder_is_given_to_a_group_but_nothing_that_links_lead_to() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("volume");
        std::fs::create_dir_all(folder.join("a/b")).unwrap();
        let mode = |path: &str| {
            let found = std::fs::symlink_metadata(above.path().join(path)).unwrap();
            (found.gid(), found.mode() & 0o7777)
        };
        for (path, permissions) in
            [("volume/a/file", 0o600), ("volume/a/b/program", 0o755), ("outside", 0o600)]
        {
            std::fs::write(above.path().join(path), "").unwrap();
            std::fs::set_permissions(above.path().join(path), Permissions::from_mode(permissions)).unwrap();
        }
        std::os::unix::fs::symlink("../../outside", folder.join("a/link")).unwrap();
        for path in ["volume", "volume/a", "volume/a/b"] {
            std::fs::set_permissions(above.path().join(path), Permissions::from_mode(0o700)).unwrap();
        }
        give_all(File::open(&folder).unwrap().into(), 4711).unwrap();
        for path in ["volume", "volume/a", "volume/a/b"] {
            assert_eq!(mode(path), (4711, 0o2770), "{path}");
        }
        assert_eq!(mode("volume/a/file"), (4711, 0o660));
        assert_eq!(mode("volume/a/b/program"), (4711, 0o775));
        assert_eq!(mode("volume/a/link").0, 4711);
        assert_eq!(mode("outside"), (0, 0o600));
        // Once that is done it is not done again.
        std::fs::set_permissions(folder.join("a/file"), Permissions::from_mode(0o600)).unwrap();
        give_all(File::open(&folder).unwrap().into(), 4711).unwrap();
        assert_eq!(mode("volume/a/file"), (4711, 0o600));
    }
}
