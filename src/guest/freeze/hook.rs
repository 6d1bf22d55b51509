//! Programs that are run before a freeze and after a thaw: one file, or the files of a directory in the order of
//! their names.

use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use crate::guest::freeze::error::{Error, Failure};

/// Suffixes of files that package managers and editors leave behind; qemu-ga's own script skips them as well.
const LEFT_BEHIND: &[&str] = &[
    "~",
    ".bak",
    ".dpkg-backup",
    ".dpkg-bak",
    ".dpkg-dist",
    ".dpkg-new",
    ".dpkg-old",
    ".dpkg-remove",
    ".dpkg-tmp",
    ".orig",
    ".rej",
    ".rpmnew",
    ".rpmorig",
    ".rpmsave",
    ".sample",
];

/// Lists the programs in the order in which they are run before a freeze.
///
/// # Errors
/// If the configured path does not exist, or is a file that cannot be executed.
pub fn list(configured: Option<&Path>) -> Result<Vec<PathBuf>, Error> {
    let Some(path) = configured else { return Ok(Vec::new()) };
    let failed = |source| Error::Hook { hook: path.to_owned(), failure: Failure::Unusable(source) };
    let about = std::fs::metadata(path).map_err(failed)?;
    if !about.is_dir() {
        access(path, AccessFlags::X_OK).map_err(|error| failed(error.into()))?;
        return Ok(vec![path.to_owned()]);
    }
    let mut hooks = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let hook = path.join(&name);
        let is_program = std::fs::metadata(&hook).is_ok_and(|about| about.is_file())
            && access(&hook, AccessFlags::X_OK).is_ok();
        if is_program && !is_left_behind(&name.to_string_lossy()) {
            hooks.push(hook);
        }
    }
    hooks.sort_unstable();
    Ok(hooks)
}

fn is_left_behind(name: &str) -> bool {
    name.starts_with('.') || LEFT_BEHIND.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn file(path: &Path, mode: u32) {
        std::fs::write(path, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_folder_in_the_order_of_names_without_what_is_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        for name in ["20-db.sh", "10-app", "30~", "40.bak", "50.rpmnew", ".60", "70.dpkg-dist", "80.orig"] {
            file(&path.join(name), 0o755);
        }
        file(&path.join("15-not-executable"), 0o644);
        std::fs::create_dir(path.join("16-folder")).unwrap();
        assert_eq!(list(Some(path)).unwrap(), [path.join("10-app"), path.join("20-db.sh")]);
        assert!(list(None).unwrap().is_empty());
    }

    #[test]
    fn one_file_has_to_be_there_and_executable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hook");
        let words = |path: &Path| crate::sys::error_chain::words(&list(Some(path)).unwrap_err());
        assert!(words(&path).contains("No such file"), "{}", words(&path));
        file(&path, 0o644);
        assert!(words(&path).contains("Permission denied"), "{}", words(&path));
        file(&path, 0o755);
        assert_eq!(list(Some(&path)).unwrap(), [path]);
    }
}
