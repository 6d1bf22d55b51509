//! What the events have made of this guest: the outcome of all of them so far.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use crate::guest::disks::identity::KnownDisk;
use crate::guest::events::Event;
use crate::guest::freeze::end::{Ended, LastFreeze};
use crate::guest::topology::{Known, Node};

/// The guest as it is now, as far as events tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// In the order of their names.
    pub links: Vec<Link>,
    /// In the order in which they were mounted.
    pub file_systems: Vec<FileSystem>,
    /// In the order in which they logged in.
    pub users: Vec<UserSession>,
    /// In the order in which they came.
    pub disks: Vec<Arc<KnownDisk>>,
    /// Absent before a host half has told it.
    pub topology: Option<Arc<Known>>,
    /// Absent where the guest is no node of a cluster.
    pub node: Option<Arc<Node>>,
    /// Absent where it is not known.
    pub health: Option<Arc<Health>>,
    /// Absent if there was none in this run of the agent, and none ended with the run before it.
    pub freeze: Option<Box<LastFreeze>>,
}

/// How the guest's start went, and its services are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health {
    /// `running`, `done`, `degraded` or `error`; empty without cloud-init.
    pub cloud_init: &'static str,
    /// What cloud-init says went wrong.
    pub cloud_init_errors: Vec<String>,
    /// Units of systemd that have failed, in the order of their names.
    pub failed_units: Vec<String>,
}

/// A network interface that the host has an interest in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Such as `eth0`.
    pub name: String,
    /// Absent where there is none of six bytes.
    pub hardware_address: Option<[u8; 6]>,
    /// It is up and has a carrier.
    pub running: bool,
    /// With the length of their prefix: IPv4 first, then by their value, link-local IPv6 addresses last.
    pub addresses: Vec<(IpAddr, u32)>,
}

/// A mounted file system on a disk or from the network.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileSystem {
    /// Where it is mounted.
    pub mount_point: String,
    /// Such as `/dev/vda1` or `server:/export`.
    pub source: String,
    /// Such as `ext4`.
    pub kind: String,
}

/// A session of systemd-logind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserSession {
    /// logind's name for it.
    pub id: String,
    /// The user's name.
    pub user: String,
    /// Such as `tty1`; empty where there is none.
    pub terminal: String,
    /// Empty for a local session.
    pub remote_host: String,
}

impl State {
    /// Makes of the state what `event`, which happened at `time`, says.
    pub fn apply(&mut self, event: &Event, time: SystemTime) {
        match event {
            Event::LinksChanged(links) => self.links.clone_from(links),
            Event::Mounted(file_system) => self.file_systems.push(file_system.clone()),
            Event::Unmounted(file_system) => {
                // The one mounted last goes first, as umount(2) has it.
                if let Some(place) = self.file_systems.iter().rposition(|known| known == file_system) {
                    self.file_systems.remove(place);
                }
            }
            Event::LoggedIn(session) => self.users.push(session.clone()),
            Event::LoggedOut(session) => self.users.retain(|known| known.id != session.id),
            Event::DiskAdded(disk) => self.disks.push(Arc::clone(disk)),
            Event::DiskRemoved { disk, .. } => {
                self.disks.retain(|known| known.generation != disk.generation);
            }
            Event::DiskResized { disk, .. } | Event::DiskChanged(disk) => {
                if let Some(known) = self.disks.iter_mut().find(|known| known.generation == disk.generation) {
                    known.clone_from(disk);
                }
            }
            Event::TopologyChanged(known) => self.topology = Some(Arc::clone(known)),
            Event::NodeChanged(node) => self.node.clone_from(node),
            Event::HealthChanged(health) => self.health = Some(Arc::clone(health)),
            Event::Frozen { file_systems, holder, .. } => {
                self.freeze = Some(Box::new(LastFreeze {
                    holder: holder.clone(),
                    file_systems: *file_systems,
                    since: Some(time),
                    ended: None,
                }));
            }
            Event::Thawed { holder, end, problem, receipt, level } => {
                let begun = self.freeze.take().filter(|freeze| freeze.ended.is_none());
                let (problem, receipt) = (problem.clone(), receipt.clone());
                let ended = Some(Ended { at: time, end: *end, problem, receipt, level });
                let (file_systems, since) =
                    begun.map_or((0, None), |begun| (begun.file_systems, begun.since));
                self.freeze =
                    Some(Box::new(LastFreeze { holder: holder.clone(), file_systems, since, ended }));
            }
            Event::Started { .. }
            | Event::Stopping
            | Event::ShutdownRequested(_)
            | Event::ShutdownBegun
            | Event::ClockJumped { .. }
            | Event::Suspending
            | Event::Resumed
            | Event::DiskMounted { .. }
            | Event::DiskFailed { .. }
            | Event::TopologyRefused { .. } => {}
        }
    }
}
