//! Memory that an event takes, in bytes, while it waits for watchers. Pure.

use crate::events;
use crate::wire::heap::Heap;
use crate::wire::proto::v1::{self, virtual_machine_event::Kind};

/// Limit on the bytes of an event while it waits for watchers.
pub const LARGEST_EVENT: usize = 32 * 1024;
impl Heap for v1::VirtualMachineEvent {
    fn heap(&self) -> usize {
        let kind = match &self.kind {
            Some(Kind::GuestEvent(event)) => event.kind.heap(),
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

/// Removes the parts of an event that make it too large for watchers. Their effect on the state is already known.
pub fn slim(event: &mut v1::Event) {
    if let Some(kind) = event.kind.as_mut().filter(|kind| kind.heap() > LARGEST_EVENT) {
        events::happening_mut(kind).slim(LARGEST_EVENT);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::host::text::clean_event;
    use crate::wire::proto::v1::event;

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
            assert!(event.kind.heap() > LARGEST_EVENT, "the test: {event:?}");
            slim(&mut event);
            let left = event.kind.heap();
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
