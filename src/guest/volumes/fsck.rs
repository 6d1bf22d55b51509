//! Checks file systems before they are mounted, as the system does at boot. Only what can be repaired safely is
//! repaired. A program that repairs runs to its end, even if the agent ends.

use std::time::Duration;

use crate::guest::Guest;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::work::{self, Fate, ITSELF};
use crate::guest::volumes::{Error, programs};

/// Result of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checked {
    /// No faults.
    Clean,
    /// Faults were found and repaired.
    Repaired,
    /// File systems of this kind are not checked, or the program for it is not installed: the kernel does the
    /// necessary checks itself.
    Skipped,
    /// The program failed with this output; the mount will show whether the file system is usable.
    Unclear(String),
}

// Exit codes of fsck(8), which are added up.
const REPAIRED: i32 = 1;
const RESTART: i32 = 2;
const LEFT: i32 = 4;
const OTHER: i32 = !(REPAIRED | RESTART | LEFT);

/// Checks the file system of `kind` on the device that is held, and repairs what can be repaired without losing
/// data.
///
/// # Errors
/// If it remains damaged, is not the one that was meant, or the check takes longer than `deadline`; the check then
/// continues.
pub async fn check(guest: &Guest, held: &Held, kind: &str, deadline: Duration) -> Result<Checked, Error> {
    let (program, arguments) = match kind {
        "ext2" | "ext3" | "ext4" => ("e2fsck", ["-p", ITSELF]),
        "vfat" => ("fsck.fat", ["-a", ITSELF]),
        // These file systems replay their logs when they are mounted.
        _ => return Ok(Checked::Skipped),
    };
    if programs::find(&guest.root, program).is_none() {
        return Ok(Checked::Skipped);
    }
    let ended = work::run(guest, held, program, &arguments, Fate::Finishes, deadline).await?;
    let said =
        || ended.output.lines().chain(ended.errors.lines()).map(str::trim).collect::<Vec<_>>().join("; ");
    judge(ended.status.code(), said).map_err(|found| Error::Damaged { device: held.file().to_owned(), found })
}

/// Checks the whole file system like [`check`], even if it is marked as clean; ext2, ext3 and ext4 only.
///
/// # Errors
/// The errors of [`check`]; also if the program is missing or fails.
pub(super) async fn check_all(
    guest: &Guest,
    held: &Held,
    kind: &str,
    deadline: Duration,
) -> Result<(), Error> {
    let damaged = |found| Error::Damaged { device: held.file().to_owned(), found };
    if !matches!(kind, "ext2" | "ext3" | "ext4") {
        return Ok(());
    }
    let arguments = ["-f", "-p", ITSELF];
    let ended = work::run(guest, held, "e2fsck", &arguments, Fate::Finishes, deadline).await?;
    match judge(ended.status.code(), || ended.output.clone()).map_err(damaged)? {
        Checked::Unclear(_) => Err(programs::failed("e2fsck", ended)),
        _ => Ok(()),
    }
}

/// Interprets the exit code.
fn judge(code: Option<i32>, said: impl Fn() -> String) -> Result<Checked, String> {
    match code {
        Some(0) => Ok(Checked::Clean),
        Some(code) if code & LEFT != 0 => Err(said()),
        Some(code) if code & OTHER == 0 => Ok(Checked::Repaired),
        _ => Ok(Checked::Unclear(said())),
    }
}

/// Returns whether the file system of `kind` on the device that is held has no faults at all. Writes nothing.
///
/// # Errors
/// If the program for it is missing, or takes longer than `deadline`.
pub(super) async fn is_whole(
    guest: &Guest,
    held: &Held,
    kind: &str,
    deadline: Duration,
) -> Result<bool, Error> {
    let (program, arguments): (_, &[&str]) = match kind {
        "ext4" => ("e2fsck", &["-f", "-n", ITSELF]),
        "xfs" => ("xfs_repair", &["-n", ITSELF]),
        "btrfs" => ("btrfs", &["check", "--readonly", ITSELF]),
        "vfat" => ("fsck.fat", &["-n", ITSELF]),
        // Swap space is only a header.
        _ => return Ok(true),
    };
    let ended = work::run(guest, held, program, arguments, Fate::Killed, deadline).await?;
    Ok(ended.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes() {
        for (code, expected) in [
            (Some(0), Ok(Checked::Clean)),
            (Some(1), Ok(Checked::Repaired)),
            (Some(3), Ok(Checked::Repaired)),
            (Some(4), Err("said".to_owned())),
            (Some(12), Err("said".to_owned())),
            (Some(8), Ok(Checked::Unclear("said".to_owned()))),
            (Some(128), Ok(Checked::Unclear("said".to_owned()))),
            (None, Ok(Checked::Unclear("said".to_owned()))),
        ] {
            assert_eq!(judge(code, || "said".to_owned()), expected, "{code:?}");
        }
    }
}
