//! How many bytes of memory the words of a guest take, and what is left out of an event that takes too many. Pure.
//!
//! The length of a message on the wire says little of that: an empty part of two bytes may take a hundred in memory. To add
//! a message: its line in `heap!`, with all its fields that are texts, lists or messages.

use std::collections::HashMap;

use crate::wire::proto::v1::{self, event, virtual_machine_event::Kind};

/// What the allocator takes for itself, for each piece of memory.
const PIECE: usize = 16;
/// The most that one event may take where it waits for those who watch.
pub const LARGEST_EVENT: usize = 32 * 1024;
/// Uses of a removed disk, and lines of a list, that stay in an event that is too large.
const FEW: usize = 8;

/// Memory beside a value's own.
pub trait Heap {
    /// In bytes.
    fn heap(&self) -> usize;
}

impl Heap for String {
    fn heap(&self) -> usize {
        self.capacity() + PIECE
    }
}

impl<T: Heap> Heap for Box<T> {
    fn heap(&self) -> usize {
        size_of::<T>() + PIECE + T::heap(self)
    }
}

impl<T: Heap> Heap for Vec<T> {
    fn heap(&self) -> usize {
        self.capacity() * size_of::<T>() + PIECE + self.iter().map(Heap::heap).sum::<usize>()
    }
}

impl<T: Heap> Heap for Option<T> {
    fn heap(&self) -> usize {
        self.as_ref().map_or(0, Heap::heap)
    }
}

impl Heap for HashMap<String, String> {
    fn heap(&self) -> usize {
        // A table has room for a seventh more, and a byte for each place; it doubles.
        let places = self.capacity() * 8 / 7 + PIECE;
        let words: usize = self.iter().map(|(key, value)| key.heap() + value.heap()).sum();
        places * (2 * size_of::<String>() + 1) + words
    }
}

macro_rules! heap {
    ($($message:ident: $($field:ident)*;)*) => {
        $(impl Heap for v1::$message {
            fn heap(&self) -> usize {
                0 $(+ self.$field.heap())*
            }
        })*
    };
}

heap! {
    Disk: name file bus pci_address scsi_address serials alias world_wide_name partitions holders;
    SerialNumber: value source;
    Partition: name;
    DiskHolder: name alias of;
    NetworkInterface: name hardware_address addresses;
    MountedFileSystem: mount_point source r#type;
    UserSession: id user terminal remote_host;
    Topology: region zone host labels;
    Node: name state reason ready ready_reason labels taints addresses provider_id kubelet_version;
    Health: cloud_init cloud_init_errors failed_units;
    LastFreeze: holder end problem receipt level;
    OperatingSystem: id name pretty_name version_id;
    GuestInfo: machine_id boot_id dmi_uuid host_name operating_system kernel_release machine agent_version capabilities;
    IoError: disk file reason;
    VolumeChanged: volume_id name cluster class claim by;
    LoadBalancerChanged: cluster namespace service state addresses reason message;
    GuestState: interfaces file_systems users disks topology node health freeze;
}

/// What one entry of a list takes, which may have room for twice as many.
pub fn entry<T: Heap>(entry: &T) -> usize {
    2 * size_of::<T>() + entry.heap()
}

impl Heap for v1::VirtualMachineEvent {
    fn heap(&self) -> usize {
        let kind = match &self.kind {
            Some(Kind::GuestEvent(event)) => event.kind.as_ref().map_or(0, guest_event),
            Some(Kind::SessionOpened(opened)) => opened.guest.heap(),
            Some(Kind::SessionClosed(closed)) => closed.reason.heap(),
            Some(Kind::VolumeChanged(changed)) => changed.heap(),
            Some(Kind::IoError(error)) => error.heap(),
            Some(Kind::LoadBalancerChanged(changed)) => changed.heap(),
            Some(Kind::PowerChanged(_) | Kind::GuestReset(_) | Kind::GuestSuspended(_)) | None => 0,
        };
        self.name.heap() + kind
    }
}

