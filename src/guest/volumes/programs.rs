//! The system's programs for file systems: where they are, and how they are run.

use std::path::Path;
use std::time::Duration;

use crate::guest::volumes::Error;
use crate::sys::program::{self, Ended};
use crate::sys::root::Root;

/// Where the system keeps them; nobody else can write there.
const FOLDERS: &[&str] = &["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// The path of a program, if it is installed.
pub(super) fn find(root: &Root, name: &str) -> Option<String> {
    let paths = FOLDERS.iter().map(|folder| root.path(&format!("{folder}/{name}")));
    paths.into_iter().find(|path| path.is_file())?.into_os_string().into_string().ok()
}

/// Runs a program that writes to no disk, or is named by others than the kernel, until it ends, however that is.
///
/// # Errors
/// If it is not installed, cannot be started, or takes longer than `deadline`.
pub(super) async fn run(
    root: &Root,
    name: &'static str,
    arguments: &[&str],
    deadline: Duration,
) -> Result<Ended, Error> {
    let path = find(root, name).ok_or(Error::NotInstalled { program: name })?;
    Ok(program::run_to_end(&path, arguments, deadline).await?)
}

/// That it failed, with the last that it said.
pub(super) fn failed(name: &'static str, ended: Ended) -> Error {
    let said = if ended.errors.trim().is_empty() { ended.output } else { ended.errors };
    let lines: Vec<_> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let message = lines[lines.len().saturating_sub(3)..].join("; ");
    Error::Program(program::Error::Failed { program: name.to_owned(), status: ended.status, message })
}

/// A path as an argument.
///
/// # Errors
/// If it is no text.
pub(super) fn text(path: &Path) -> Result<&str, Error> {
    path.to_str().ok_or_else(|| Error::NotText { path: path.to_owned() })
}
