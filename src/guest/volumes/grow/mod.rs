//! Lets what is on a disk take the room that the disk has gained: from the partition at its end through encryption and
//! LVM to the file system.
//!
//! ```text
//! disk ─▶ last partition ─▶ LUKS ─▶ LVM: physical volume, the one logical volume ─▶ ext4, XFS, btrfs
//! ```
//! Each layer may be missing. Each step looks first whether there is anything to do, and does nothing twice; the next
//! is not taken unless the one before is done. Nothing becomes smaller.

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

/// Layers on top of each other, at most.
const DEEPEST: usize = 16;

/// What became of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The layer, such as `partition 1 of /dev/vda`.
    pub what: String,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It has grown; sizes in bytes.
    Grown {
        /// It was so large.
        from: u64,
        /// It is so large.
        to: u64,
    },
    /// It takes all the room already.
    NotNeeded,
    /// It stays as it is, and so does all above it.
    Refused(String),
}

/// Grows what is on the disk that the device that is held is, or is on. A partition or what is made of one has to be at
/// the disk's end. What was done is told layer by layer, from the disk on. The disk and every layer on it are held until it
/// ends.
///
/// # Errors
/// If the device cannot be looked at, is not the one that was meant, or somebody else does something with it. What a layer
/// does not do is no error, but said of it.
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

/// The disk that a device is made of, and the number of the partition on the way.
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

/// What one layer leads to.
enum Next {
    /// Another layer, on this device.
    On(Held),
    /// Nothing more.
    End,
}

struct Climb<'a> {
    guest: &'a Guest,
    /// All that is held until it ends.
    held: Vec<Held>,
    deadline: Duration,
    partition: Option<u32>,
    steps: Vec<Step>,
}

impl Climb<'_> {
    async fn from(&mut self, mut device: Held) -> Result<(), Error> {
        for _ in 0..DEEPEST {
            let found = contents(self.guest, device.file()).await?;
            // It was read by its name.
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

    /// Holds a device that the disk is made into, for as long as this climbs.
    async fn hold(&mut self, file: &Path) -> Result<Held, Error> {
        let held = Held::beside(self.guest, file, &self.held, "what is on it grows").await?;
        self.held.push(held.clone());
        Ok(held)
    }

    fn refuse(&mut self, what: String, why: impl Into<String>) -> Next {
        self.steps.push(Step { what, outcome: Outcome::Refused(why.into()) });
        Next::End
    }

    /// Notes how large a layer was and is.
    fn note(&mut self, what: String, from: u64, to: u64) {
        let outcome = if to > from { Outcome::Grown { from, to } } else { Outcome::NotNeeded };
        self.steps.push(Step { what, outcome });
    }

    /// What a program said that failed is why a layer stays as it is.
    fn failed(&mut self, what: String, error: &Error) -> Next {
        let why = crate::sys::error_chain::words(error);
        self.refuse(what, why)
    }
}
