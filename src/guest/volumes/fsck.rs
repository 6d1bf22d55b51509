//! Checks of file systems before they are mounted, as the system does them when it starts: what is safely repaired is
//! repaired, and nothing else. A program that repairs is left to its work, whatever becomes of the agent.

use std::time::Duration;

use crate::guest::Guest;
use crate::guest::volumes::held::Held;
use crate::guest::volumes::work::{self, Fate, ITSELF};
use crate::guest::volumes::{Error, programs};

/// What a check came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checked {
    /// Nothing is wrong.
    Clean,
    /// What was wrong has been repaired.
    Repaired,
    /// File systems of this kind are not checked, or the program for it is not installed: the kernel checks what it
    /// needs itself.
    Skipped,
    /// The program could not do its work, and said this; mounting it will tell.
    Unclear(String),
}

// Exit codes of fsck(8), which are added up.
const REPAIRED: i32 = 1;
const RESTART: i32 = 2;
const LEFT: i32 = 4;
const OTHER: i32 = !(REPAIRED | RESTART | LEFT);

/// Checks the file system of `kind` on the device that is held, and repairs it as far as nothing can be lost by that.
///
/// # Errors
/// If it stays damaged, is not the one that was meant, or the check takes longer than `deadline`; it goes on then.
pub async fn check(guest: &Guest, held: &Held, kind: &str, deadline: Duration) -> Result<Checked, Error> {
    let (program, arguments) = match kind {
        "ext2" | "ext3" | "ext4" => ("e2fsck", ["-p", ITSELF]),
        "vfat" => ("fsck.fat", ["-a", ITSELF]),
        // These replay their logs when they are mounted.
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

/// As [`check`], of all that is there, even if nothing says that it needs it; ext2, ext3 and ext4 only.
///
/// # Errors
/// As [`check`], and if the program for it is missing or cannot do its work.
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

/// What an exit code means.
fn judge(code: Option<i32>, said: impl Fn() -> String) -> Result<Checked, String> {
    match code {
        Some(0) => Ok(Checked::Clean),
        Some(code) if code & LEFT != 0 => Err(said()),
        Some(code) if code & OTHER == 0 => Ok(Checked::Repaired),
        _ => Ok(Checked::Unclear(said())),
    }
}

/// Whether the file system of `kind` on the device that is held has no fault at all. Nothing is written.
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
        // Nothing but a header.
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
