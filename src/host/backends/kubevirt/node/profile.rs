//! Seccomp profile of the node role's container. It is part of the program, so that it always matches this
//! version: an init container of the same image installs it where kubelet looks for it.

use std::io;
use std::path::{Path, PathBuf};

use crate::sys::files;

/// Seccomp profile of the node's container, in the format that container runtimes read.
pub const PROFILE: &str = include_str!("../../../../../packaging/kubernetes/host/seccomp/node.json");

/// File name of the profile, as referenced by packaging/kubernetes/host/base/node.yaml.
const NAME: &str = "node.json";

/// Writes the profile to `directory` atomically, and returns its path.
///
/// # Errors
/// If it cannot be written.
pub fn install(directory: &Path) -> io::Result<PathBuf> {
    let file = directory.join(NAME);
    files::replace_synced(&file, PROFILE.as_bytes())?;
    Ok(file)
}
