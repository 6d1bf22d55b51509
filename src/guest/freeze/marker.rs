//! Files of a freeze that outlast the agent: one records that file systems are frozen, by whom and which; the
//! other that a freeze ended in a different way than by a requested thaw.
//!
//! ```text
//! qga.state.isfrozen        written, and synced, before hooks run and again before the first file system is frozen;
//!                           removed when all is thawed. The same name as qemu-ga's, which is empty.
//! guestlet.freeze-spoiled   the reason, until a client that requested a thaw has been told
//! ```
//!
//! Both are valid for one boot of the guest: a file that a disk, or a copy of it, keeps from another boot does not
//! count.

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
/// Size limit of a marker in bytes: more than a thousand file systems need.
const MOST: u64 = 1 << 20;

/// Record of a freeze, for the case that the agent ends before it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeze {
    /// Boot ID of the guest.
    pub boot_id: String,
    /// Process ID of the agent, and its start time in clock ticks since the boot.
    pub process: (u32, u64),
    /// Client that requested the freeze.
    pub holder: String,
    /// Hooks that were run with `freeze`, or were about to be.
    pub hooks: Vec<PathBuf>,
    /// Applications whose freeze command was run, or was about to be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub applications: Vec<Told>,
    /// File systems in the order in which they are frozen.
    pub file_systems: Vec<Frozen>,
    /// Receipt as far as it was known before the first file system was frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub receipt: Option<Box<Receipt>>,
}

/// Application that was notified of the freeze by a command, and has to be notified of its end by another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// Name for people.
    pub name: String,
    /// User that runs the command.
    pub user: String,
    /// Program and its arguments.
    pub thaw: Vec<String>,
}

/// File system that is frozen, or was about to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// Device number of the file system.
    pub device: Device,
    /// Mount point at the time of the freeze.
    pub mount_point: String,
}

/// Content of the marker's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// No freeze, or one of another boot.
    Nothing,
    /// A freeze of this boot.
    Freeze(Freeze),
    /// A marker without details: qemu-ga's, or one that cannot be read.
    Unknown,
}

impl Found {
    /// Returns the client that requested the freeze.
    pub fn holder(&self) -> &str {
        match self {
            Self::Freeze(freeze) => &freeze.holder,
            Self::Nothing | Self::Unknown => "an earlier agent",
        }
    }
}

/// Access to the two files.
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
    /// Returns the files in `folder`, of the machine at `root`.
    pub fn new(folder: &Path, root: &Root) -> Self {
        Self { folder: folder.to_owned(), root: root.clone() }
    }

    /// Returns the path of the marker.
    pub fn path(&self) -> PathBuf {
        self.folder.join(FROZEN)
    }

    /// Returns the record of a freeze by this process, so far without its details.
    pub fn begin(&self, holder: &str) -> Freeze {
        let id = std::process::id();
        Freeze {
            boot_id: self.boot_id(),
            process: (id, started(&self.root, id).unwrap_or_default()),
            holder: holder.to_owned(),
            ..Freeze::default()
        }
    }

    /// Writes the record of what is, or is about to be, frozen. When this returns, it outlasts the agent.
    ///
    /// # Errors
    /// The errors of open(2), write(2), fsync(2) and rename(2).
    pub fn write(&self, freeze: &Freeze) -> io::Result<()> {
        let text = serde_json::to_vec(freeze).map_err(io::Error::other)?;
        files::replace_synced(&self.path(), &text)
    }

    /// Reads the marker. Removes it if it is of another boot.
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

    /// Returns whether the process that froze is still running.
    pub fn is_alive(&self, freeze: &Freeze) -> bool {
        let (id, then) = freeze.process;
        started(&self.root, id) == Some(then)
    }

    /// Returns the marker that was found, unless it is of this process.
    pub fn of_another(&self, freeze: &Freeze) -> Option<Found> {
        match self.find() {
            Found::Nothing => None,
            Found::Freeze(found) if found.process == freeze.process => None,
            found => Some(found),
        }
    }

    /// Removes the marker, as all is thawed.
    pub fn remove(&self) {
        files::remove(&self.path());
    }

    /// Records why the next client that requests a thaw is told that the snapshot is not consistent.
    pub fn spoil(&self, spoiled: &Spoiled) {
        let kept = Kept { boot_id: self.boot_id(), spoiled: spoiled.clone() };
        let written = serde_json::to_vec(&kept)
            .map_err(io::Error::other)
            .and_then(|text| files::replace_synced(&self.folder.join(SPOILED), &text));
        if let Err(error) = written {
            tracing::warn!("cannot write to {}: {error}", self.folder.display());
        }
    }

    /// Returns the reason why the last freeze failed in the end, if no client has been told yet.
    pub fn spoiled(&self) -> Option<Spoiled> {
        let kept = match files::read_at_most(&self.folder.join(SPOILED), MOST) {
            Ok(bytes) => serde_json::from_slice::<Kept>(&bytes?).map_err(io::Error::from),
            Err(error) => Err(error),
        };
        match kept {
            Ok(kept) => self.is_this_boot(&kept.boot_id).then_some(kept.spoiled),
            // A freeze did fail, so that has to be reported even if the reason is unknown.
            Err(error) => Some(Spoiled {
                end: End::Crash,
                holder: "an earlier agent".to_owned(),
                reason: format!("a freeze ended, and it is not known how ({SPOILED}: {error})"),
                told: false,
                receipt: String::new(),
            }),
        }
    }

    /// Deletes the reason, as a client has been told.
    pub fn forget_spoiled(&self) {
        files::remove(&self.folder.join(SPOILED));
    }

    fn boot_id(&self) -> String {
        self.root.line("/proc/sys/kernel/random/boot_id")
    }

    /// Returns whether a file is of this boot. If that cannot be determined, the file counts.
    fn is_this_boot(&self, boot_id: &str) -> bool {
        let this = self.boot_id();
        this.is_empty() || boot_id.is_empty() || boot_id == this
    }
}

/// Returns the start time of a process, see `proc_pid_stat(5)`. Returns none if the process does not exist or is a
/// zombie.
fn started(root: &Root, id: u32) -> Option<u64> {
    let stat = root.line(&format!("/proc/{id}/stat"));
    // The name in brackets may contain any character.
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
        // An empty marker, as qemu-ga's.
        std::fs::write(marker.path(), "").unwrap();
        assert_eq!(marker.find(), Found::Unknown);
        // A marker that cannot be read.
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
        // An unreadable reason must not make the freeze count as good.
        std::fs::write(folder.path().join(SPOILED), "{").unwrap();
        assert!(marker.spoiled().unwrap().reason.contains("it is not known how"));
    }
}
