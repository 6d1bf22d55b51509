//! Reports how full a volume is, and in what condition.

use std::path::Path;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::pod_volumes::place::Shown;
use crate::guest::pod_volumes::{Error, Thing, place, share};
use crate::sys::mountinfo::Mount;
use crate::sys::root::Root;
use crate::sys::usage::{self, Usage};
use crate::sys::{block, block_device, blocking};

/// Time limit for a response of the volume.
const PATIENCE: Duration = Duration::from_secs(5);

/// Usage and condition of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Usage of the volume.
    pub fill: Fill,
    /// Description of a fault, if there is one.
    pub problem: Option<String>,
    /// True if the volume is a share.
    pub is_share: bool,
}

/// Usage of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fill {
    /// Usage of its file system.
    Files(Usage),
    /// Size of its block device in bytes.
    Device(u64),
    /// Not known, as the volume does not report it.
    Unknown,
}

/// Queries a volume and its disk.
///
/// # Errors
/// If it is not mounted there. A fault of the volume is not an error.
pub async fn stats(guest: &Guest, path: &str) -> Result<Stats, Error> {
    let missing = || Error::NotThere(path.into());
    let place = place::of_volume(guest, path).await?;
    let (shown, list) = place::look_at(guest, &place).await?;
    let shown = shown.ok_or_else(missing)?;
    let is_share = share::is_share(&shown.mount);
    let silent = || {
        let problem = Some(format!("the volume has not answered for {} s", PATIENCE.as_secs()));
        Ok(Stats { fill: Fill::Unknown, problem, is_share })
    };
    // Only one thread at a time waits for a volume that does not respond; for a share, only one for all pods that
    // use it.
    let held = if is_share {
        share::server::begin(guest, &shown.mount)
    } else {
        guest.pod_volumes.turns.take(Thing::Fill(path.into()), "its usage is being read").ok()
    };
    let Some(held) = held else { return silent() };
    let root = guest.root.clone();
    let work = blocking::run(move || {
        let told = ask(&root, &shown, &list, &place);
        drop(held);
        told
    });
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(told) => Ok(told),
        Err(_) => silent(),
    }
}

fn ask(root: &Root, shown: &Shown, list: &[Mount], place: &Path) -> Stats {
    if share::is_share(&shown.mount) {
        return match usage::usage(place) {
            Ok(usage) => Stats { fill: Fill::Files(usage), problem: None, is_share: true },
            Err(error) => {
                let problem = Some(format!("the server of {} does not answer: {error}", shown.mount.source));
                Stats { fill: Fill::Unknown, problem, is_share: true }
            }
        };
    }
    let disk = shown.number.filter(|_| !shown.gone).and_then(|number| block::place(root, number).ok());
    let fill = if shown.is_device {
        disk.as_deref().map_or(Fill::Unknown, |disk| Fill::Device(block::bytes(root, disk)))
    } else {
        usage::usage(place).map_or(Fill::Unknown, Fill::Files)
    };
    Stats { fill, problem: problem(root, shown, list, place, disk.as_deref()), is_share: false }
}

/// Returns the worst fault.
fn problem(root: &Root, shown: &Shown, list: &[Mount], place: &Path, disk: Option<&str>) -> Option<String> {
    let Some(disk) = disk else { return Some("the disk was removed".to_owned()) };
    if !shown.is_device {
        let problem = file_system_problem(shown, list);
        if problem.is_some() {
            return problem;
        }
        let name = block::name(disk);
        let errors = root.line(&format!("/sys/fs/ext4/{name}/errors_count"));
        if errors.parse::<u64>().is_ok_and(|count| count > 0) {
            return Some(format!("the file system has had {errors} errors since it was last checked"));
        }
        if let Err(error) = std::fs::read_dir(place).and_then(|mut folder| folder.next().transpose()) {
            return Some(format!("the file system cannot be read: {error}"));
        }
    }
    let file = root.path(&block::file(block::name(disk)));
    let read = block_device::answers(&file);
    read.err().map(|error| format!("the disk cannot be read: {error}"))
}

/// Returns a fault of the file system that the kernel shows in the list of mounts.
fn file_system_problem(shown: &Shown, list: &[Mount]) -> Option<String> {
    let has = |options: &str, word: &str| options.split(',').any(|option| option == word);
    let options = &shown.mount.options;
    if has(options, "shutdown") {
        return Some("the file system has shut down after an error".to_owned());
    }
    // A file system that is mounted read-only on purpose has no writable mount.
    let writable = |mount: &Mount| mount.device == shown.mount.device && has(&mount.flags, "rw");
    let turned = has(options, "ro") && list.iter().any(writable);
    (turned || has(options, "emergency_ro"))
        .then(|| "the file system has become read-only after an error".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mountinfo;

    #[test]
    fn a_file_system_that_has_met_an_error_is_told_from_one_that_was_mounted_read_only() {
        let told = |lines: &str| {
            let list = mountinfo::parse(lines.as_bytes());
            let mount = list.last().unwrap().clone();
            file_system_problem(&Shown { mount, is_device: false, number: None, gone: false }, &list)
        };
        for (lines, expected) in [
            ("1 0 8:0 / /a rw - ext4 /dev/sda rw", None),
            ("1 0 8:0 / /a rw - ext4 /dev/sda ro", Some("read-only")),
            ("1 0 8:0 / /a rw - ext4 /dev/sda rw,emergency_ro", Some("read-only")),
            ("1 0 8:0 / /a rw - xfs /dev/sda rw,shutdown", Some("shut down")),
            // Staged read-only, and published.
            ("1 0 8:0 / /a ro - ext4 /dev/sda ro\n2 0 8:0 / /b ro - ext4 /dev/sda ro", None),
            // Published read-only from a writable mount.
            ("1 0 8:0 / /a rw - ext4 /dev/sda rw\n2 0 8:0 / /b ro - ext4 /dev/sda rw", None),
            ("1 0 8:0 / /a rw - ext4 /dev/sda ro\n2 0 8:0 / /b ro - ext4 /dev/sda ro", Some("read-only")),
            ("1 0 8:1 / /a rw - ext4 /dev/sdb rw\n2 0 8:0 / /b ro - ext4 /dev/sda ro", None),
        ] {
            let found = told(lines);
            assert_eq!(found.is_some(), expected.is_some(), "{lines}: {found:?}");
            assert!(found.unwrap_or_default().contains(expected.unwrap_or_default()), "{lines}");
        }
    }
}