/// What an event of a guest takes.
pub fn guest_event(kind: &event::Kind) -> usize {
    use event::Kind;
    match kind {
        Kind::AgentReady(ready) => ready.run_id.heap() + ready.state.heap(),
        Kind::ShutdownRequested(request) => request.mode.heap(),
        Kind::InterfacesChanged(change) => change.interfaces.heap(),
        Kind::FileSystemMounted(mounted) => mounted.file_system.heap(),
        Kind::FileSystemUnmounted(unmounted) => unmounted.file_system.heap(),
        Kind::UserLoggedIn(login) => login.session.heap(),
        Kind::UserLoggedOut(logout) => logout.session.heap(),
        Kind::Frozen(frozen) => frozen.holder.heap(),
        Kind::Thawed(thawed) => {
            let words = thawed.holder.heap() + thawed.end.heap() + thawed.problem.heap();
            words + thawed.receipt.heap() + thawed.level.heap()
        }
        Kind::DiskAdded(added) => added.disk.heap(),
        Kind::DiskRemoved(removed) => removed.disk.heap() + removed.in_use.heap(),
        Kind::DiskResized(resized) => resized.disk.heap(),
        Kind::DiskChanged(changed) => changed.disk.heap(),
        Kind::DiskMounted(mounted) => {
            mounted.disk.heap() + mounted.mount_point.heap() + mounted.r#type.heap()
        }
        Kind::DiskFailed(failed) => failed.disk.heap() + failed.problem.heap(),
        Kind::TopologyChanged(changed) => changed.topology.heap(),
        Kind::TopologyRefused(refused) => refused.problem.heap(),
        Kind::NodeChanged(changed) => changed.node.heap(),
        Kind::HealthChanged(changed) => changed.health.heap(),
        Kind::Heartbeat(_)
        | Kind::AgentStarted(_)
        | Kind::AgentStopping(_)
        | Kind::ShutdownBegun(_)
        | Kind::ClockJumped(_)
        | Kind::Suspending(_)
        | Kind::Resumed(_) => 0,
    }
}

/// Leaves out of an event what makes it too large for those who watch; what it made of the state is known already.
pub fn slim(event: &mut v1::Event) {
    use event::Kind;
    let Some(kind) = event.kind.as_mut().filter(|kind| guest_event(kind) > LARGEST_EVENT) else { return };
    match kind {
        Kind::InterfacesChanged(change) => {
            let mut left = LARGEST_EVENT;
            change.interfaces.retain(|interface| {
                let fits = left.checked_sub(entry(interface));
                left = fits.unwrap_or(left);
                fits.is_some()
            });
            change.interfaces.shrink_to_fit();
        }
        Kind::DiskAdded(v1::DiskAdded { disk: Some(disk) })
        | Kind::DiskResized(v1::DiskResized { disk: Some(disk), .. })
        | Kind::DiskChanged(v1::DiskChanged { disk: Some(disk) })
        | Kind::DiskMounted(v1::DiskMounted { disk: Some(disk), .. })
        | Kind::DiskFailed(v1::DiskFailed { disk: Some(disk), .. }) => slim_disk(disk),
        Kind::DiskRemoved(removed) => {
            few(&mut removed.in_use);
            removed.disk.iter_mut().for_each(slim_disk);
        }
        Kind::TopologyChanged(v1::TopologyChanged { topology: Some(topology) }) => {
            topology.labels = HashMap::new();
        }
        Kind::NodeChanged(v1::NodeChanged { node: Some(node) }) => {
            node.labels = HashMap::new();
            few(&mut node.taints);
            few(&mut node.addresses);
        }
        Kind::HealthChanged(v1::HealthChanged { health: Some(health) }) => {
            few(&mut health.cloud_init_errors);
            few(&mut health.failed_units);
        }
        _ => {}
    }
}

