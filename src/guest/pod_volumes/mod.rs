//! Volumes of pods: disks that kubelet has mounted for them, below its own folder.
//!
//! ```text
//!  disk ──stage──▶ staged: mounted at the volume's place ──publish──▶ published: bound to a pod's place
//!   ▲                │  (of a block volume: its file is bound           │  (any number of them)
//!   │                │   to the file "device" there)                    │
//!   └────unstage─────┘ ◀─────────────────unpublish──────────────────────┘
//! ```
//! What is staged and published is what the kernel's list of mounts says, never what is remembered: every verb may be
//! repeated, also after the agent, kubelet or the machine has ended in the middle of it. (Only what that list cannot tell
//! is written down, in `awaited`.) One thing at a time is done to a
//! volume, and a bounded number in all. A disk is chosen once more after it is held, and stays held until all is done.
//!
//! - [`disk`] finds the disk of a volume, [`place`] is about kubelet's folder and what is mounted there.
//! - [`stage`], [`publish`] and [`remove`] mount and unmount; `group` gives a volume to a pod's group.
//! - [`share`] is about volumes that are no disk, but served over the network.
//! - [`expand`] takes the room that a disk has gained, [`stats`] tells how full and how well a volume is.

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

/// Operations that run at a time; more wait for their turn.
const AT_ONCE: u32 = 16;

/// How a volume is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// As a device.
    Block,
    /// As a file system.
    Mount {
        /// Its kind; any that is there, or [the usual one](stage::USUAL), if nothing is said.
        kind: Option<String>,
        /// As for mount(8).
        options: Vec<String>,
        /// The group that may write to it.
        group: Option<u32>,
    },
}

/// What is being done to pods' volumes, and where kubelet is.
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

/// What only one may work on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Thing {
    /// What is written to a volume, by its name.
    Volume(String),
    /// A look at how full the volume at a path is.
    Fill(PathBuf),
    /// A new mount from the server of a share.
    Share(String),
    /// A question to the server of a share that is mounted.
    Server((u32, u32), String),
    /// A share's mount at a place of a pod.
    Place(PathBuf),
}

type Turn = turns::Turn<Thing, &'static str>;

/// Nobody else does anything to a volume as long as this is there.
#[derive(Debug)]
struct Operation {
    _turn: Turn,
    _place: OwnedSemaphorePermit,
}

impl PodVolumes {
    /// Says once where kubelet's folder is; without it there are no volumes of pods.
    pub fn serve(&self, root: &Path) {
        let _ = self.root.set(root.to_owned());
    }

    /// kubelet's folder.
    fn root(&self) -> Result<&Path, Error> {
        self.root.get().map(PathBuf::as_path).ok_or(Error::NoKubelet)
    }

    /// Whether a place is in kubelet's folder, as far as that can be told without looking at it.
    pub fn is_kubelets(&self, place: &str) -> bool {
        self.root.get().is_some_and(|root| Path::new(place).starts_with(root))
    }

    /// Completes when nothing is being done.
    pub async fn idle(&self) {
        // Never closed.
        let _ = self.places.acquire_many(AT_ONCE).await;
    }
}

/// Begins to do something to a volume that writes.
async fn begin(guest: &Guest, volume: &str, doing: &'static str) -> Result<Operation, Error> {
    let desk = &guest.pod_volumes;
    let busy = |doing| Error::Busy { volume: volume.to_owned(), doing };
    let turn = desk.turns.take(Thing::Volume(volume.to_owned()), doing).map_err(busy)?;
    let place = Arc::clone(&desk.places).acquire_owned().await.map_err(|_| busy("the agent is stopping"))?;
    unfrozen(guest)?;
    Ok(Operation { _turn: turn, _place: place })
}

/// Nothing is begun while file systems are frozen, or about to be.
fn unfrozen(guest: &Guest) -> Result<(), Error> {
    match guest.freezer.status() {
        freeze::Status::Thawed { .. } => Ok(()),
        freeze::Status::Busy { .. } => Err(Error::Frozen(guest.freezer.held())),
    }
}

/// Looks at files that are under way at a time. Those that hang hold their places, and so no more threads than these hang.
static LOOKS: Semaphore = Semaphore::const_new(32);

/// Does what should take a moment only, beside the event loop.
async fn look<T: Send + 'static>(what: &Path, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
    const PATIENCE: Duration = Duration::from_secs(20);

    let done = tokio::time::timeout(PATIENCE, async {
        // Never closed.
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
