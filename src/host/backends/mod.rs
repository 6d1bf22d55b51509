//! Backends: who says which VMs there are, and whether they run, and plugs disks into them.
//!
//! One folder for each. To add one: implement [`Backend`], [`disks::Disks`], [`volumes::Volumes`], [`consoles::Consoles`] and [`meters::Meters`], give it its settings as a variant of
//! [`Kind`], and its arm in [`Kind::build`], the one place that chooses; and put it through the tests of `conformance`, as
//! `memory`, which is for tests alone, is put through them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::half::Half;
use super::limits::Limits;
use crate::transport::dial::Dialer;
#[cfg(test)]
use crate::transport::dial::Target;
use crate::wire::proto::v1::{Advice, IoError, PowerState, Topology};

pub mod authority;
pub mod catalogue;
#[cfg(test)]
pub mod conformance;
pub mod consoles;
pub mod disks;
#[cfg(feature = "kubevirt")]
pub mod kubevirt;
#[cfg(test)]
pub mod memory;
pub mod meters;
pub mod qemu;
pub mod volumes;

/// What a VM is known by, each to somebody else.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ids {
    /// To volumes and their records, and to the VM's cluster: stays as long as the VM does. In lower case.
    pub lasting: String,
    /// To its guest, by DMI; in lower case. Empty for a VM that has none: its guest must read none. Absent if nobody says
    /// it: its guest may read any.
    pub dmi: Option<String>,
    /// To the cloud provider of its cluster; empty if there is no such name.
    pub provider: String,
}

/// A VM, as its backend names it. Two that are equal may share a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vm {
    /// Unique on this host.
    pub name: String,
    /// What it is known by besides.
    pub ids: Ids,
    /// Name of its cluster; may be empty.
    pub cluster: String,
    /// Reaches its agent.
    pub dial: Dialer,
    /// How many volumes may be plugged into it.
    pub max_volumes: u32,
    /// What its guest may cost.
    pub limits: Arc<Limits>,
    /// [`Change::Suspended`] comes when its guest has suspended itself.
    pub tells_suspension: bool,
}

#[cfg(test)]
impl Vm {
    /// One whose agent is at a unix socket.
    pub fn at(name: &str, socket: &str) -> Self {
        Self {
            name: name.into(),
            ids: Ids::default(),
            cluster: String::new(),
            dial: Target::Unix { path: socket.into() }.into(),
            max_volumes: 0,
            limits: Arc::default(),
            tells_suspension: false,
        }
    }
}

/// What a backend tells.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// There is this VM: it is new, or something of it has changed. What of it stays as it was is kept.
    Present(Arc<Vm>),
    /// This VM is in no list any more. Whether it runs, and what it holds, this does not say.
    Removed {
        /// Which VM.
        name: String,
    },
    /// All VMs were told that there are now. Comes once.
    Synced,
    /// The hypervisor's view of a VM is another one.
    Power {
        /// Which VM.
        name: String,
        /// The new view.
        power: PowerState,
        /// Why the hypervisor does not say it, in words for people; empty where it does, or nobody asks it.
        problem: String,
    },
    /// Where a VM runs; again whenever that changes. Comes for each VM.
    Topology {
        /// Which VM.
        name: String,
        /// Where.
        topology: Arc<Topology>,
    },
    /// These of a VM's disks could not be read or written, in the place of those told before. One that is left out is well,
    /// as far as is known.
    IoErrors {
        /// Which VM.
        name: String,
        /// The errors, one for each disk; few.
        errors: Vec<IoError>,
    },
    /// A VM was reset: whatever ran in it is gone.
    Reset {
        /// Which VM.
        name: String,
    },
    /// The guest of a VM has suspended itself. What becomes of its power is told besides.
    Suspended {
        /// Which VM.
        name: String,
        /// To a disk, and the machine goes off next; else to memory.
        to_disk: bool,
    },
    /// A VM runs there, or nowhere, if its agent is not dialled from here. Comes for each such VM that runs.
    Run {
        /// Which VM.
        name: String,
        /// Where.
        run: Option<Run>,
    },
}

