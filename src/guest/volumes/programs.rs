//! Finds and runs the system's programs for file systems.

use std::path::Path;
use std::time::Duration;

use crate::guest::volumes::Error;
use crate::sys::program::{self, Ended};
use crate::sys::root::Root;

/// Directories of the system's programs, where only root can write.
const FOLDERS: &[&str] = &["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Returns the path of a program, if it is installed.
pub(super) fn find(root: &Root, name: &str) -> Option<String> {
    let paths = FOLDERS.iter().map(|folder| root.path(&format!("{folder}/{name}")));
    paths.into_iter().find(|path| path.is_file())?.into_os_string().into_string().ok()
}

/// Runs a program to its end, whatever its exit status. Only for programs that write to no disk, or that find
/// their devices by themselves, such as LVM.
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

/// Returns the error of a program that failed, with the end of its output.
pub(super) fn failed(name: &'static str, ended: Ended) -> Error {
    let said = if ended.errors.trim().is_empty() { ended.output } else { ended.errors };
    let lines: Vec<_> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let message = lines[lines.len().saturating_sub(3)..].join("; ");
    Error::Program(program::Error::Failed { program: name.to_owned(), status: ended.status, message })
}

/// Returns a path as an argument.
///
/// # Errors
/// If it is not valid UTF-8.
pub(super) fn text(path: &Path) -> Result<&str, Error> {
    path.to_str().ok_or_else(|| Error::NotText { path: path.to_owned() })
}
