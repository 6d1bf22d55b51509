//! Backends: list the VMs, report whether they run, and plug disks into them.
//!
//! Each backend has its own directory. To add one: implement [`Backend`], [`disks::Disks`],
//! [`volumes::Volumes`], [`consoles::Consoles`] and [`meters::Meters`]; add its settings as a variant of
//! [`Kind`], and an arm in [`Kind::build`], the only place that chooses a backend; and run the tests of
//! `conformance` on it, as is done for `memory`, which exists only for tests.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::half::Half;
use super::limits::Limits;
use crate::labels::Labels;
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

/// Identifiers of a VM, each used by a different party.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ids {
    /// Identifier for volumes and their records, and for the VM's cluster: stays the same for the life of the VM.
    /// In lower case.
    pub lasting: String,
    /// System UUID that its guest reads from DMI, in lower case. Empty if the VM has none, so that the guest must
    /// read none; `None` if it is unknown, so that the guest may read any.
    pub dmi: Option<String>,
    /// Identifier for the cloud provider of its cluster; empty if there is none.
    pub provider: String,
}

/// VM as its backend describes it. Two equal descriptions may share a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vm {
    /// Name, unique on this host.
    pub name: String,
    /// Further identifiers.
    pub ids: Ids,
    /// Name of its cluster; may be empty.
    pub cluster: String,
    /// Dials the VM's agent.
    pub dial: Dialer,
    /// Maximum number of volumes that may be plugged into it.
    pub max_volumes: u32,
    /// Limits on the resources that its guest may consume.
    pub limits: Arc<Limits>,
    /// True if the backend reports [`Change::Suspended`] when its guest has suspended itself.
    pub tells_suspension: bool,
}

#[cfg(test)]
impl Vm {
    /// Builds a VM whose agent listens on a unix socket.
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

/// Event that a backend reports.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// The VM exists: it is new, or one of its properties has changed. State that belongs to unchanged properties
    /// is kept.
    Present(Arc<Vm>),
    /// The VM is no longer in any list. This says nothing about whether it still runs or which volumes it holds.
    Removed {
        /// Name of the VM.
        name: String,
    },
    /// All present VMs have been reported. Sent once.
    Synced,
    /// The power state that the hypervisor reports for a VM has changed.
    Power {
        /// Name of the VM.
        name: String,
        /// New power state.
        power: PowerState,
        /// Reason why the hypervisor does not report the state, for people; empty if it does, or is not queried.
        problem: String,
    },
    /// Location where a VM runs; sent for each VM, and again after each change.
    Topology {
        /// Name of the VM.
        name: String,
        /// New location.
        topology: Arc<Topology>,
    },
    /// Labels of a VM. Sent for a present VM that has labels, and again after each change, which does not affect its
    /// session.
    Labels {
        /// Name of the VM.
        name: String,
        /// All of its labels.
        labels: Arc<Labels>,
    },
    /// Disks of a VM with I/O errors; replaces the previous list. A disk that is not in the list has no known
    /// errors.
    IoErrors {
        /// Name of the VM.
        name: String,
        /// Errors, one per disk; their number is limited.
        errors: Vec<IoError>,
    },
    /// A VM was reset: all of its processes have ended.
    Reset {
        /// Name of the VM.
        name: String,
    },
    /// The guest of a VM has suspended itself. The resulting power state is reported separately.
    Suspended {
        /// Name of the VM.
        name: String,
        /// True for suspension to disk, after which the VM powers off; false for suspension to memory.
        to_disk: bool,
    },
    /// Location of the present run, for a VM whose agent is not dialled from here. Sent for each such VM that runs,
    /// and after changes.
    Run {
        /// Name of the VM.
        name: String,
        /// Present run; `None` if the VM does not run.
        run: Option<Run>,
    },
}

/// Run of a VM whose agent is not dialled from here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Name of the Kubernetes node that it is on.
    pub node: String,
    /// Identifier of this run, unique among the runs of the VM. It stays the same across migrations.
    pub instance: String,
}

impl Change {
    /// Returns the name of the VM that the event concerns, if it concerns a single one.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Present(vm) => Some(&vm.name),
            Self::Synced => None,
            Self::Removed { name }
            | Self::Power { name, .. }
            | Self::Topology { name, .. }
            | Self::Labels { name, .. }
            | Self::IoErrors { name, .. }
            | Self::Reset { name }
            | Self::Suspended { name, .. }
            | Self::Run { name, .. } => Some(name),
        }
    }
}

/// Facts that a backend cannot learn or report at present, each with the reason; both are for people.
pub type Problems = BTreeMap<&'static str, String>;

/// Status of the backend itself, as shown to people. The default suits a backend that depends on no other
/// service.
#[derive(Debug, Clone)]
pub struct Standing {
    /// Name of the Kubernetes node whose VMs the backend reports; empty for other backends.
    pub node: String,
    /// Present problems of the backend.
    pub problems: watch::Receiver<Problems>,
    /// Advice for the administrator of the backend's cluster.
    pub advice: watch::Receiver<Vec<Advice>>,
}

impl Default for Standing {
    fn default() -> Self {
        let (problems, advice) = (watch::channel(Problems::new()).1, watch::channel(Vec::new()).1);
        Self { node: String::new(), problems, advice }
    }
}

/// Lists VMs and watches them for changes.
pub trait Backend: Send {
    /// Sends changes until the future is dropped or the receiver is closed; starts with all VMs, followed by
    /// [`Change::Synced`].
    fn watch(self: Box<Self>, changes: mpsc::Sender<Change>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// Choice of the backend, with its settings.
#[derive(Debug, Clone)]
pub enum Kind {
    /// VMs of this machine.
    Qemu {
        /// VMs of the settings; updated when the settings change.
        machines: watch::Receiver<Vec<qemu::Machine>>,
        /// Location of this machine, and thus of all its VMs.
        topology: watch::Receiver<Arc<Topology>>,
        /// Directory of the volumes that are created together with their disks.
        volumes: PathBuf,
        /// Pools of all other volumes; updated when the settings change.
        pools: watch::Receiver<Vec<qemu::pools::Pool>>,
        /// Directory of the file that records which pool belongs at which path.
        state: PathBuf,
    },
    /// VMs on a node of a Kubernetes cluster.
    #[cfg(feature = "kubevirt")]
    KubevirtNode(Box<kubevirt::node::Site>),
}

/// Parts of a backend.
pub struct Built {
    /// Lists VMs and watches them for changes.
    pub backend: Box<dyn Backend>,
    /// Plugs disks into the VMs, while they are watched.
    pub disks: Arc<dyn disks::Disks>,
    /// Stores volumes, and plugs them as disks.
    pub volumes: Arc<dyn volumes::Volumes>,
    /// Connects to the VMs' consoles, while they are watched.
    pub consoles: Arc<dyn consoles::Consoles>,
    /// Reads the VMs' metrics, while they are watched.
    pub meters: Arc<dyn meters::Meters>,
}

impl Kind {
    /// Builds the backend; its requests to hypervisors are counted in the metrics of `half`.
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
