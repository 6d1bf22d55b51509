//! Directories whose paths contain no symbolic link: creation, and change of ownership.

use std::ffi::OsString;
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

/// Reason why a directory could not be provided.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A link is on the way.
    #[error("{} is a symbolic link", .0.display())]
    Link(PathBuf),
    /// Path that exists and is not a directory.
    #[error("{} is not a directory", .0.display())]
    NoFolder(PathBuf),
    /// Directory that can be neither opened nor created.
    #[error("cannot create the directory {}", .0.display())]
    Unmade(PathBuf, #[source] io::Error),
}

/// Creates the directory at the absolute `path` and its parents, where they do not exist.
///
/// # Errors
/// If a symbolic link or anything else that is not a directory is on the path; nothing is created below it.
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

/// Sets the owner, group and permissions of an open directory. Those that are right already are not written
/// again.
///
/// # Errors
/// The errors of chown(2) and chmod(2): `EROFS`, or `EPERM` where the file system has no owners.
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

/// Permissions that a group gets on files and on directories. Entries that are created in such a directory
/// later inherit the group (set-group-ID).
const GROUPS_FILE: u32 = 0o060;
const GROUPS_FOLDER: u32 = 0o2070;
/// Folders in each other.
const DEEPEST: usize = 1000;
const FOLDER: OFlag =
    OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// Gives an open directory and everything in it, on the same file system, to a group, with read and write
/// permission. The directory itself is changed last: if it has the group and permissions already, nothing is
/// done. Only a handful of descriptors are open at a time, however deep the tree is.
///
/// # Errors
/// The errors of open(2), chown(2) and chmod(2); `ELOOP` if the tree is too deep; `ESTALE` if directories are
/// moved meanwhile.
pub fn give_all(folder: OwnedFd, group: u32) -> io::Result<()> {
    let found = File::from(folder.try_clone()?).metadata()?;
    if found.gid() == group && found.mode() & GROUPS_FOLDER == GROUPS_FOLDER {
        return Ok(());
    }
    give_below(&folder, group)?;
    give(folder, None, Some(group), Some(found.mode() & 0o7777 | GROUPS_FOLDER))
}

/// Directory on the path down, which is not kept open.
struct Level {
    /// Name in the parent directory; empty for the top.
    name: OsString,
    /// Device and inode: what is opened again is compared with them.
    itself: (u64, u64),
    /// Folders in it that are yet to be given away.
    left: Vec<OsString>,
}

/// Cannot be led out of the directory by a concurrent rename: each entry is opened relative to its parent, no
/// symbolic link is followed, and a parent is entered again only if it is still the same directory.
fn give_below(top: &OwnedFd, group: u32) -> io::Result<()> {
    let itself = identity(top)?;
    let mut at = openat(top, ".", FOLDER, Mode::empty())?;
    let mut levels = vec![Level { name: OsString::new(), itself, left: give_entries(&at, itself.0, group)? }];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.left.pop() else {
            levels.pop();
            if let Some(above) = levels.last() {
                at = go_back(top, &at, &levels, above.itself)?;
            }
            continue;
        };
        let opened = match openat(&at, name.as_os_str(), FOLDER, Mode::empty()) {
            // The entry was removed or replaced meanwhile.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => continue,
            opened => opened?,
        };
        let inner = identity(&opened)?;
        if inner.0 != itself.0 {
            continue;
        }
        if levels.len() >= DEEPEST {
            return Err(Errno::ELOOP.into());
        }
        at = opened;
        levels.push(Level { name, itself: inner, left: give_entries(&at, itself.0, group)? });
    }
    Ok(())
}

/// Returns the parent of `at`, which is now the last of `levels`.
fn go_back(top: &OwnedFd, at: &OwnedFd, levels: &[Level], above: (u64, u64)) -> io::Result<OwnedFd> {
    let parent = openat(at, "..", FOLDER, Mode::empty())?;
    if identity(&parent)? == above {
        return Ok(parent);
    }
    // The directory that is done was moved meanwhile, so its former parent is looked up from the top.
    let mut found = openat(top, ".", FOLDER, Mode::empty())?;
    for level in levels.iter().skip(1) {
        found = match openat(&found, level.name.as_os_str(), FOLDER, Mode::empty()) {
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Err(Errno::ESTALE.into()),
            opened => opened?,
        };
        if identity(&found)? != level.itself {
            return Err(Errno::ESTALE.into());
        }
    }
    Ok(found)
}

fn identity(folder: &OwnedFd) -> io::Result<(u64, u64)> {
    let found = nix::sys::stat::fstat(folder)?;
    Ok((found.st_dev, found.st_ino))
}