fn slim_disk(disk: &mut v1::Disk) {
    disk.partitions = Vec::new();
    disk.holders = Vec::new();
    disk.serials.truncate(1);
}

fn few(list: &mut Vec<String>) {
    list.truncate(FEW);
    list.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::text::clean_event;

    fn large_disk() -> v1::Disk {
        let text = || "\u{10000}".repeat(300);
        let serial = v1::SerialNumber { value: text(), source: text() };
        let holder = v1::DiskHolder { name: text(), alias: text(), of: text() };
        let partition = v1::Partition { name: text(), ..v1::Partition::default() };
        v1::Disk {
            name: text(),
            file: text(),
            bus: text(),
            pci_address: text(),
            scsi_address: text(),
            alias: text(),
            world_wide_name: text(),
            serials: vec![serial; 100],
            holders: vec![holder; 100],
            partitions: vec![partition; 100],
            ..v1::Disk::default()
        }
    }

    #[test]
    fn no_event_that_waits_for_a_watcher_is_large() {
        use event::Kind;
        let text = || "\u{10000}".repeat(300);
        let labels: HashMap<_, _> = (0..1000).map(|number| (format!("{number}{}", text()), text())).collect();
        let interface =
            v1::NetworkInterface { addresses: vec![text(); 64], ..v1::NetworkInterface::default() };
        let topology = Some(v1::Topology { labels: labels.clone(), ..v1::Topology::default() });
        let lists = || vec![text(); 100];
        let node = Some(v1::Node { labels, taints: lists(), addresses: lists(), ..v1::Node::default() });
        let (cloud_init_errors, failed_units) = (lists(), lists());
        let health = Some(v1::Health { cloud_init_errors, failed_units, cloud_init: text() });
        let disk = Some(large_disk());
        for kind in [
            Kind::InterfacesChanged(v1::InterfacesChanged { interfaces: vec![interface; 256] }),
            Kind::DiskAdded(v1::DiskAdded { disk: disk.clone() }),
            Kind::DiskRemoved(v1::DiskRemoved { disk: disk.clone(), in_use: lists() }),
            Kind::DiskResized(v1::DiskResized { disk: disk.clone(), bytes_before: 1 }),
            Kind::DiskChanged(v1::DiskChanged { disk: disk.clone() }),
            Kind::DiskMounted(v1::DiskMounted { disk: disk.clone(), mount_point: text(), r#type: text() }),
            Kind::DiskFailed(v1::DiskFailed { disk, problem: text() }),
            Kind::TopologyChanged(v1::TopologyChanged { topology }),
            Kind::NodeChanged(v1::NodeChanged { node }),
            Kind::HealthChanged(v1::HealthChanged { health }),
        ] {
            let mut event = v1::Event { kind: Some(kind), ..v1::Event::default() };
            clean_event(&mut event);
            assert!(guest_event(event.kind.as_ref().unwrap()) > LARGEST_EVENT, "the test: {event:?}");
            slim(&mut event);
            let left = guest_event(event.kind.as_ref().unwrap());
            assert!(left <= LARGEST_EVENT, "{left} bytes");
        }
        let mut small = v1::Event {
            kind: Some(Kind::DiskAdded(v1::DiskAdded {
                disk: Some(v1::Disk { partitions: vec![v1::Partition::default(); 4], ..v1::Disk::default() }),
            })),
            ..v1::Event::default()
        };
        let before = small.clone();
        slim(&mut small);
        assert_eq!(small, before, "nothing is left out without need");
    }

    #[test]
    fn parts_that_are_short_on_the_wire_are_not_light() {
        let disk = v1::Disk { partitions: vec![v1::Partition::default(); 64], ..v1::Disk::default() };
        assert!(prost::Message::encoded_len(&disk) < 200);
        assert!(disk.heap() > 64 * size_of::<v1::Partition>());
    }
}
