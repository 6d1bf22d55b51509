//! Makes a file system, on a blank device only.
//!
//! ```text
//! blank ──note──▶ noted ──mkfs──▶ made ──synced, checked, note removed──▶ done
//!                   ▲               │
//!                   └── mkfs again ─┘ killed in between: the note matches the disk, and what is on it is the
//!                                     file system of the note with faults, or nothing that has a signature
//! ```
//! What is found decides (`decide`); a file system of the requested kind is left as it is.

use std::path::PathBuf;
use std::time::Duration;

use crate::guest::Guest;
use crate::guest::volumes::contents::{Contents, contents, other_than, signed};
use crate::guest::volumes::held::Held;
use crate::guest::volumes::intent::{self, Intent};
use crate::guest::volumes::work::{self, Fate, ITSELF};
use crate::guest::volumes::{Error, PATIENCE, fsck, holding, programs};
use crate::sys::{block_device, superblock};

/// Kinds of file systems that can be made, and swap space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// ext4, without blocks reserved for root.
    Ext4,
    /// XFS, without discarding blocks.
    Xfs,
    /// btrfs, without discarding blocks.
    Btrfs,
    /// FAT (vfat).
    Vfat,
    /// Swap space, which is not mounted but enabled.
    Swap,
}

impl Kind {
    /// List of all kinds.
    pub const ALL: [Self; 5] = [Self::Ext4, Self::Xfs, Self::Btrfs, Self::Vfat, Self::Swap];

    /// Returns the name of the kind, as used by mount(8).
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
            Self::Vfat => "vfat",
            Self::Swap => "swap",
        }
    }

    /// Returns the kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Returns the maximum length of a label in bytes.
    fn longest_label(self) -> usize {
        match self {
            Self::Ext4 => 16,
            Self::Xfs => 12,
            Self::Btrfs => 255,
            Self::Vfat => 11,
            Self::Swap => 15,
        }
    }

    /// Returns the program that makes it, and its arguments before the device: without output, overwriting what an
    /// interrupted run has left, and without discarding blocks that are blank anyway.
    fn program<'a>(self, uuid: &'a str, label: Option<&'a str>) -> (&'static str, Vec<&'a str>) {
        let (program, mut arguments, for_label) = match self {
            Self::Ext4 => {
                ("mkfs.ext4", vec!["-t", "ext4", "-q", "-F", "-E", "nodiscard", "-m", "0", "-U", uuid], "-L")
            }
            Self::Xfs => ("mkfs.xfs", vec!["-q", "-f", "-K", "-m", uuid], "-L"),
            Self::Btrfs => ("mkfs.btrfs", vec!["-q", "-f", "-K", "-U", uuid], "-L"),
            Self::Vfat => ("mkfs.fat", vec!["-I", "-i", uuid], "-n"),
            Self::Swap => ("mkswap", vec!["-f", "-U", uuid], "-L"),
        };
        if let Some(label) = label {
            arguments.extend([for_label, label]);
        }
        (program, arguments)
    }
}

/// Request for a file system.
#[derive(Debug, Clone)]
pub struct Format<'a> {
    /// Identity of the disk that no other disk has, such as its serial number. 1 to 100 bytes.
    pub identity: &'a str,
    /// File system to be made.
    pub kind: Kind,
    /// Label of the file system.
    pub label: Option<&'a str>,
    /// True if data without a signature may be overwritten: the disk is known to be new, on storage that does not
    /// clear disks.
    pub over_data: bool,
    /// Time limit for the whole operation.
    pub deadline: Duration,
}

/// Result of a format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Formatted {
    /// UUID of the file system, as written by blkid(8); absent if an existing one has none.
    pub uuid: Option<String>,
    /// True if the file system was made by this call; false if it already existed.
    pub made: bool,
}

/// Makes a file system if the device that is held is blank.
///
/// # Errors
/// If the device has other contents, is in use, is not the one that was meant, or if making the file system fails.
/// What was begun is continued by the next call.
pub async fn format(guest: &Guest, held: &Held, wanted: &Format<'_>) -> Result<Formatted, Error> {
    check_words(wanted)?;
    let run = Run { guest, wanted, held };
    match tokio::time::timeout(wanted.deadline, run.go()).await {
        Ok(done) => done,
        Err(_) => Err(Error::Silent { what: run.file(), seconds: wanted.deadline.as_secs() }),
    }
}