/// Gives all direct entries of a directory to a group, and returns the directories among them.
fn give_entries(folder: &OwnedFd, device: u64, group: u32) -> io::Result<Vec<OsString>> {
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/self/fd/{}", folder.as_raw_fd()))? {
        let name = entry?.file_name();
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let opened = match openat(folder, name.as_os_str(), flags, Mode::empty()) {
            // The entry was removed meanwhile.
            Err(Errno::ENOENT) => continue,
            opened => File::from(opened?),
        };
        let found = opened.metadata()?;
        if found.dev() != device {
            continue;
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
        if found.is_dir() {
            folders.push(name);
        }
    }
    Ok(folders)
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

    /// Folders in each other, made with paths that are short enough.
    fn nest(top: &Path, deep: usize) {
        let mut at: OwnedFd = File::open(top).unwrap().into();
        for _ in 0..deep {
            mkdirat(&at, "d", Mode::S_IRWXU).unwrap();
            at = openat(&at, "d", FOLDER, Mode::empty()).unwrap();
            let file = openat(&at, "file", OFlag::O_CREAT | OFlag::O_WRONLY, Mode::S_IRUSR).unwrap();
            drop(file);
        }
    }

    #[test]
    fn folders_deep_in_each_other_take_few_descriptors() {
        /// Descriptors that the test's process may have open, including those of the test program.
        const MOST: u64 = 100;

        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        nest(folder.path(), DEEPEST - 1);
        let top = File::open(folder.path()).unwrap();
        // In a child, where the lowered limit affects only the child itself.
        // SAFETY: the child does nothing that needs another thread.
        let child = match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                use nix::sys::resource::{Resource, setrlimit};

                let done = setrlimit(Resource::RLIMIT_NOFILE, MOST, MOST)
                    .is_ok_and(|()| give_all(top.into(), 4711).is_ok());
                // SAFETY: it ends the child at once, without what the parent would do at its end.
                unsafe { nix::libc::_exit(i32::from(!done)) }
            }
            nix::unistd::ForkResult::Parent { child } => child,
        };
        let ended = nix::sys::wait::waitpid(child, None).unwrap();
        assert_eq!(ended, nix::sys::wait::WaitStatus::Exited(child, 0));
        let mut at: OwnedFd = File::open(folder.path()).unwrap().into();
        for depth in 1..DEEPEST {
            at = openat(&at, "d", FOLDER, Mode::empty()).unwrap();
            let found = nix::sys::stat::fstat(&at).unwrap();
            assert_eq!((found.st_gid, found.st_mode & 0o7777), (4711, 0o2770), "{depth}");
            let flags = AtFlags::AT_SYMLINK_NOFOLLOW;
            assert_eq!(nix::sys::stat::fstatat(&at, "file", flags).unwrap().st_gid, 4711, "{depth}");
        }
        // One more is too deep.
        mkdirat(&at, "d", Mode::S_IRWXU).unwrap();
        let error = give_all(File::open(folder.path()).unwrap().into(), 4712).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::ELOOP as i32));
    }

    #[test]
    fn what_is_moved_out_of_the_folder_leads_nowhere() {
        let above = tempfile::tempdir().unwrap();
        let above = above.path();
        for path in ["volume/a/b", "volume/c", "outside"] {
            std::fs::create_dir_all(above.join(path)).unwrap();
        }
        let top: OwnedFd = File::open(above.join("volume")).unwrap().into();
        let level = |path: &str| {
            let itself = identity(&File::open(above.join(path)).unwrap().into()).unwrap();
            let name = Path::new(path).file_name().unwrap().to_owned();
            Level { name, itself, left: Vec::new() }
        };
        let levels = [level("volume"), level("volume/a")];
        let inner: OwnedFd = File::open(above.join("volume/a/b")).unwrap().into();
        let back = |levels: &[Level]| {
            let last = levels.last().unwrap().itself;
            go_back(&top, &inner, levels, last).and_then(|found| identity(&found))
        };
        assert_eq!(back(&levels).unwrap(), levels[1].itself);
        // Moved within, and outside: what it was in is found from the top.
        for to in ["volume/c/b", "outside/b"] {
            std::fs::rename(above.join("volume/a/b"), above.join(to)).unwrap();
            assert_eq!(back(&levels).unwrap(), levels[1].itself);
            std::fs::rename(above.join(to), above.join("volume/a/b")).unwrap();
        }
        // The former parent is moved away too, or replaced by a symbolic link.
        std::fs::rename(above.join("volume/a/b"), above.join("outside/b")).unwrap();
        std::fs::rename(above.join("volume/a"), above.join("outside/a")).unwrap();
        let is_stale = || back(&levels).unwrap_err().raw_os_error() == Some(Errno::ESTALE as i32);
        assert!(is_stale());
        std::os::unix::fs::symlink("../outside/a", above.join("volume/a")).unwrap();
        assert!(is_stale());
    }
}
