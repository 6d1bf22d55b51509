//! Output for programs. Keys are part of the interface: add, never change.

use std::collections::BTreeMap;

use prost_types::Timestamp;
use serde::Serialize;

use super::io_errors::IoError;
use super::recent::Recent;
use super::{freezes, kinds, places, words};
use crate::wire::proto::v1::{self, event, virtual_machine_event::Kind};

/// VM and its session.
#[derive(Debug, Serialize)]
pub struct Vm {
    name: String,
    uuid: String,
    cluster: String,
    labels: BTreeMap<String, String>,
    power: &'static str,
    power_problem: String,
    session: &'static str,
    reason: String,
    dial: String,
    guest_key: String,
    since: Option<String>,
    last_heard: Option<String>,
    sessions: u64,
    guest: Option<Guest>,
    callback: &'static str,
    callback_reason: String,
    missed_events: u64,
    topology: Option<places::Standing>,
    state: Option<State>,
    /// Parts that are left out of the state.
    state_cut: Option<StateCut>,
    io_errors: Vec<IoError>,
    /// Load in the last 15 minutes, if metrics were requested in that time.
    recent: Vec<Recent>,
}

/// Number of entries of a state that are left out, and the other parts that are.
#[derive(Debug, Serialize)]
struct StateCut {
    interfaces: u32,
    file_systems: u32,
    users: u32,
    disks: u32,
    topology: bool,
    node: bool,
    health: bool,
}

/// State of a guest that results from its events.
#[derive(Debug, Serialize)]
struct State {
    interfaces: Vec<Interface>,
    file_systems: Vec<FileSystem>,
    users: Vec<User>,
    disks: Vec<Disk>,
    topology: Option<places::Place>,
    node: Option<places::Node>,
    health: Option<places::Health>,
    freeze: Option<freezes::Freeze>,
}

/// Disk of a guest.
#[derive(Debug, Serialize)]
pub struct Disk {
    name: String,
    file: String,
    generation: u64,
    bus: String,
    pci_address: String,
    scsi_address: String,
    serials: Vec<Serial>,
    alias: String,
    world_wide_name: String,
    bytes: u64,
    sector_bytes: u32,
    read_only: bool,
    rotational: bool,
    silent: bool,
    partitions: Vec<Partition>,
    holders: Vec<Holder>,
}

#[derive(Debug, Serialize)]
struct Serial {
    value: String,
    source: String,
}

#[derive(Debug, Serialize)]
struct Partition {
    name: String,
    number: u32,
    start_bytes: u64,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct Holder {
    name: String,
    alias: String,
    of: String,
}

#[derive(Debug, Serialize)]
struct Interface {
    name: String,
    hardware_address: String,
    running: bool,
    addresses: Vec<String>,
}

#[derive(Debug, Serialize)]
struct FileSystem {
    mount_point: String,
    source: String,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Serialize)]
struct User {
    id: String,
    #[serde(rename = "user")]
    name: String,
    terminal: String,
    remote_host: String,
}

