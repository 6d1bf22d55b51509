//! `guestctl receipts verify VM ID --from FORMAT=FILE`: starts a clone of the guest from a snapshot, reads
//! the positions of its databases, and compares them with the receipt.
//!
//! ```text
//! the receipt ──▶ QEMU starts ──▶ the agent answers ──▶ freeze, thaw ──▶ all reached ──▶ the mark
//!                                                         ▲      │ a database is still starting
//!                                                         └──────┘
//! ```
//!
//! The clone has no network and no vsock device, so that only this program can reach it, and no host half
//! mistakes it for the guest. It writes to unlinked temporary files, and ends with this program. Its agent is
//! reached over the port of the guest agent: it freezes and thaws its file systems once more, which records
//! the positions of its databases, and returns the receipt of that. One deadline applies to the whole test,
//! and anything unknown by then counts as a failure.

mod clone;
mod compare;
mod mark;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use crate::ctl::Error;
use crate::ctl::print::Printer;
use crate::receipt::{Level, Receipt};
use clone::Machine;
pub use mark::Mark;

/// Pause before databases that did not all answer are examined again.
const AGAIN: Duration = Duration::from_secs(5);

/// Restore test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    /// Disks of the snapshot, in the order in which the clone has them.
    pub disks: Vec<Image>,
    /// Path of QEMU's program.
    pub qemu: PathBuf,
    /// Accelerator of QEMU, such as `kvm`; by default KVM where it is available, and emulation otherwise.
    pub accelerator: Option<String>,
    /// Memory of the clone in MiB.
    pub memory: u32,
    /// Further arguments of QEMU, such as firmware.
    pub arguments: Vec<String>,
    /// Time limit of the whole test.
    pub within: Duration,
}

/// Image of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    format: &'static str,
    file: PathBuf,
}

impl FromStr for Image {
    type Err = String;

    /// Parses `FORMAT=FILE`. The format is required: a guest could make a raw disk look like any other format
    /// that refers to any file of the host.
    fn from_str(text: &str) -> Result<Self, String> {
        let (format, file) =
            text.split_once('=').ok_or("write FORMAT=FILE, such as qcow2=/backup/root.qcow2")?;
        let format = ["raw", "qcow2"].into_iter().find(|known| *known == format);
        let format = format.ok_or("the format must be raw or qcow2")?;
        if file.is_empty() {
            return Err("the file after the = is missing".to_owned());
        }
        Ok(Self { format, file: file.into() })
    }
}

/// Reason why it is not proved that a clone has the content that a receipt describes.
#[derive(Debug, PartialEq, Eq)]
struct Unproved {
    /// Reason for people.
    words: String,
    /// True if waiting does not help.
    is_final: bool,
}

impl Unproved {
    fn for_good(words: impl Into<String>) -> Self {
        Self { words: words.into(), is_final: true }
    }

    fn yet(words: impl Into<String>) -> Self {
        Self { words: words.into(), is_final: false }
    }
}

/// Carries out a restore test, and keeps a mark of its success.
///
/// # Errors
/// Fails if the test cannot be carried out, or if the clone does not have the content that the receipt
/// describes.
pub async fn run(
    printer: &mut Printer,
    receipt: &Receipt,
    signature: &str,
    trial: &Trial,
) -> Result<Mark, Error> {
    let unverified = |why: String| Error::Unmet(format!("not verified: {why}"));
    if receipt.level != Level::Application {
        let level = receipt.level.word();
        return Err(unverified(format!(
            "the receipt says {level}, and no position of a database to compare with"
        )));
    }
    let until = Instant::now() + trial.within;
    let mut clone = Machine::start(trial).map_err(unverified)?;
    printer.note("the clone has been started");
    let mut why = "the agent in the clone does not answer: has the clone booted?".to_owned();
    let asked = timeout_at(until, ask(&mut clone, receipt, &mut why)).await;
    let ended = clone.end().await;
    let compared = match asked {
        Ok(outcome) => outcome,
        Err(_) => Err(format!("in {} s: {why}", trial.within.as_secs())),
    };
    let compared = compared.map_err(unverified)?;
    ended.map_err(unverified)?;
    let mark = Mark::now(receipt, signature, trial, compared);
    mark.keep().map_err(|error| Error::Unmet(format!("the clone has all of it, but {error}")))?;
    Ok(mark)
}

/// Tries until all databases are up; `why` is updated with the reason why they are not yet.
async fn ask(clone: &mut Machine, receipt: &Receipt, why: &mut String) -> Result<Vec<String>, String> {
    clone.wait_agent().await?;
    loop {
        let compared = match clone.receipt().await {
            Ok(here) => compare::all(receipt, &here),
            Err(unproved) => Err(unproved),
        };
        match compared {
            Ok(compared) => return Ok(compared),
            Err(Unproved { words, is_final: true }) => return Err(words),
            Err(Unproved { words, is_final: false }) => *why = words,
        }
        sleep(AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_of_an_image_is_said() {
        let image = Image::from_str("qcow2=/a=b,c").unwrap();
        assert_eq!((image.format, &*image.file), ("qcow2", std::path::Path::new("/a=b,c")));
        for wrong in ["/a", "vmdk=/a", "raw=", "=/a"] {
            assert!(Image::from_str(wrong).is_err(), "{wrong}");
        }
    }
}
