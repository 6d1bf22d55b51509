//! The verbs over this machine. They know no protocol, but for the messages of events: QGA and the guestlet API both call them.
//!
//! One file per subject. To add a verb: put it into its subject's file, with what it reads going through
//! the [`Root`], and its errors typed.

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

/// This machine, as the protocols hold it; clones share it.
#[derive(Debug, Clone)]
pub struct Guest {
    /// Where its files are.
    pub root: Root,
    /// What it can do to itself that is no file.
    pub effects: Arc<dyn Effects>,
    /// What happens in it.
    pub events: Arc<events::Hub>,
    /// The disks that it has, and those that are waited for.
    pub disks: Arc<disks::room::Room>,
    /// The disks that it was asked to let go of.
    pub releases: Arc<disks::releases::Releases>,
    /// What is mounted by rules.
    pub disk_rules: Arc<disk_rules::Desk>,
    /// Files that clients have open in it.
    pub files: Arc<files::Files>,
    /// Its freezes.
    pub freezer: freeze::Freezer,
    /// Programs that clients have started in it.
    pub processes: Arc<processes::Processes>,
    /// Programs that host halves have started in it.
    pub programs: Arc<exec::Programs>,
    /// Connections of host halves with what listens in it.
    pub forwards: Arc<forward::Forwards>,
    /// What is being done to its disks.
    pub volumes: Arc<volumes::Volumes>,
    /// What is being done to volumes of pods.
    pub pod_volumes: Arc<pod_volumes::PodVolumes>,
    /// Where it runs.
    pub topology: Arc<topology::Desk>,
}

impl Guest {
    /// This machine, whose events belong to the run of the agent that is called `run_id`.
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
    /// This machine, in a run of the agent without a name.
    fn default() -> Self {
        Self::this_machine(String::new())
    }
}