/// Facts about a guest, as its agent reports them.
#[derive(Debug, Serialize)]
pub struct Guest {
    machine_id: String,
    boot_id: String,
    dmi_uuid: String,
    host_name: String,
    os: Os,
    kernel_release: String,
    machine: String,
    agent_version: String,
    capabilities: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Os {
    id: String,
    name: String,
    pretty_name: String,
    version_id: String,
}

/// Event of a VM.
#[derive(Debug, Serialize)]
pub struct Event {
    time: Option<String>,
    name: String,
    #[serde(rename = "event")]
    what: &'static str,
    #[serde(flatten)]
    details: Details,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Details {
    None {},
    Power { power: &'static str },
    Suspended { to: &'static str },
    Opened { after_milliseconds: u64, rebooted: bool, guest: Option<Box<Guest>> },
    Closed { reason: String },
    Guest(FromGuest),
    Volume(ChangedVolume),
    LoadBalancer(ChangedLoadBalancer),
    Io(IoError),
}

#[derive(Debug, Serialize)]
struct ChangedVolume {
    volume: String,
    volume_name: String,
    cluster: String,
    class: String,
    size: u64,
    claim: String,
    by: String,
}

#[derive(Debug, Serialize)]
struct ChangedLoadBalancer {
    cluster: String,
    namespace: String,
    service: String,
    state: String,
    addresses: Vec<String>,
    reason: String,
    message: String,
}

#[derive(Debug, Serialize)]
struct FromGuest {
    sequence: u64,
    guest_time: Option<String>,
    #[serde(flatten)]
    about: Option<event::Kind>,
}

pub(super) fn rfc3339(time: Timestamp) -> String {
    time.to_string()
}

impl From<v1::VirtualMachine> for Vm {
    fn from(vm: v1::VirtualMachine) -> Self {
        Self {
            power: words::power(vm.power()),
            session: words::session(vm.session()),
            callback: words::callback(vm.callback()),
            power_problem: vm.power_problem,
            name: vm.name,
            uuid: vm.uuid,
            cluster: vm.cluster,
            labels: vm.labels,
            reason: vm.reason,
            dial: vm.dial,
            guest_key: vm.guest_key,
            since: vm.since.map(rfc3339),
            last_heard: vm.last_heard.map(rfc3339),
            sessions: vm.sessions,
            guest: vm.guest.map(Guest::from),
            callback_reason: vm.callback_reason,
            missed_events: vm.missed_events,
            topology: vm.topology.map(places::Standing::from),
            state: vm.state.map(|state| State::from(*state)),
            state_cut: vm.state_cut.map(StateCut::from),
            io_errors: vm.io_errors.into_iter().map(IoError::from).collect(),
            recent: vm.recent.unwrap_or_default().points.into_iter().map(Recent::from).collect(),
        }
    }
}

impl From<v1::StateCut> for StateCut {
    fn from(cut: v1::StateCut) -> Self {
        let v1::StateCut { interfaces, file_systems, users, disks, topology, node, health } = cut;
        Self { interfaces, file_systems, users, disks, topology, node, health }
    }
}

impl From<v1::GuestState> for State {
    fn from(state: v1::GuestState) -> Self {
        Self {
            interfaces: state.interfaces.into_iter().map(Interface::from).collect(),
            file_systems: state.file_systems.into_iter().map(FileSystem::from).collect(),
            users: state.users.into_iter().map(User::from).collect(),
            disks: state.disks.into_iter().map(Disk::from).collect(),
            topology: state.topology.map(places::Place::from),
            node: state.node.map(places::Node::from),
            health: state.health.map(places::Health::from),
            freeze: state.freeze.map(freezes::Freeze::from),
        }
    }
}

impl From<v1::NetworkInterface> for Interface {
    fn from(interface: v1::NetworkInterface) -> Self {
        Self {
            name: interface.name,
            hardware_address: interface.hardware_address,
            running: interface.running,
            addresses: interface.addresses,
        }
    }
}

impl From<v1::MountedFileSystem> for FileSystem {
    fn from(mounted: v1::MountedFileSystem) -> Self {
        Self { mount_point: mounted.mount_point, source: mounted.source, kind: mounted.r#type }
    }
}

impl From<v1::UserSession> for User {
    fn from(session: v1::UserSession) -> Self {
        Self {
            id: session.id,
            name: session.user,
            terminal: session.terminal,
            remote_host: session.remote_host,
        }
    }
}

impl From<v1::Disk> for Disk {
    fn from(disk: v1::Disk) -> Self {
        let serial = |serial: v1::SerialNumber| Serial { value: serial.value, source: serial.source };
        let partition = |partition: v1::Partition| Partition {
            name: partition.name,
            number: partition.number,
            start_bytes: partition.start_bytes,
            bytes: partition.bytes,
        };
        let holder =
            |holder: v1::DiskHolder| Holder { name: holder.name, alias: holder.alias, of: holder.of };
        Self {
            name: disk.name,
            file: disk.file,
            generation: disk.generation,
            bus: disk.bus,
            pci_address: disk.pci_address,
            scsi_address: disk.scsi_address,
            serials: disk.serials.into_iter().map(serial).collect(),
            alias: disk.alias,
            world_wide_name: disk.world_wide_name,
            bytes: disk.bytes,
            sector_bytes: disk.sector_bytes,
            read_only: disk.read_only,
            rotational: disk.rotational,
            silent: disk.silent,
            partitions: disk.partitions.into_iter().map(partition).collect(),
            holders: disk.holders.into_iter().map(holder).collect(),
        }
    }
}

impl From<v1::GuestInfo> for Guest {
    fn from(info: v1::GuestInfo) -> Self {
        let os = info.operating_system.unwrap_or_default();
        Self {
            machine_id: info.machine_id,
            boot_id: info.boot_id,
            dmi_uuid: info.dmi_uuid,
            host_name: info.host_name,
            os: Os { id: os.id, name: os.name, pretty_name: os.pretty_name, version_id: os.version_id },
            kernel_release: info.kernel_release,
            machine: info.machine,
            agent_version: info.agent_version,
            capabilities: info.capabilities,
        }
    }
}

impl From<v1::VirtualMachineEvent> for Event {
    fn from(happened: v1::VirtualMachineEvent) -> Self {
        let what = kinds::name(&happened);
        let details = match happened.kind {
            Some(Kind::PowerChanged(change)) => Details::Power { power: words::power(change.power()) },
            Some(Kind::GuestSuspended(suspended)) => {
                Details::Suspended { to: words::suspended_to(suspended) }
            }
            Some(Kind::SessionOpened(opened)) => Details::Opened {
                after_milliseconds: opened.after_milliseconds,
                rebooted: opened.rebooted,
                guest: opened.guest.map(|info| Box::new(info.into())),
            },
            Some(Kind::SessionClosed(closed)) => Details::Closed { reason: closed.reason },
            Some(Kind::GuestEvent(event)) => Details::Guest(FromGuest {
                sequence: event.sequence,
                guest_time: event.time.map(rfc3339),
                about: event.kind,
            }),
            Some(Kind::VolumeChanged(changed)) => Details::Volume(ChangedVolume {
                volume: changed.volume_id,
                volume_name: changed.name,
                cluster: changed.cluster,
                class: changed.class,
                size: changed.bytes,
                claim: changed.claim,
                by: changed.by,
            }),
            Some(Kind::LoadBalancerChanged(changed)) => Details::LoadBalancer(ChangedLoadBalancer {
                cluster: changed.cluster,
                namespace: changed.namespace,
                service: changed.service,
                state: changed.state,
                addresses: changed.addresses,
                reason: changed.reason,
                message: changed.message,
            }),
            Some(Kind::IoError(error)) => Details::Io(error.into()),
            Some(Kind::GuestReset(_)) | None => Details::None {},
        };
        Self { time: happened.time.map(rfc3339), name: happened.name, what, details }
    }
}

/// Result of one ping.
#[derive(Debug, Serialize)]
pub struct Pong {
    number: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    milliseconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

impl From<&v1::Pong> for Pong {
    fn from(pong: &v1::Pong) -> Self {
        let (milliseconds, failure) = match &pong.outcome {
            Some(v1::pong::Outcome::Nanoseconds(nanoseconds)) => {
                (Some(words::milliseconds(*nanoseconds)), None)
            }
            Some(v1::pong::Outcome::Failure(failure)) => (None, Some(failure.clone())),
            None => (None, None),
        };
        Self { number: pong.number, milliseconds, failure }
    }
}
