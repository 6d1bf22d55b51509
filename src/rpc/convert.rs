//! The guest's events and state as messages.

use std::net::IpAddr;
use std::time::SystemTime;

use crate::guest::disks::identity::{Holder, KnownDisk, Serial};
use crate::guest::disks::location::Pci;
use crate::guest::events::{Event, News, Opening, Position, Recorded};
use crate::guest::freeze::end::{End, LastFreeze};
use crate::guest::network::hardware_address;
use crate::guest::state::{FileSystem, Health, Link, State, UserSession};
use crate::guest::topology::{Node, Topology};
use crate::sys::block::Partition;
use crate::wire::proto::v1;
use crate::wire::proto::v1::event::Kind;

/// Disks of one state, and partitions and holders of one disk: the first so many. A host half takes no
/// more than 256 KiB at a time, unless it is told otherwise.
const MOST_DISKS: usize = 256;
const MOST_PARTS: usize = 32;

/// What a watcher is told, as a message.
pub fn news(news: News) -> v1::Event {
    match news {
        News::Event(recorded) => event(&recorded),
        News::Tick(sequence) => message(sequence, SystemTime::now(), Kind::Heartbeat(v1::Heartbeat {})),
        News::Restart(opening) => ready(opening),
    }
}

/// The message that says where a stream begins.
pub fn ready(opening: Opening) -> v1::Event {
    let ready = v1::AgentReady {
        run_id: opening.position.run_id,
        resumed: opening.state.is_none(),
        missed: opening.missed,
        state: opening.state.as_ref().map(|known| Box::new(state(known))),
    };
    message(opening.position.sequence, SystemTime::now(), Kind::AgentReady(ready))
}

fn message(sequence: u64, time: SystemTime, kind: Kind) -> v1::Event {
    v1::Event { sequence, time: Some(time.into()), kind: Some(kind) }
}

fn event(recorded: &Recorded) -> v1::Event {
    let kind = match &recorded.event {
        Event::Started { first_since_boot } => {
            Kind::AgentStarted(v1::AgentStarted { first_since_boot: *first_since_boot })
        }
        Event::Stopping => Kind::AgentStopping(v1::AgentStopping {}),
        Event::ShutdownRequested(mode) => {
            Kind::ShutdownRequested(v1::ShutdownRequested { mode: mode.to_string() })
        }
        Event::ShutdownBegun => Kind::ShutdownBegun(v1::ShutdownBegun {}),
        Event::LinksChanged(links) => {
            Kind::InterfacesChanged(v1::InterfacesChanged { interfaces: links.iter().map(link).collect() })
        }
        Event::Mounted(mounted) => {
            Kind::FileSystemMounted(v1::FileSystemMounted { file_system: Some(file_system(mounted)) })
        }
        Event::Unmounted(unmounted) => {
            Kind::FileSystemUnmounted(v1::FileSystemUnmounted { file_system: Some(file_system(unmounted)) })
        }
        Event::LoggedIn(session) => {
            Kind::UserLoggedIn(v1::UserLoggedIn { session: Some(user_session(session)) })
        }
        Event::LoggedOut(session) => {
            Kind::UserLoggedOut(v1::UserLoggedOut { session: Some(user_session(session)) })
        }
        Event::ClockJumped { milliseconds } => {
            Kind::ClockJumped(v1::ClockJumped { milliseconds: *milliseconds })
        }
        Event::Suspending => Kind::Suspending(v1::Suspending {}),
        Event::Resumed => Kind::Resumed(v1::Resumed {}),
        Event::Frozen { file_systems, holder, deadline } => Kind::Frozen(v1::Frozen {
            file_systems: u32::try_from(*file_systems).unwrap_or(u32::MAX),
            holder: holder.clone(),
            deadline_seconds: u32::try_from(deadline.as_secs()).unwrap_or(u32::MAX),
        }),
        Event::Thawed { holder, end, problem, receipt, level } => Kind::Thawed(v1::Thawed {
            by_itself: *end == End::Deadline,
            holder: holder.clone(),
            end: end.word().to_owned(),
            problem: problem.clone(),
            receipt: receipt.clone(),
            level: (*level).to_owned(),
        }),
        Event::DiskAdded(disk) => Kind::DiskAdded(v1::DiskAdded { disk: Some(self::disk(disk)) }),
        Event::DiskRemoved { disk, in_use } => {
            Kind::DiskRemoved(v1::DiskRemoved { disk: Some(self::disk(disk)), in_use: in_use.clone() })
        }
        Event::DiskResized { disk, before } => {
            Kind::DiskResized(v1::DiskResized { disk: Some(self::disk(disk)), bytes_before: *before })
        }
        Event::DiskChanged(disk) => Kind::DiskChanged(v1::DiskChanged { disk: Some(self::disk(disk)) }),
        Event::DiskMounted { disk, mount_point, kind } => Kind::DiskMounted(v1::DiskMounted {
            disk: Some(self::disk(disk)),
            mount_point: mount_point.clone(),
            r#type: kind.clone(),
        }),
        Event::DiskFailed { disk, problem } => {
            Kind::DiskFailed(v1::DiskFailed { disk: Some(self::disk(disk)), problem: problem.clone() })
        }
        Event::TopologyChanged(known) => {
            Kind::TopologyChanged(v1::TopologyChanged { topology: Some(topology(&known.topology)) })
        }
        Event::TopologyRefused { problem } => {
            Kind::TopologyRefused(v1::TopologyRefused { problem: problem.clone() })
        }
        Event::NodeChanged(node) => {
            Kind::NodeChanged(v1::NodeChanged { node: node.as_deref().map(self::node) })
        }
        Event::HealthChanged(health) => {
            Kind::HealthChanged(v1::HealthChanged { health: Some(self::health(health)) })
        }
    };
    message(recorded.sequence, recorded.time, kind)
}

