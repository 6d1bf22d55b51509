//! The seccomp profile of the node role's container. It is part of the program, so that it is always the one that this version
//! needs: an init container of the same image puts it where kubelet looks for it.

use std::io;
use std::path::{Path, PathBuf};

use crate::sys::files;

/// What the container may ask the kernel for, as container runtimes read it.
pub const PROFILE: &str = include_str!("../../../../../packaging/kubernetes/host/seccomp/node.json");

/// Its name in the directory, as packaging/kubernetes/host/base/node.yaml names it.
const NAME: &str = "node.json";

/// Puts the profile into `directory`, whole or not at all; returns where it is.
///
/// # Errors
/// If it cannot be written there.
pub fn install(directory: &Path) -> io::Result<PathBuf> {
    let file = directory.join(NAME);
    files::replace_synced(&file, PROFILE.as_bytes())?;
    Ok(file)
}
