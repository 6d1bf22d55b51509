//! Grows what is on a disk into the space that the disk has gained: from its last partition through encryption and
//! LVM to the file system.
//!
//! ```text
//! disk ─▶ last partition ─▶ LUKS ─▶ LVM: physical volume, the one logical volume ─▶ ext4, XFS, btrfs
//! ```
//! Each layer may be missing. Each step first checks whether there is anything to do, and does nothing twice; the
//! next step is taken only when the one before is done. Nothing is shrunk.

mod file_system;
mod layers;
mod partition;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::volumes::Error;
use crate::guest::volumes::contents::{Contents, Signature, contents};
use crate::guest::volumes::held::Held;
use crate::sys::block;

/// Limit on the number of layers.
const DEEPEST: usize = 16;

/// Result for one layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Name of the layer, such as `partition 1 of /dev/vda`.
    pub what: String,
    /// Outcome for the layer.
    pub outcome: Outcome,
}

/// Outcomes for a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The layer has grown; sizes in bytes.
    Grown {
        /// Size before.
        from: u64,
        /// Size now.
        to: u64,
    },
    /// The layer already uses all the space.
    NotNeeded,
    /// The layer stays as it is, and so do all above it.
    Refused(String),
}

/// Grows what is on the disk that `held` is, or is on. A partition, or what is built on one, has to be at the end
/// of the disk. The result lists the layers from the disk upwards. The disk and every layer on it are held until
/// the end.
///
/// # Errors
/// If the device cannot be inspected, is not the one that was meant, or another operation on it is running. A
/// layer that cannot be grown is not an error, but part of the result.
pub async fn grow(guest: &Guest, held: &Held, deadline: Duration) -> Result<Vec<Step>, Error> {
    held.verify().await?;
    let (disk, partition) = bottom(guest, held);
    let mut climb = Climb { guest, held: vec![held.clone()], deadline, partition, steps: Vec::new() };
    let disk = climb.hold(&disk).await?;
    match tokio::time::timeout(deadline, climb.from(disk.clone())).await {
        Ok(climbed) => climbed.map(|()| climb.steps),
        Err(_) => Err(Error::Silent { what: disk.file().to_owned(), seconds: deadline.as_secs() }),
    }
}

/// Returns the disk that a device is on, and the number of the partition in between.
fn bottom(guest: &Guest, held: &Held) -> (PathBuf, Option<u32>) {
    let Ok(mut place) = block::place(&guest.root, held.number()) else {
        return (held.file().to_owned(), None);
    };
    for _ in 0..DEEPEST {
        match block::parts(&guest.root, &place) {
            Ok(Some(parts)) if parts.len() == 1 => place.clone_from(&parts[0]),
            _ => break,
        }
    }
    let whole = block::whole(&place);
    let number = guest.root.line(&format!("{place}/partition")).parse().ok().filter(|_| whole != place);
    (guest.root.path(&block::file(block::name(whole))), number)
}

/// Continuation after a layer.
enum Next {
    /// Continue with another layer, on this device.
    On(Held),
    /// No layer above, or none that can be grown.
    End,
}

struct Climb<'a> {
    guest: &'a Guest,
    /// Devices that are held until the end.
    held: Vec<Held>,
    deadline: Duration,
    partition: Option<u32>,
    steps: Vec<Step>,
}

impl Climb<'_> {
    async fn from(&mut self, mut device: Held) -> Result<(), Error> {
        for _ in 0..DEEPEST {
            let found = contents(self.guest, device.file()).await?;
            // The contents were read by the device name.
            device.verify().await?;
            let next = match (&found, found.kind()) {
                (Contents::Known(Signature { kind: None, table: Some(_), .. }), _) => {
                    self.partition(&device).await?
                }
                (_, Some("crypto_LUKS")) => self.encryption(&device).await?,
                (_, Some("LVM2_member")) => self.physical_volume(&device).await?,
                (_, Some(kind @ ("ext2" | "ext3" | "ext4" | "xfs" | "btrfs"))) => {
                    self.file_system(&device, kind).await?;
                    Next::End
                }
                (Contents::Blank, _) => Next::End,
                _ => {
                    let what = device.file().display().to_string();
                    self.refuse(what, format!("it holds {}, which cannot be grown", found.words()))
                }
            };
            match next {
                Next::On(above) => device = above,
                Next::End => break,
            }
        }
        Ok(())
    }

    /// Holds a device that is built on the disk, until the end of the climb.
    async fn hold(&mut self, file: &Path) -> Result<Held, Error> {
        let held = Held::beside(self.guest, file, &self.held, "what is on it is being grown").await?;
        self.held.push(held.clone());
        Ok(held)
    }

    fn refuse(&mut self, what: String, why: impl Into<String>) -> Next {
        self.steps.push(Step { what, outcome: Outcome::Refused(why.into()) });
        Next::End
    }

    /// Records the sizes of a layer before and after.
    fn note(&mut self, what: String, from: u64, to: u64) {
        let outcome = if to > from { Outcome::Grown { from, to } } else { Outcome::NotNeeded };
        self.steps.push(Step { what, outcome });
    }

    /// Records the failure of a program as the reason why a layer stays as it is.
    fn failed(&mut self, what: String, error: &Error) -> Next {
        let why = crate::sys::error_chain::words(error);
        self.refuse(what, why)
    }
}
