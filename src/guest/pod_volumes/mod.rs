//! Volumes of pods: disks that kubelet has mounted for them, below its own directory.
//!
//! ```text
//!  disk ──stage──▶ staged: mounted at the volume's place ──publish──▶ published: bound to a pod's place
//!   ▲                │  (of a block volume: its node is bound           │  (any number of them)
//!   │                │   to the file "device" there)                    │
//!   └────unstage─────┘ ◀─────────────────unpublish──────────────────────┘
//! ```
//! The kernel's list of mounts decides what is staged and published, and not a record. So every operation may be
//! repeated, also after the agent, kubelet or the machine has ended in the middle of it. (Only what that list
//! cannot show is recorded, in `awaited`.) One operation at a time runs on a volume, and a limited number in
//! total. A disk is chosen once more after it is held, and stays held until the end of the operation.
//!
//! - [`disk`] finds the disk of a volume; [`place`] handles kubelet's directory and the mounts there.
//! - [`stage`], [`publish`] and [`remove`] mount and unmount; `group` gives a volume to a pod's group.
//! - [`share`] handles volumes that are not on a disk, but served over the network.
//! - [`expand`] uses the space that a disk has gained; [`stats`] reports usage and condition of a volume.

mod awaited;
pub mod disk;
mod error;
pub mod expand;
mod group;
pub mod place;
pub mod publish;
pub mod remove;
pub mod share;
pub mod stage;
pub mod stats;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::guest::{Guest, freeze};
use crate::turns::{self, Turns};
pub use error::Error;

/// Limit on the operations that run at a time; further ones wait.
const AT_ONCE: u32 = 16;

/// Kinds of access to a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// As a block device.
    Block,
    /// As a file system.
    Mount {
        /// Kind of file system; if absent, the present one or [the usual one](stage::USUAL).
        kind: Option<String>,
        /// Mount options, as for mount(8).
        options: Vec<String>,
        /// Group that may write to it.
        group: Option<u32>,
    },
}

/// Running operations on pods' volumes, and kubelet's directory.
#[derive(Debug)]
pub struct PodVolumes {
    turns: Turns<Thing, &'static str>,
    places: Arc<Semaphore>,
    root: OnceLock<PathBuf>,
    awaited: awaited::Awaited,
}

impl Default for PodVolumes {
    fn default() -> Self {
        let places = Arc::new(Semaphore::new(AT_ONCE as usize));
        Self { turns: Turns::default(), places, root: OnceLock::new(), awaited: awaited::Awaited::default() }
    }
}

/// Object on which only one operation may work at a time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Thing {
    /// Volume with this name, while it is changed.
    Volume(String),
    /// Query of the usage of the volume at a path.
    Fill(PathBuf),
    /// New mount from the server of a share.
    Share(String),
    /// Query to the server of a mounted share.
    Server((u32, u32), String),
    /// Mount of a share at a path of a pod.
    Place(PathBuf),
}

type Turn = turns::Turn<Thing, &'static str>;

/// Exclusive right to work on a volume, until it is dropped.
#[derive(Debug)]
struct Operation {
    _turn: Turn,
    _place: OwnedSemaphorePermit,
}

impl PodVolumes {
    /// Sets kubelet's directory, once; without it no volumes of pods are served.
    pub fn serve(&self, root: &Path) {
        let _ = self.root.set(root.to_owned());
    }

    /// Returns kubelet's directory.
    fn root(&self) -> Result<&Path, Error> {
        self.root.get().map(PathBuf::as_path).ok_or(Error::NoKubelet)
    }

    /// Returns whether a path is in kubelet's directory, judged by the path alone.
    pub fn is_kubelets(&self, place: &str) -> bool {
        self.root.get().is_some_and(|root| Path::new(place).starts_with(root))
    }

    /// Waits until no operation is running.
    pub async fn idle(&self) {
        // The semaphore is never closed.
        let _ = self.places.acquire_many(AT_ONCE).await;
    }
}

/// Begins an operation that changes a volume.
async fn begin(guest: &Guest, volume: &str, doing: &'static str) -> Result<Operation, Error> {
    let desk = &guest.pod_volumes;
    let busy = |doing| Error::Busy { volume: volume.to_owned(), doing };
    let turn = desk.turns.take(Thing::Volume(volume.to_owned()), doing).map_err(busy)?;
    let place = Arc::clone(&desk.places).acquire_owned().await.map_err(|_| busy("the agent is stopping"))?;
    unfrozen(guest)?;
    Ok(Operation { _turn: turn, _place: place })
}

/// Fails while file systems are frozen, or about to be: no operation is begun then.
fn unfrozen(guest: &Guest) -> Result<(), Error> {
    match guest.freezer.status() {
        freeze::Status::Thawed { .. } => Ok(()),
        freeze::Status::Busy { .. } => Err(Error::Frozen(guest.freezer.held())),
    }
}

/// Limit on concurrent file system accesses. Those that hang keep their permits, so no more threads than these can
/// hang.
static LOOKS: Semaphore = Semaphore::const_new(32);

/// Runs work that should be brief on a thread that may block.
///
/// # Errors
/// If it takes longer than 20 s; it then continues.
async fn look<T: Send + 'static>(what: &Path, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    const PATIENCE: Duration = Duration::from_secs(20);

    let done = tokio::time::timeout(PATIENCE, async {
        // The semaphore is never closed.
        let place = LOOKS.acquire().await;
        let look = move || {
            let done = work();
            drop(place);
            done
        };
        crate::sys::blocking::run(look).await
    });
    done.await.map_err(|_| Error::Silent { what: what.to_owned(), seconds: PATIENCE.as_secs() })
}
