//! `guestctl fs` and `guestctl trim`.

use std::time::Duration;

use serde::Serialize;

use super::{SOON, answer};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::print::Printer;
use crate::text;
use crate::wire::proto::v1::trimmed_file_system::Outcome;
use crate::wire::proto::v1::{
    FileSystemOnDisk, ListFileSystemsRequest, TrimFileSystemsRequest, TrimmedFileSystem,
};

/// File system for programs.
#[derive(Debug, Serialize)]
struct FileSystem {
    mount_point: String,
    r#type: String,
    device: String,
    used_bytes: Option<u64>,
    total_bytes: Option<u64>,
    total_bytes_privileged: Option<u64>,
    disks: Vec<Disk>,
}

#[derive(Debug, Serialize)]
struct Disk {
    file: String,
    serial: String,
}

/// Result of trimming a file system, for programs. Only one of the two results is present.
#[derive(Debug, Serialize)]
struct Trim {
    mount_point: String,
    trimmed: Option<u64>,
    problem: Option<String>,
    /// True if the file system does not support trimming.
    unsupported: bool,
}

impl From<FileSystemOnDisk> for FileSystem {
    fn from(one: FileSystemOnDisk) -> Self {
        Self {
            mount_point: one.mount_point,
            r#type: one.r#type,
            device: one.device,
            used_bytes: one.used_bytes,
            total_bytes: one.total_bytes,
            total_bytes_privileged: one.total_bytes_privileged,
            disks: one.disks.into_iter().map(|disk| Disk { file: disk.file, serial: disk.serial }).collect(),
        }
    }
}

impl From<TrimmedFileSystem> for Trim {
    fn from(one: TrimmedFileSystem) -> Self {
        let (trimmed, problem) = match one.outcome {
            Some(Outcome::Trimmed(bytes)) => (Some(bytes), None),
            Some(Outcome::Problem(problem)) => (None, Some(problem)),
            None => (None, Some("the guest does not report it".to_owned())),
        };
        let unsupported = problem.is_some() && one.unsupported;
        Self { mount_point: one.mount_point, trimmed, problem, unsupported }
    }
}

/// Shows the file systems on disks, and how full they are.
///
/// # Errors
/// Fails if the guest cannot be reached.
pub async fn list(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = ListFileSystemsRequest { name: name.clone() };
    let found = answer(daemon.file_systems().list_file_systems(request), &name, SOON).await?.file_systems;
    let values: Vec<_> = found.into_iter().map(FileSystem::from).collect();
    Ok(printer.value(&values, || rows(&values))?)
}

fn rows(file_systems: &[FileSystem]) -> String {
    let head = ["MOUNT POINT", "TYPE", "DEVICE", "USED", "SIZE", "DISKS"];
    let mut rows = vec![head.map(str::to_owned)];
    let size = |bytes: Option<u64>| bytes.map_or("-".to_owned(), text::size);
    for one in file_systems {
        let disks: Vec<_> = one.disks.iter().map(|disk| disk.file.as_str()).collect();
        rows.push([
            one.mount_point.clone(),
            one.r#type.clone(),
            text::or_dash(&one.device),
            size(one.used_bytes),
            size(one.total_bytes),
            text::or_dash(&disks.join(" ")),
        ]);
    }
    text::table(&rows)
}

/// Trims the file systems at these mount points: unused ranges of at least `minimum` bytes are released.
///
/// # Errors
/// Fails if the guest cannot be reached, a file system could not be trimmed, or the answer lacks one that was
/// named. One that does not support it is an error only if it was named.
pub async fn trim(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    (mounts, minimum): (Vec<String>, u64),
    within: Duration,
) -> Result<(), Error> {
    let request = TrimFileSystemsRequest { name: name.clone(), mount_points: mounts.clone(), minimum };
    let done = answer(daemon.file_systems().trim_file_systems(request), &name, within).await?.file_systems;
    let values = outcomes(done, &mounts);
    printer.value(&values, || trim_rows(&values))?;
    let has_failed = |one: &&Trim| one.problem.is_some() && !(one.unsupported && mounts.is_empty());
    let failed = values.iter().filter(has_failed);
    let failed: Vec<_> = failed.map(|one| one.mount_point.as_str()).collect();
    if failed.is_empty() {
        return Ok(());
    }
    Err(Error::Unmet(format!("not trimmed: {}", failed.join(" "))))
}

/// Returns the result for each file system, including those that were named but are missing from the answer.
fn outcomes(done: Vec<TrimmedFileSystem>, named: &[String]) -> Vec<Trim> {
    let mut values: Vec<_> = done.into_iter().map(Trim::from).collect();
    for mount in named {
        if !values.iter().any(|one| one.mount_point == *mount) {
            let problem = "the guest has not reported it".to_owned();
            values.push(Trim {
                mount_point: mount.clone(),
                trimmed: None,
                problem: Some(problem),
                unsupported: false,
            });
        }
    }
    values
}

fn trim_rows(trims: &[Trim]) -> String {
    let mut rows = vec![["MOUNT POINT", "TRIMMED"].map(str::to_owned)];
    for one in trims {
        let outcome = one.trimmed.map(text::size).or_else(|| one.problem.clone()).unwrap_or_default();
        rows.push([one.mount_point.clone(), outcome]);
    }
    text::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guest_leaves_out_is_not_taken_for_done() {
        let one = |mount_point: &str, outcome| TrimmedFileSystem {
            mount_point: mount_point.into(),
            outcome,
            ..TrimmedFileSystem::default()
        };
        let done = vec![one("/", Some(Outcome::Trimmed(7))), one("/b", None)];
        let values = outcomes(done, &["/".to_owned(), "/c".to_owned()]);
        let told: Vec<_> =
            values.iter().map(|one| (one.mount_point.as_str(), one.problem.as_deref())).collect();
        let expected = [
            ("/", None),
            ("/b", Some("the guest does not report it")),
            ("/c", Some("the guest has not reported it")),
        ];
        assert_eq!(told, expected);
    }
}
