//! What outlasts the agent: the file that says that file systems are frozen, by whom and which, and the one that says
//! that a freeze ended in another way than by a thaw that was asked for.
//!
//! ```text
//! qga.state.isfrozen        written, and synced, before hooks run and again before the first file system is frozen;
//!                           removed when all is thawed. The same name as qemu-ga's, which is empty.
//! guestlet.freeze-spoiled   the reason, until somebody who asked for a thaw was told
//! ```
//!
//! Both are of one boot of the guest: what a disk or a copy of it keeps of another boot does not count.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::guest::freeze::end::{End, Spoiled};
use crate::receipt::Receipt;
use crate::sys::block_stack::Device;
use crate::sys::files;
use crate::sys::root::Root;

const FROZEN: &str = "qga.state.isfrozen";
const SPOILED: &str = "guestlet.freeze-spoiled";
/// Bytes of a marker: more than a thousand file systems need.
const MOST: u64 = 1 << 20;

/// What a freeze leaves behind if the agent is gone.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeze {
    /// The boot of the guest.
    pub boot_id: String,
    /// The agent's process, and when it was started, in the kernel's ticks since the boot.
    pub process: (u32, u64),
    /// Who asked for it.
    pub holder: String,
    /// The hooks that were told of the freeze, or were about to be.
    pub hooks: Vec<PathBuf>,
    /// The applications whose commands were run, or were about to be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub applications: Vec<Told>,
    /// In the order in which they are frozen.
    pub file_systems: Vec<Frozen>,
    /// The receipt, as far as it was known before the first one is frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Box<Receipt>>,
}

/// An application that was told of the freeze by a command, and is to be told of its end by another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// What people call it.
    pub name: String,
    /// As whom the command runs.
    pub user: String,
    /// The program and its arguments.
    pub thaw: Vec<String>,
}

/// A file system that is frozen, or was about to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// Its number.
    pub device: Device,
    /// Where it was mounted.
    pub mount_point: String,
}

/// What is found in the folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// No freeze.
    Nothing,
    /// A freeze of this boot.
    Freeze(Freeze),
    /// One that says nothing else: qemu-ga's, or one that cannot be read.
    Unknown,
}

impl Found {
    /// Who has asked for the freeze.
    pub fn holder(&self) -> &str {
        match self {
            Self::Freeze(freeze) => &freeze.holder,
            Self::Nothing | Self::Unknown => "an earlier agent",
        }
    }
}

/// The two files.
#[derive(Debug, Clone)]
pub struct Marker {
    folder: PathBuf,
    root: Root,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    boot_id: String,
    #[serde(flatten)]
    spoiled: Spoiled,
}

impl Marker {
    /// The files in `folder`, on the machine at `root`.
    pub fn new(folder: &Path, root: &Root) -> Self {
        Self { folder: folder.to_owned(), root: root.clone() }
    }

    /// The file that says that file systems are frozen.
    pub fn path(&self) -> PathBuf {
        self.folder.join(FROZEN)
    }

    /// A freeze by this process of which nothing is known yet.
    pub fn begin(&self, holder: &str) -> Freeze {
        let id = std::process::id();
        Freeze {
            boot_id: self.boot_id(),
            process: (id, started(&self.root, id).unwrap_or_default()),
            holder: holder.to_owned(),
            ..Freeze::default()
        }
    }

    /// Writes what is, or is about to be, frozen. When this returns, it outlasts the agent.
    ///
    /// # Errors
    /// As open(2), write(2), fsync(2) and rename(2) give them.
    pub fn write(&self, freeze: &Freeze) -> io::Result<()> {
        let text = serde_json::to_vec(freeze).map_err(io::Error::other)?;
        files::replace_synced(&self.path(), &text)
    }

