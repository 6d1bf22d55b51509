//! `guestctl receipts verify VM ID --from FORMAT=FILE`: starts a clone of the guest from a snapshot, has its databases say where they
//! are, and compares that with the receipt.
//!
//! ```text
//! the receipt ──▶ QEMU starts ──▶ the agent answers ──▶ freeze, thaw ──▶ all reached ──▶ the mark
//!                                                         ▲      │ a database is still starting
//!                                                         └──────┘
//! ```
//!
//! The clone has no network and no vsock device, so that nobody but this program can reach it, and no host half takes it for the
//! guest. It writes to files of its own, which have no names, and ends with this program. Its agent is asked over the guest agent's
//! port: it freezes and thaws its file systems once more, for which its databases are asked, and shows the receipt of that. One
//! deadline holds for all of it, and whatever is not known by then is no success.

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

/// How soon databases that did not all answer are asked again.
const AGAIN: Duration = Duration::from_secs(5);

/// A restore test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trial {
    /// The snapshot's disks, in the order in which the clone has them.
    pub disks: Vec<Image>,
    /// QEMU's program.
    pub qemu: PathBuf,
    /// QEMU's accelerator, such as `kvm`; without it KVM where there is one, or else emulation.
    pub accelerator: Option<String>,
    /// Mebibytes of memory of the clone.
    pub memory: u32,
    /// More arguments of QEMU, such as firmware.
    pub arguments: Vec<String>,
    /// How long all of it may take.
    pub within: Duration,
}

/// The image of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    format: &'static str,
    file: PathBuf,
}

impl FromStr for Image {
    type Err = String;

    /// The format has to be said: a guest could make a raw disk look like any other format, with any file of the host behind it.
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

/// Why a clone is not known to have what a receipt says.
#[derive(Debug, PartialEq, Eq)]
struct Unproved {
    /// In words.
    words: String,
    /// Waiting does not change it.
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

/// Does it, and keeps a mark that it was done.
///
/// # Errors
/// If it cannot be done, or the clone does not have what the receipt says: why not.
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

/// Asks until all databases have come up; keeps in `why` why they have not yet.
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
