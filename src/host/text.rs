//! Words of a guest, made fit for tables and logs: bounded, and without anything that steers a terminal.

use std::collections::HashMap;

use prost_types::Timestamp;

use crate::sys::error_chain;
use crate::wire::proto::v1::{self, event::Kind};

/// Longest text that is taken from a guest, in characters.
pub const MAX_TEXT: usize = 256;
/// Longest explanation that is kept, in characters.
const MAX_WORDS: usize = 4096;
/// Most capabilities that are taken from a guest.
const MAX_CAPABILITIES: usize = 64;
/// Most serial numbers, and most partitions and holders, that are taken of one disk.
const MAX_SERIALS: usize = 8;
const MAX_PARTS: usize = 64;
/// Most uses of a disk that is gone.
const MAX_USES: usize = 64;
/// Most labels of a Node or a topology.
const MAX_LABELS: usize = 256;
/// Most taints, addresses and units.
const MAX_LISTED: usize = 64;
/// The year 10000 in seconds since 1970: later times cannot be written as RFC 3339 has it.
const YEAR_10000: i64 = 253_402_300_800;

/// Replaces what is not visible and cuts what is too long.
pub fn clean(text: &str) -> String {
    clean_to(text, MAX_TEXT)
}

/// The same of an explanation, which may be longer: it may name all that is in the way of something.
pub fn clean_words(text: &str) -> String {
    clean_to(text, MAX_WORDS)
}

fn clean_to(text: &str, most: usize) -> String {
    let mut cleaned: String =
        text.chars().take(most).map(|one| if is_hidden(one) { '\u{fffd}' } else { one }).collect();
    if text.chars().nth(most).is_some() {
        cleaned.push('…');
    }
    // It may be kept for long.
    cleaned.shrink_to_fit();
    cleaned
}