fn check_words(wanted: &Format<'_>) -> Result<(), Error> {
    if wanted.identity.is_empty() || wanted.identity.len() > intent::LONGEST {
        return Err(Error::wrong("the disk's serial number", "has to have 1 to 100 bytes"));
    }
    if let Some(label) = wanted.label {
        let name = || format!("the label {label:?}");
        if label.is_empty() || label.len() > wanted.kind.longest_label() {
            return Err(Error::wrong(name(), "is empty, or too long for this file system"));
        }
        if label.starts_with('-') || label.chars().any(char::is_control) {
            return Err(Error::wrong(name(), "begins with a dash, or has a control character"));
        }
    }
    Ok(())
}

struct Run<'a> {
    guest: &'a Guest,
    wanted: &'a Format<'a>,
    held: &'a Held,
}

impl Run<'_> {
    fn file(&self) -> PathBuf {
        self.held.file().to_owned()
    }

    async fn go(&self) -> Result<Formatted, Error> {
        let _locked = self.lock_disk().await?;
        let intent = self.earlier().await?;
        let mut found = contents(self.guest, self.held.file()).await?;
        if found == Contents::Blank {
            // Reading the whole device took time, and few programs that write honour the lock.
            found = signed(self.guest, self.held.file()).await?.unwrap_or(found);
        }
        // The contents were read by the device name.
        self.held.verify().await?;
        let bytes = self.held.bytes()?;
        let plan = match decide(&found, intent.as_ref(), self.wanted, bytes) {
            Plan::Look(uuid) => {
                let kind = self.wanted.kind.name();
                let whole = fsck::is_whole(self.guest, self.held, kind, self.wanted.deadline).await?;
                if whole || self.was_used().await? {
                    Plan::Leave(Some(uuid))
                } else {
                    // mkfs.btrfs refuses a UUID that already exists.
                    self.unsign().await?;
                    Plan::Make(uuid)
                }
            }
            plan => plan,
        };
        match plan {
            Plan::Leave(uuid) => {
                self.forget(intent.is_some()).await?;
                Ok(Formatted { uuid, made: false })
            }
            Plan::Make(uuid) => self.make(&uuid, bytes).await,
            Plan::New => {
                let uuid = new_uuid(self.guest, self.wanted.kind)?;
                self.make(&uuid, bytes).await
            }
            _ => {
                // The disk has since been used by somebody else, so the note is outdated.
                self.forget(intent.is_some() && matches!(found, Contents::Known(_))).await?;
                Err(Error::NotBlank { device: self.file(), found: found.words() })
            }
        }
    }

    /// Reads the note of an earlier format.
    async fn earlier(&self) -> Result<Option<Intent>, Error> {
        let (root, identity) = (self.guest.root.clone(), self.wanted.identity.to_owned());
        let read = holding(self.held, PATIENCE, move || Intent::read(&root, &identity)).await?;
        read.map_err(|source| Error::Note { device: self.file(), source })
    }

    /// Locks the disk, and checks that it is not in use.
    async fn lock_disk(&self) -> Result<impl Sized + use<>, Error> {
        if self.held.is_read_only() {
            return Err(Error::ReadOnly { device: self.file() });
        }
        let locked = self.held.lock(PATIENCE).await?;
        let held = self.held.clone();
        let claimed = holding(self.held, PATIENCE, move || block_device::is_claimed(held.device())).await?;
        if claimed.map_err(|source| Error::unreadable(self.held.file(), source))? {
            return Err(Error::Claimed { device: self.file() });
        }
        Ok(locked)
    }

    /// Returns whether the file system of an earlier run was completed or has been mounted since. The note is then
    /// outdated, and faults that a check finds are to be repaired.
    async fn was_used(&self) -> Result<bool, Error> {
        let held = self.held.clone();
        let read = holding(self.held, PATIENCE, move || superblock::read(held.device())).await?;
        let read = read.map_err(|source| Error::unreadable(self.held.file(), source))?;
        Ok(read.is_some_and(|found| found.used))
    }

    /// Erases all signatures on the disk.
    async fn unsign(&self) -> Result<(), Error> {
        let arguments = ["--all", "--quiet", "--", ITSELF];
        let deadline = self.wanted.deadline;
        let ended = work::run(self.guest, self.held, "wipefs", &arguments, Fate::Killed, deadline).await?;
        if ended.status.success() { Ok(()) } else { Err(programs::failed("wipefs", ended)) }
    }

    async fn make(&self, uuid: &str, bytes: u64) -> Result<Formatted, Error> {
        let (program, _) = self.wanted.kind.program("", None);
        // No note without a format: contents that appear on the disk later would be attributed to it.
        if programs::find(&self.guest.root, program).is_none() {
            return Err(Error::NotInstalled { program });
        }
        let intent = Intent {
            identity: self.wanted.identity.to_owned(),
            bytes,
            kind: self.wanted.kind.name().to_owned(),
            uuid: uuid.to_owned(),
        };
        let (root, held) = (self.guest.root.clone(), self.held.clone());
        let note = move || {
            held.check()?;
            let noted = intent.write(&root);
            noted.map_err(|source| Error::Note { device: held.file().to_owned(), source })
        };
        holding(self.held, PATIENCE, note).await??;

        let number = uuid.replace('-', "");
        let argument = match self.wanted.kind {
            Kind::Vfat => number,
            Kind::Xfs => format!("uuid={uuid}"),
            _ => uuid.to_owned(),
        };
        let (program, mut arguments) = self.wanted.kind.program(&argument, self.wanted.label);
        arguments.push(ITSELF);
        let deadline = self.wanted.deadline;
        let ended = work::run(self.guest, self.held, program, &arguments, Fate::Killed, deadline).await?;
        if !ended.status.success() {
            return Err(programs::failed(program, ended));
        }
        let held = self.held.clone();
        let sync = move || block_device::reopen(held.device(), true)?.sync_all();
        let synced = holding(self.held, deadline, sync).await?;
        synced.map_err(|source| Error::unreadable(self.held.file(), source))?;
        let other = other_than(self.guest, self.held.file(), self.wanted.kind.name(), uuid).await?;
        self.held.verify().await?;
        if let Some(found) = other {
            return Err(Error::NotMade { device: self.file(), found: found.words() });
        }
        self.forget(true).await?;
        Ok(Formatted { uuid: Some(uuid.to_owned()), made: true })
    }

    /// Removes the note, if there is one.
    async fn forget(&self, noted: bool) -> Result<(), Error> {
        if !noted {
            return Ok(());
        }
        let (root, identity) = (self.guest.root.clone(), self.wanted.identity.to_owned());
        let removed = holding(self.held, PATIENCE, move || intent::remove(&root, &identity)).await?;
        removed.map_err(|source| Error::Note { device: self.file(), source })
    }
}

