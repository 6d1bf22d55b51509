//! Protocol messages that events of this guest carry.

use crate::guest::disks::identity::{Holder, KnownDisk, Serial};
use crate::guest::disks::location::Pci;
use crate::guest::topology::{Node, Topology};
use crate::sys::block::Partition;
use crate::wire::proto::v1;

/// Maximum number of partitions and of holders of one disk in a message: the first ones.
const MOST_PARTS: usize = 32;

/// Converts a topology to its message.
pub fn topology(topology: &Topology) -> v1::Topology {
    v1::Topology {
        region: topology.region.clone(),
        zone: topology.zone.clone(),
        host: topology.host.clone(),
        labels: topology.labels.clone().into_iter().collect(),
    }
}

/// Converts the guest's Node to its message.
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

/// Converts a disk to its message.
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

/// Builds the event that a disk cannot be used as its rules say, with the reason.
pub fn disk_failed(disk: &KnownDisk, problem: String) -> v1::DiskFailed {
    v1::DiskFailed { disk: Some(self::disk(disk)), problem }
}

/// Builds the event that the guest now runs elsewhere.
pub fn topology_changed(topology: &Topology) -> v1::TopologyChanged {
    v1::TopologyChanged { topology: Some(self::topology(topology)) }
}