    /// What there is of this boot. What is of another one is removed.
    pub fn find(&self) -> Found {
        let bytes = match files::read_at_most(&self.path(), MOST) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Found::Nothing,
            Err(error) => {
                tracing::warn!("cannot read {}: {error}", self.path().display());
                return Found::Unknown;
            }
        };
        match serde_json::from_slice::<Freeze>(&bytes) {
            Ok(freeze) if self.is_this_boot(&freeze.boot_id) => Found::Freeze(freeze),
            Ok(_) => {
                self.remove();
                Found::Nothing
            }
            Err(_) => Found::Unknown,
        }
    }

    /// Whether the process that froze runs.
    pub fn is_alive(&self, freeze: &Freeze) -> bool {
        let (id, then) = freeze.process;
        started(&self.root, id) == Some(then)
    }

    /// What was found, unless it is a freeze of this process itself.
    pub fn of_another(&self, freeze: &Freeze) -> Option<Found> {
        match self.find() {
            Found::Nothing => None,
            Found::Freeze(found) if found.process == freeze.process => None,
            found => Some(found),
        }
    }

    /// All is thawed.
    pub fn remove(&self) {
        files::remove(&self.path());
    }

    /// Remembers why the next one who asks for a thaw is told that the snapshot is not consistent.
    pub fn spoil(&self, spoiled: &Spoiled) {
        let kept = Kept { boot_id: self.boot_id(), spoiled: spoiled.clone() };
        let written = serde_json::to_vec(&kept)
            .map_err(io::Error::other)
            .and_then(|text| files::replace_synced(&self.folder.join(SPOILED), &text));
        if let Err(error) = written {
            tracing::warn!("cannot write to {}: {error}", self.folder.display());
        }
    }

    /// Why the last freeze was none in the end, if that was not told yet.
    pub fn spoiled(&self) -> Option<Spoiled> {
        let kept = match files::read_at_most(&self.folder.join(SPOILED), MOST) {
            Ok(bytes) => serde_json::from_slice::<Kept>(&bytes?).map_err(io::Error::from),
            Err(error) => Err(error),
        };
        match kept {
            Ok(kept) => self.is_this_boot(&kept.boot_id).then_some(kept.spoiled),
            // There is something to tell, whatever it is.
            Err(error) => Some(Spoiled {
                end: End::Crash,
                holder: "an earlier agent".to_owned(),
                reason: format!("a freeze ended, and it is not known how ({SPOILED}: {error})"),
                told: false,
                receipt: String::new(),
            }),
        }
    }

    /// It was told.
    pub fn forget_spoiled(&self) {
        files::remove(&self.folder.join(SPOILED));
    }

    fn boot_id(&self) -> String {
        self.root.line("/proc/sys/kernel/random/boot_id")
    }

    /// Whether a file is of this boot. Where the boots cannot be told apart, it may be, and counts.
    fn is_this_boot(&self, boot_id: &str) -> bool {
        let this = self.boot_id();
        this.is_empty() || boot_id.is_empty() || boot_id == this
    }
}

/// When a process was started, `proc_pid_stat(5)`; nothing if there is none, or only what its parent has not looked at yet.
fn started(root: &Root, id: u32) -> Option<u64> {
    let stat = root.line(&format!("/proc/{id}/stat"));
    // The name, in brackets, may have any character.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let then = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(then)
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;

    #[test]
    fn a_freeze_is_found_again_in_the_same_boot_only() {
        let folder = tempfile::tempdir().unwrap();
        let marker = Marker::new(folder.path(), &Root::default());
        assert_eq!(marker.find(), Found::Nothing);
        let mut freeze = marker.begin("libvirt");
        freeze.hooks.push("/etc/hook".into());
        freeze.file_systems.push(Frozen { device: (7, 1), mount_point: "/a b".to_owned() });
        marker.write(&freeze).unwrap();
        assert_eq!(marker.find(), Found::Freeze(freeze.clone()));
        assert!(marker.is_alive(&freeze));
        freeze.process.1 += 1;
        assert!(!marker.is_alive(&freeze), "the number was given to another process");
        marker.write(&Freeze { boot_id: "other".to_owned(), ..freeze }).unwrap();
        assert_eq!(marker.find(), Found::Nothing);
        assert!(!marker.path().exists());
        // qemu-ga's.
        std::fs::write(marker.path(), "").unwrap();
        assert_eq!(marker.find(), Found::Unknown);
        // Nor can this one be read.
        std::fs::remove_file(marker.path()).unwrap();
        std::fs::create_dir(marker.path()).unwrap();
        assert_eq!(marker.find(), Found::Unknown);
    }

    #[test]
    fn what_spoiled_a_freeze_is_remembered_until_it_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let marker = Marker::new(folder.path(), &Root::default());
        assert_eq!(marker.spoiled(), None);
        let spoiled = Spoiled {
            end: End::Crash,
            holder: "libvirt".to_owned(),
            reason: "the agent crashed".to_owned(),
            told: false,
            receipt: "0123".to_owned(),
        };
        marker.spoil(&spoiled);
        assert_eq!(marker.spoiled(), Some(spoiled));
        marker.forget_spoiled();
        assert_eq!(marker.spoiled(), None);
        // What cannot be read does not make a freeze a good one.
        std::fs::write(folder.path().join(SPOILED), "{").unwrap();
        assert!(marker.spoiled().unwrap().reason.contains("it is not known how"));
    }
}