/// Returns a random UUID for a file system, as blkid(8) writes it.
fn new_uuid(guest: &Guest, kind: Kind) -> Result<String, Error> {
    let uuid = guest.root.line("/proc/sys/kernel/random/uuid");
    let short = uuid.get(..8).filter(|_| uuid.len() == 36);
    let short = short.ok_or_else(|| Error::wrong("the kernel's random number", "cannot be read"))?;
    Ok(match kind {
        Kind::Vfat => format!("{}-{}", &short[..4], &short[4..]).to_uppercase(),
        _ => uuid,
    })
}

/// Decision, based on the contents that were found.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    /// The file system is the requested one, and stays.
    Leave(Option<String>),
    /// The file system is made with a new UUID.
    New,
    /// The file system is made again, with this UUID.
    Make(String),
    /// The file system is checked, because making it was interrupted. If it has faults it is made again, with this
    /// UUID.
    Look(String),
    /// The device is left alone, which is an error.
    Refuse,
}

fn decide(found: &Contents, intent: Option<&Intent>, wanted: &Format<'_>, bytes: u64) -> Plan {
    let intent = intent.filter(|intent| intent.identity == wanted.identity && intent.bytes == bytes);
    let again = || match intent {
        Some(intent) if intent.kind == wanted.kind.name() => Plan::Make(intent.uuid.clone()),
        _ => Plan::New,
    };
    match found {
        Contents::Blank => again(),
        Contents::Unknown { .. } if intent.is_some() || wanted.over_data => again(),
        Contents::Known(signature) => {
            let uuid = signature.uuid.as_deref();
            let ours =
                intent.filter(|intent| uuid == Some(&intent.uuid) && intent.kind == wanted.kind.name());
            match (ours, found.kind()) {
                (Some(ours), Some(kind)) if kind == ours.kind => Plan::Look(ours.uuid.clone()),
                // blkid reports an ext4 that has no journal yet as one of its predecessors.
                (Some(ours), Some("ext2" | "ext3")) if ours.kind == "ext4" => Plan::Make(ours.uuid.clone()),
                (_, Some(kind)) if kind == wanted.kind.name() => Plan::Leave(signature.uuid.clone()),
                _ => Plan::Refuse,
            }
        }
        Contents::Unknown { .. } | Contents::Several => Plan::Refuse,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::volumes::contents::Signature;

    fn known(kind: &str, uuid: &str) -> Contents {
        Contents::Known(Signature {
            kind: Some(kind.to_owned()),
            uuid: Some(uuid.to_owned()),
            ..Signature::default()
        })
    }

    #[test]
    fn nothing_is_lost() {
        let table = Contents::Known(Signature { table: Some("gpt".to_owned()), ..Signature::default() });
        let both = Contents::Known(Signature {
            kind: Some("ext4".to_owned()),
            table: Some("dos".to_owned()),
            ..Signature::default()
        });
        let data = Contents::Unknown { at: 7 };
        let (again, look) = (|| Plan::Make("ours".to_owned()), || Plan::Look("ours".to_owned()));
        let leave = |uuid: &str| Plan::Leave(Some(uuid.to_owned()));
        // Contents that are found, with the plan without a note, with a matching one, with one for a disk of a
        // different size, and with one for a different kind.
        for (found, plans) in [
            (Contents::Blank, [Plan::New, again(), Plan::New, Plan::New]),
            (data, [Plan::Refuse, again(), Plan::Refuse, Plan::New]),
            (Contents::Several, [Plan::Refuse, Plan::Refuse, Plan::Refuse, Plan::Refuse]),
            (table, [Plan::Refuse, Plan::Refuse, Plan::Refuse, Plan::Refuse]),
            (both, [Plan::Refuse, Plan::Refuse, Plan::Refuse, Plan::Refuse]),
            (known("ext4", "ours"), [leave("ours"), look(), leave("ours"), leave("ours")]),
            (known("ext4", "other"), [leave("other"), leave("other"), leave("other"), leave("other")]),
            (known("ext2", "ours"), [Plan::Refuse, again(), Plan::Refuse, Plan::Refuse]),
            (known("ext2", "other"), [Plan::Refuse, Plan::Refuse, Plan::Refuse, Plan::Refuse]),
            (known("xfs", "ours"), [Plan::Refuse, Plan::Refuse, Plan::Refuse, Plan::Refuse]),
            (known("crypto_LUKS", "x"), [Plan::Refuse, Plan::Refuse, Plan::Refuse, Plan::Refuse]),
        ] {
            let intent = |bytes, kind: &str| Intent {
                identity: "serial".to_owned(),
                bytes,
                kind: kind.to_owned(),
                uuid: "ours".to_owned(),
            };
            let intents =
                [None, Some(intent(100, "ext4")), Some(intent(99, "ext4")), Some(intent(100, "xfs"))];
            let mut wanted = Format {
                identity: "serial",
                kind: Kind::Ext4,
                label: None,
                over_data: false,
                deadline: PATIENCE,
            };
            for (intent, plan) in intents.iter().zip(plans) {
                assert_eq!(decide(&found, intent.as_ref(), &wanted, 100), plan, "{found:?} {intent:?}");
                wanted.identity = "another";
                let alone = decide(&found, intent.as_ref(), &wanted, 100);
                assert_eq!(alone, decide(&found, None, &wanted, 100), "{found:?} {intent:?}");
                wanted.identity = "serial";
            }
            wanted.over_data = true;
            let over = decide(&found, None, &wanted, 100);
            assert_eq!(
                over == Plan::New,
                matches!(found, Contents::Blank | Contents::Unknown { .. }),
                "{found:?}"
            );
        }
    }

    #[test]
    fn words_that_cannot_be() {
        let mut wanted = Format {
            identity: "serial",
            kind: Kind::Xfs,
            label: Some("data"),
            over_data: false,
            deadline: PATIENCE,
        };
        check_words(&wanted).unwrap();
        for label in ["", "-f", "thirteen char", "a\nb"] {
            wanted.label = Some(label);
            check_words(&wanted).unwrap_err();
        }
        let long = "x".repeat(101);
        for identity in ["", &long] {
            wanted = Format { identity, label: None, ..wanted };
            check_words(&wanted).unwrap_err();
        }
        assert!(Kind::ALL.iter().all(|kind| Kind::named(kind.name()) == Some(*kind)));
    }
}