/// A run of a VM whose agent is not dialled from here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The name of the Kubernetes node that it is on.
    pub node: String,
    /// What this run is known by, which no other of the VM is. It stays when it is migrated.
    pub instance: String,
}

impl Change {
    /// The VM that it is about.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Present(vm) => Some(&vm.name),
            Self::Synced => None,
            Self::Removed { name }
            | Self::Power { name, .. }
            | Self::Topology { name, .. }
            | Self::IoErrors { name, .. }
            | Self::Reset { name }
            | Self::Suspended { name, .. }
            | Self::Run { name, .. } => Some(name),
        }
    }
}

/// What a backend cannot learn now, or tell, with the reason; both in words for people.
pub type Problems = BTreeMap<&'static str, String>;

/// How a backend itself is, as people are told. The default is that of one that needs nobody else.
#[derive(Debug, Clone)]
pub struct Standing {
    /// The name of the Kubernetes node whose VMs it has; empty where it is another backend's.
    pub node: String,
    /// What it cannot learn now.
    pub problems: watch::Receiver<Problems>,
    /// What an administrator of its cluster should know.
    pub advice: watch::Receiver<Vec<Advice>>,
}

impl Default for Standing {
    fn default() -> Self {
        let (problems, advice) = (watch::channel(Problems::new()).1, watch::channel(Vec::new()).1);
        Self { node: String::new(), problems, advice }
    }
}

/// Lists VMs and watches them.
pub trait Backend: Send {
    /// Sends changes until the future is dropped or nobody receives them; starts with all VMs, and [`Change::Synced`].
    fn watch(self: Box<Self>, changes: mpsc::Sender<Change>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Which backend, with its settings.
#[derive(Debug, Clone)]
pub enum Kind {
    /// VMs of this machine.
    Qemu {
        /// A list that changes when the settings do.
        machines: watch::Receiver<Vec<qemu::Machine>>,
        /// Where this machine is, and so every VM.
        topology: watch::Receiver<Arc<Topology>>,
        /// The folder of the volumes that are made with their disks.
        volumes: PathBuf,
        /// The pools of all other volumes, which change when the settings do.
        pools: watch::Receiver<Vec<qemu::pools::Pool>>,
        /// The folder in which it is kept which pools they are.
        state: PathBuf,
    },
    /// VMs of a node of a Kubernetes cluster.
    #[cfg(feature = "kubevirt")]
    KubevirtNode(Box<kubevirt::node::Site>),
}

/// The parts of a backend.
pub struct Built {
    /// Lists VMs.
    pub backend: Box<dyn Backend>,
    /// Plugs disks into them while that watches them.
    pub disks: Arc<dyn disks::Disks>,
    /// Keeps volumes, and plugs them as disks.
    pub volumes: Arc<dyn volumes::Volumes>,
    /// Connects to the VMs' consoles while that watches them.
    pub consoles: Arc<dyn consoles::Consoles>,
    /// Measures the VMs while that watches them.
    pub meters: Arc<dyn meters::Meters>,
}

impl Kind {
    /// Makes the backend; what it asks of hypervisors is counted by `half`.
    pub fn build(self, half: &Arc<Half>) -> Built {
        match self {
            Self::Qemu { machines, topology, volumes, pools, state } => {
                let backend = qemu::Qemu::new(machines, topology, Arc::clone(half));
                let (hotplug, consoles) = (backend.hotplug(volumes), Arc::new(backend.serials()));
                let meters = Arc::new(backend.meters());
                let volumes = Arc::new(qemu::pools::Pools::new(pools, state, hotplug.clone()));
                Built { backend: Box::new(backend), disks: Arc::new(hotplug), volumes, consoles, meters }
            }
            #[cfg(feature = "kubevirt")]
            Self::KubevirtNode(site) => {
                let elsewhere = kubevirt::node::elsewhere::Elsewhere;
                Built {
                    backend: Box::new(kubevirt::node::Node::new(*site, Arc::clone(half))),
                    disks: Arc::new(elsewhere),
                    volumes: Arc::new(elsewhere),
                    consoles: Arc::new(elsewhere),
                    meters: Arc::new(meters::Unasked),
                }
            }
        }
    }
}