/// Control characters, and those that reorder or hide the text around them.
fn is_hidden(one: char) -> bool {
    one.is_control()
        || matches!(one, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// What a guest says of itself, cleaned.
pub fn clean_info(info: v1::GuestInfo) -> v1::GuestInfo {
    v1::GuestInfo {
        machine_id: clean(&info.machine_id),
        boot_id: clean(&info.boot_id),
        dmi_uuid: clean(&info.dmi_uuid).to_lowercase(),
        host_name: clean(&info.host_name),
        operating_system: info.operating_system.map(|system| v1::OperatingSystem {
            id: clean(&system.id),
            name: clean(&system.name),
            pretty_name: clean(&system.pretty_name),
            version_id: clean(&system.version_id),
        }),
        kernel_release: clean(&info.kernel_release),
        machine: clean(&info.machine),
        agent_version: clean(&info.agent_version),
        capabilities: info.capabilities.iter().take(MAX_CAPABILITIES).map(|name| clean(name)).collect(),
        heartbeat_interval_seconds: info.heartbeat_interval_seconds,
    }
}

/// An event of a guest, cleaned.
pub fn clean_event(event: v1::Event) -> v1::Event {
    v1::Event { time: event.time.filter(can_be_written), kind: event.kind.map(clean_kind), ..event }
}

fn can_be_written(time: &Timestamp) -> bool {
    (0..YEAR_10000).contains(&time.seconds) && (0..1_000_000_000).contains(&time.nanos)
}

fn clean_kind(kind: Kind) -> Kind {
    match kind {
        Kind::AgentReady(ready) => Kind::AgentReady(v1::AgentReady {
            run_id: clean(&ready.run_id),
            state: ready.state.as_deref().map(clean_state).map(Box::new),
            ..ready
        }),
        Kind::ShutdownRequested(request) => {
            Kind::ShutdownRequested(v1::ShutdownRequested { mode: clean(&request.mode) })
        }
        Kind::InterfacesChanged(change) => Kind::InterfacesChanged(v1::InterfacesChanged {
            interfaces: change.interfaces.iter().map(clean_interface).collect(),
        }),
        Kind::FileSystemMounted(mounted) => Kind::FileSystemMounted(v1::FileSystemMounted {
            file_system: mounted.file_system.as_ref().map(clean_file_system),
        }),
        Kind::FileSystemUnmounted(unmounted) => Kind::FileSystemUnmounted(v1::FileSystemUnmounted {
            file_system: unmounted.file_system.as_ref().map(clean_file_system),
        }),
        Kind::UserLoggedIn(login) => {
            Kind::UserLoggedIn(v1::UserLoggedIn { session: login.session.as_ref().map(clean_session) })
        }
        Kind::UserLoggedOut(logout) => {
            Kind::UserLoggedOut(v1::UserLoggedOut { session: logout.session.as_ref().map(clean_session) })
        }
        Kind::Thawed(thawed) => Kind::Thawed(v1::Thawed {
            holder: clean(&thawed.holder),
            end: clean(&thawed.end),
            problem: clean(&thawed.problem),
            ..thawed
        }),
        Kind::Frozen(frozen) => Kind::Frozen(v1::Frozen { holder: clean(&frozen.holder), ..frozen }),
        Kind::DiskAdded(added) => {
            Kind::DiskAdded(v1::DiskAdded { disk: added.disk.as_ref().map(clean_disk) })
        }
        Kind::DiskRemoved(removed) => Kind::DiskRemoved(v1::DiskRemoved {
            disk: removed.disk.as_ref().map(clean_disk),
            in_use: removed.in_use.iter().take(MAX_USES).map(|text| clean(text)).collect(),
        }),
        Kind::DiskResized(resized) => Kind::DiskResized(v1::DiskResized {
            disk: resized.disk.as_ref().map(clean_disk),
            bytes_before: resized.bytes_before,
        }),
        Kind::DiskChanged(changed) => {
            Kind::DiskChanged(v1::DiskChanged { disk: changed.disk.as_ref().map(clean_disk) })
        }
        Kind::DiskMounted(mounted) => Kind::DiskMounted(v1::DiskMounted {
            disk: mounted.disk.as_ref().map(clean_disk),
            mount_point: clean(&mounted.mount_point),
            r#type: clean(&mounted.r#type),
        }),
        Kind::DiskFailed(failed) => Kind::DiskFailed(v1::DiskFailed {
            disk: failed.disk.as_ref().map(clean_disk),
            problem: clean(&failed.problem),
        }),
        Kind::TopologyChanged(changed) => Kind::TopologyChanged(v1::TopologyChanged {
            topology: changed.topology.as_ref().map(clean_topology),
        }),
        Kind::TopologyRefused(refused) => {
            Kind::TopologyRefused(v1::TopologyRefused { problem: clean(&refused.problem) })
        }
        Kind::NodeChanged(changed) => {
            Kind::NodeChanged(v1::NodeChanged { node: changed.node.as_ref().map(clean_node) })
        }
        Kind::HealthChanged(changed) => {
            Kind::HealthChanged(v1::HealthChanged { health: changed.health.as_ref().map(clean_health) })
        }
        kind @ (Kind::Heartbeat(_)
        | Kind::AgentStopping(_)
        | Kind::AgentStarted(_)
        | Kind::ShutdownBegun(_)
        | Kind::ClockJumped(_)
        | Kind::Suspending(_)
        | Kind::Resumed(_)) => kind,
    }
}

fn clean_state(state: &v1::GuestState) -> v1::GuestState {
    v1::GuestState {
        interfaces: state.interfaces.iter().map(clean_interface).collect(),
        file_systems: state.file_systems.iter().map(clean_file_system).collect(),
        users: state.users.iter().map(clean_session).collect(),
        disks: state.disks.iter().map(clean_disk).collect(),
        topology: state.topology.as_ref().map(clean_topology),
        node: state.node.as_ref().map(clean_node),
        health: state.health.as_ref().map(clean_health),
        freeze: state.freeze.as_ref().map(clean_freeze),
    }
}

fn clean_freeze(freeze: &v1::LastFreeze) -> v1::LastFreeze {
    v1::LastFreeze {
        holder: clean(&freeze.holder),
        file_systems: freeze.file_systems,
        since: freeze.since.filter(can_be_written),
        // A time that cannot be written is an end all the same.
        ended: freeze.ended.map(|ended| if can_be_written(&ended) { ended } else { Timestamp::default() }),
        end: clean(&freeze.end),
        problem: clean(&freeze.problem),
    }
}

fn clean_labels(labels: &HashMap<String, String>) -> HashMap<String, String> {
    labels.iter().take(MAX_LABELS).map(|(key, value)| (clean(key), clean(value))).collect()
}

fn clean_topology(topology: &v1::Topology) -> v1::Topology {
    v1::Topology {
        region: clean(&topology.region),
        zone: clean(&topology.zone),
        host: clean(&topology.host),
        labels: clean_labels(&topology.labels),
    }
}

fn clean_node(node: &v1::Node) -> v1::Node {
    let list = |list: &[String]| list.iter().take(MAX_LISTED).map(|text| clean(text)).collect();
    v1::Node {
        name: clean(&node.name),
        state: clean(&node.state),
        reason: clean(&node.reason),
        ready: clean(&node.ready),
        ready_reason: clean(&node.ready_reason),
        labels: clean_labels(&node.labels),
        taints: list(&node.taints),
        addresses: list(&node.addresses),
        provider_id: clean(&node.provider_id),
        kubelet_version: clean(&node.kubelet_version),
    }
}

fn clean_health(health: &v1::Health) -> v1::Health {
    let list = |list: &[String]| list.iter().take(MAX_LISTED).map(|text| clean(text)).collect();
    v1::Health {
        cloud_init: clean(&health.cloud_init),
        cloud_init_errors: list(&health.cloud_init_errors),
        failed_units: list(&health.failed_units),
    }
}

fn clean_disk(disk: &v1::Disk) -> v1::Disk {
    let serial = |serial: &v1::SerialNumber| v1::SerialNumber {
        value: clean(&serial.value),
        source: clean(&serial.source),
    };
    let partition =
        |partition: &v1::Partition| v1::Partition { name: clean(&partition.name), ..partition.clone() };
    let holder = |holder: &v1::DiskHolder| v1::DiskHolder {
        name: clean(&holder.name),
        alias: clean(&holder.alias),
        of: clean(&holder.of),
    };
    v1::Disk {
        name: clean(&disk.name),
        file: clean(&disk.file),
        generation: disk.generation,
        bus: clean(&disk.bus),
        pci_address: clean(&disk.pci_address),
        scsi_address: clean(&disk.scsi_address),
        serials: disk.serials.iter().take(MAX_SERIALS).map(serial).collect(),
        alias: clean(&disk.alias),
        world_wide_name: clean(&disk.world_wide_name),
        bytes: disk.bytes,
        sector_bytes: disk.sector_bytes,
        read_only: disk.read_only,
        rotational: disk.rotational,
        partitions: disk.partitions.iter().take(MAX_PARTS).map(partition).collect(),
        holders: disk.holders.iter().take(MAX_PARTS).map(holder).collect(),
        silent: disk.silent,
    }
}

fn clean_interface(interface: &v1::NetworkInterface) -> v1::NetworkInterface {
    v1::NetworkInterface {
        name: clean(&interface.name),
        hardware_address: clean(&interface.hardware_address),
        running: interface.running,
        addresses: interface.addresses.iter().map(|address| clean(address)).collect(),
    }
}

fn clean_file_system(file_system: &v1::MountedFileSystem) -> v1::MountedFileSystem {
    v1::MountedFileSystem {
        mount_point: clean(&file_system.mount_point),
        source: clean(&file_system.source),
        r#type: clean(&file_system.r#type),
    }
}

fn clean_session(session: &v1::UserSession) -> v1::UserSession {
    v1::UserSession {
        id: clean(&session.id),
        user: clean(&session.user),
        terminal: clean(&session.terminal),
        remote_host: clean(&session.remote_host),
    }
}

/// An error and what it came from, in one line, cleaned.
pub fn chain(error: &dyn std::error::Error) -> String {
    clean(&error_chain::words(error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn texts() {
        assert_eq!(clean("Debian GNU/Linux 12 – ünïcödé 漢字"), "Debian GNU/Linux 12 – ünïcödé 漢字");
        assert_eq!(
            clean("a\u{1b}[2Jb\n\t\r\0\u{9b}"),
            "a\u{fffd}[2Jb\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}"
        );
        assert_eq!(clean("x\u{202e}y"), "x\u{fffd}y");
        assert_eq!(clean(&"ü".repeat(256)), "ü".repeat(256));
        assert_eq!(clean(&"ü".repeat(257)), "ü".repeat(256) + "…");
    }

    #[test]
    fn times_that_cannot_be_written_are_dropped() {
        let event =
            |seconds| v1::Event { time: Some(Timestamp { seconds, nanos: 5 }), ..v1::Event::default() };
        assert!(clean_event(event(1_700_000_000)).time.is_some());
        assert!(clean_event(event(i64::MAX)).time.is_none());
        assert!(clean_event(event(-1)).time.is_none());
    }

    proptest! {
        #[test]
        fn nothing_hidden_is_left(text: String) {
            let cleaned = clean(&text);
            prop_assert!(cleaned.chars().count() <= MAX_TEXT + 1);
            prop_assert!(!cleaned.chars().any(is_hidden));
        }
    }
}
