//! The verbs: operations on this machine. They know no protocol, except for the messages of events: QGA and the
//! guestlet API both call them.
//!
//! One file per subject. To add a verb: put it into the file of its subject, read files through the [`Root`], and
//! give it typed errors.

use std::sync::Arc;

use crate::sys::effects::{Effects, Machine};
use crate::sys::root::Root;

pub mod accounts;
pub mod block_devices;
pub mod clock;
pub mod disk_rules;
pub mod disks;
pub mod events;
pub mod exec;
pub mod file_systems;
pub mod files;
pub mod forward;
pub mod freeze;
pub mod identity;
pub mod journal;
pub mod load;
mod logind;
pub mod memory_blocks;
pub mod messages;
pub mod metrics;
pub mod monitor;
pub mod network;
pub mod passwords;
pub mod pod_volumes;
pub mod power;
pub mod probes;
pub mod processes;
pub mod processors;
pub mod routes;
pub mod ssh_keys;
pub mod suspend;
pub mod system;
pub mod topology;
pub mod users;
pub mod volumes;

/// This machine, as the protocols see it; clones share it.
#[derive(Debug, Clone)]
pub struct Guest {
    /// Root directory of the guest's files.
    pub root: Root,
    /// Actions on the guest that are not reads or writes of files.
    pub effects: Arc<dyn Effects>,
    /// Events of the guest.
    pub events: Arc<events::Hub>,
    /// Disks that are present, and waits for disks.
    pub disks: Arc<disks::room::Room>,
    /// Disks that the guest was asked to release.
    pub releases: Arc<disks::releases::Releases>,
    /// State of the rules that mount disks.
    pub disk_rules: Arc<disk_rules::Desk>,
    /// Files that clients have open.
    pub files: Arc<files::Files>,
    /// Freezer of the guest's file systems.
    pub freezer: freeze::Freezer,
    /// Programs that clients have started with guest-exec.
    pub processes: Arc<processes::Processes>,
    /// Programs that host halves have started.
    pub programs: Arc<exec::Programs>,
    /// Connections of host halves to listeners in the guest.
    pub forwards: Arc<forward::Forwards>,
    /// Operations on the guest's disks that are under way.
    pub volumes: Arc<volumes::Volumes>,
    /// Operations on volumes of pods that are under way.
    pub pod_volumes: Arc<pod_volumes::PodVolumes>,
    /// Topology: region, zone and host that the guest runs on.
    pub topology: Arc<topology::Desk>,
}

impl Guest {
    /// Creates the handle of this machine; its events belong to the run of the agent with the identifier `run_id`.
    pub fn this_machine(run_id: String) -> Self {
        Self {
            root: Root::default(),
            effects: Arc::new(Machine),
            events: Arc::new(events::Hub::new(run_id)),
            disks: Arc::default(),
            releases: Arc::default(),
            disk_rules: Arc::default(),
            files: Arc::default(),
            freezer: freeze::Freezer::default(),
            processes: Arc::default(),
            programs: Arc::default(),
            forwards: Arc::default(),
            volumes: Arc::default(),
            pod_volumes: Arc::default(),
            topology: Arc::default(),
        }
    }
}

impl Default for Guest {
    /// Creates the handle of this machine, with an empty identifier of the run.
    fn default() -> Self {
        Self::this_machine(String::new())
    }
}