/// The whole state as a message.
pub fn state(state: &State) -> v1::GuestState {
    v1::GuestState {
        interfaces: state.links.iter().map(link).collect(),
        file_systems: state.file_systems.iter().map(file_system).collect(),
        users: state.users.iter().map(user_session).collect(),
        disks: state.disks.iter().take(MOST_DISKS).map(|disk| self::disk(disk)).collect(),
        topology: state.topology.as_ref().map(|known| topology(&known.topology)),
        node: state.node.as_deref().map(node),
        health: state.health.as_deref().map(health),
        freeze: state.freeze.as_deref().map(last_freeze),
    }
}

fn last_freeze(freeze: &LastFreeze) -> v1::LastFreeze {
    let ended = freeze.ended.as_ref();
    v1::LastFreeze {
        holder: freeze.holder.clone(),
        file_systems: u32::try_from(freeze.file_systems).unwrap_or(u32::MAX),
        since: freeze.since.map(Into::into),
        ended: ended.map(|ended| ended.at.into()),
        end: ended.map_or("", |ended| ended.end.word()).to_owned(),
        problem: ended.map(|ended| ended.problem.clone()).unwrap_or_default(),
        receipt: ended.map(|ended| ended.receipt.clone()).unwrap_or_default(),
        level: ended.map_or("", |ended| ended.level).to_owned(),
    }
}

/// What a host half tells of where the guest runs.
pub fn told(topology: v1::Topology) -> Topology {
    let v1::Topology { region, zone, host, labels } = topology;
    Topology { region, zone, host, labels: labels.into_iter().collect() }
}

/// Where the guest runs, as a message.
pub fn topology(topology: &Topology) -> v1::Topology {
    v1::Topology {
        region: topology.region.clone(),
        zone: topology.zone.clone(),
        host: topology.host.clone(),
        labels: topology.labels.clone().into_iter().collect(),
    }
}

/// The Node that the guest is, as a message.
pub fn node(node: &Node) -> v1::Node {
    v1::Node {
        name: node.name.clone(),
        state: node.state.to_owned(),
        reason: node.reason.clone(),
        ready: node.ready.clone(),
        ready_reason: node.ready_reason.clone(),
        labels: node.labels.clone().into_iter().collect(),
        taints: node.taints.clone(),
        addresses: node.addresses.clone(),
        provider_id: node.provider_id.clone(),
        kubelet_version: node.kubelet_version.clone(),
    }
}

fn health(health: &Health) -> v1::Health {
    v1::Health {
        cloud_init: health.cloud_init.to_owned(),
        cloud_init_errors: health.cloud_init_errors.clone(),
        failed_units: health.failed_units.clone(),
    }
}

/// A place in the sequence of events as a message.
pub fn position(position: Position) -> v1::Position {
    v1::Position { run_id: position.run_id, sequence: position.sequence }
}

fn link(link: &Link) -> v1::NetworkInterface {
    let address = |(ip, prefix): &(IpAddr, u32)| format!("{ip}/{prefix}");
    v1::NetworkInterface {
        name: link.name.clone(),
        hardware_address: link.hardware_address.map(hardware_address).unwrap_or_default(),
        running: link.running,
        addresses: link.addresses.iter().map(address).collect(),
    }
}

fn file_system(file_system: &FileSystem) -> v1::MountedFileSystem {
    v1::MountedFileSystem {
        mount_point: file_system.mount_point.clone(),
        source: file_system.source.clone(),
        r#type: file_system.kind.clone(),
    }
}

fn user_session(session: &UserSession) -> v1::UserSession {
    v1::UserSession {
        id: session.id.clone(),
        user: session.user.clone(),
        terminal: session.terminal.clone(),
        remote_host: session.remote_host.clone(),
    }
}

/// A disk as a message.
pub fn disk(disk: &KnownDisk) -> v1::Disk {
    let pci =
        |Pci { domain, bus, slot, function }: Pci| format!("{domain:04x}:{bus:02x}:{slot:02x}.{function:x}");
    let serial =
        |serial: &Serial| v1::SerialNumber { value: serial.text(), source: serial.source.word().to_owned() };
    let partition = |partition: &Partition| v1::Partition {
        name: partition.name.clone(),
        number: partition.index,
        start_bytes: partition.start,
        bytes: partition.bytes,
    };
    let holder = |holder: &Holder| v1::DiskHolder {
        name: holder.name.clone(),
        alias: holder.alias.clone().unwrap_or_default(),
        of: holder.of.clone(),
    };
    v1::Disk {
        name: disk.name.clone(),
        file: disk.file.clone(),
        generation: disk.generation,
        bus: disk.bus.word().to_owned(),
        pci_address: disk.pci.map(pci).unwrap_or_default(),
        scsi_address: disk.scsi.map(|address| address.to_string()).unwrap_or_default(),
        serials: disk.serials.iter().map(serial).collect(),
        alias: disk.alias.clone().unwrap_or_default(),
        world_wide_name: disk.wwn.clone().unwrap_or_default(),
        bytes: disk.bytes,
        sector_bytes: disk.sector,
        read_only: disk.read_only,
        rotational: disk.rotational,
        partitions: disk.partitions.iter().take(MOST_PARTS).map(partition).collect(),
        holders: disk.holders.iter().take(MOST_PARTS).map(holder).collect(),
        silent: disk.silent,
    }
}
