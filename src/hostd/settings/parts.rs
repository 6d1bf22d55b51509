//! Derivation of what each part of the host half needs from the settings.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "kubevirt")]
use crate::config::host::KubevirtSettings;
use crate::config::host::{
    AddressPoolSettings, Allocation, Bus, ClusterSettings, ConsoleSettings, DialSettings, Format,
    HostSettings, LimitSettings, PoolSettings, ScrapeSettings, TopologySettings, VmSettings,
};
#[cfg(feature = "kubevirt")]
use crate::host::backends::kubevirt::{controller, node};
use crate::host::backends::qemu::pools;
use crate::host::backends::{Ids, Vm, disks, qemu};
use crate::host::cloud::settings as cloud;
use crate::host::exporters::{Job, Jobs};
use crate::host::limits::Limits;
use crate::host::place::Topology;
use crate::host::volumes::policy::{Policies, Policy};
use crate::sys::host_name::host_name;
use crate::transport::dial::{Dialer, Target};

/// Returns the topology of this host, as reported to guests.
pub(super) fn topology(settings: &TopologySettings) -> Topology {
    let TopologySettings { region, zone, host, labels } = settings.clone();
    Topology { region, zone, host: host.unwrap_or_else(host_name), labels: labels.into_iter().collect() }
}

/// Returns the VMs in the form of the backend.
pub(super) fn machines(settings: &HostSettings) -> Vec<qemu::Machine> {
    let limits = Arc::new(limits(&settings.limits));
    settings.vms.iter().map(|vm| machine(vm, &limits)).collect()
}

fn machine(settings: &VmSettings, limits: &Arc<Limits>) -> qemu::Machine {
    let vm = Arc::new(Vm {
        name: settings.name.clone(),
        ids: Ids {
            lasting: settings.uuid.clone(),
            dmi: Some(settings.dmi_uuid.clone()),
            provider: format!("guestlet://{}", settings.uuid),
        },
        cluster: settings.cluster.clone(),
        dial: dial(&settings.dial),
        max_volumes: settings.max_volumes,
        limits: Arc::clone(limits),
        tells_suspension: settings.qmp.is_some(),
    });
    let console = settings.console.as_ref().map(|console| match console {
        ConsoleSettings::Label(label) => qemu::console::Wish::Label(label.clone()),
        ConsoleSettings::Socket(path) => qemu::console::Wish::Socket(path.clone()),
    });
    qemu::Machine { vm, qmp: settings.qmp.clone(), console, labels: Arc::new(settings.labels.clone()) }
}

/// Returns the options for all VMs of a node.
#[cfg(feature = "kubevirt")]
pub(super) fn node_of(settings: &HostSettings) -> node::Options {
    let KubevirtSettings { sockets, port, max_volumes, node_labels, guests, .. } = settings.kubevirt.clone();
    let limits = Arc::new(limits(&settings.limits));
    node::Options { sockets, port, max_volumes, limits, node_labels, guests }
}

/// Returns the options for all VMs of a cluster.
#[cfg(feature = "kubevirt")]
pub(super) fn controller_of(settings: &HostSettings) -> controller::Options {
    let limits = Arc::new(limits(&settings.limits));
    let KubevirtSettings { max_volumes, node_labels, .. } = settings.kubevirt.clone();
    controller::Options { max_volumes, limits, node_labels }
}

/// Returns the pools in the form of the backend.
pub(super) fn pools_of(settings: &HostSettings) -> Vec<pools::Pool> {
    // Without an explicit default, the first pool serves volumes that name no class.
    let none = !settings.pools.iter().any(|pool| pool.default);
    settings.pools.iter().enumerate().map(|(at, settings)| pool(settings, none && at == 0)).collect()
}

fn pool(settings: &PoolSettings, is_default: bool) -> pools::Pool {
    pools::Pool {
        name: settings.name.clone(),
        path: settings.path.clone(),
        format: match settings.format {
            Format::Raw => disks::Format::Raw,
            Format::Qcow2 => disks::Format::Qcow2,
        },
        allocation: match settings.allocation {
            Allocation::Thin => pools::Allocation::Thin,
            Allocation::Full => pools::Allocation::Full,
        },
        bus: settings.bus.map(|bus| match bus {
            Bus::Scsi => disks::Bus::Scsi,
            Bus::Virtio => disks::Bus::VirtioBlk,
        }),
        is_default: settings.default || is_default,
        patience: settings
            .answer_seconds
            .map_or(pools::PATIENCE, |seconds| Duration::from_secs(seconds.into())),
    }
}

/// Returns the policies for the volumes of clusters.
pub(super) fn policies_of(settings: &HostSettings) -> Policies {
    let policy = |settings: &ClusterSettings| Policy {
        volumes: settings.max_volumes,
        bytes: settings.max_bytes,
        classes: settings.classes.clone(),
        controllers: settings.controllers.clone(),
    };
    settings.clusters.iter().map(|(name, settings)| (name.clone(), policy(settings))).collect()
}

/// Returns the pools of addresses, and the shares of clusters in them.
pub(super) fn cloud_of(settings: &HostSettings) -> cloud::Settings {
    let policy = |settings: &ClusterSettings| cloud::Policy {
        load_balancers: settings.max_load_balancers,
        controllers: settings.controllers.clone(),
    };
    let mut of_clusters: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for vm in settings.vms.iter().filter(|vm| !vm.cluster.is_empty()) {
        of_clusters.entry(vm.cluster.clone()).or_default().extend(vm.networks.values().cloned());
    }
    cloud::Settings {
        pools: settings.address_pools.iter().map(address_pool).collect(),
        clusters: settings.clusters.iter().map(|(name, settings)| (name.clone(), policy(settings))).collect(),
        networks: settings.vms.iter().map(|vm| (vm.uuid.clone(), vm.networks.clone())).collect(),
        of_clusters,
        release_after: settings.load_balancers.release_after,
    }
}

fn address_pool(settings: &AddressPoolSettings) -> cloud::Pool {
    let AddressPoolSettings {
        name,
        ranges,
        network,
        clusters,
        priority,
        forward_to,
        interface,
        reserved_ports,
    } = settings.clone();
    cloud::Pool { name, ranges, network, clusters, priority, forward_to, interface, reserved_ports }
}

/// Returns the scrape jobs for exporters in guests.
pub(super) fn jobs_of(settings: &HostSettings) -> Jobs {
    let job = |settings: &ScrapeSettings| {
        let ScrapeSettings { job, target, path, vms, interval, timeout, max_bytes, max_series } =
            settings.clone();
        Job { name: job, target: target.to_string(), path, vms, interval, timeout, max_bytes, max_series }
    };
    settings.scrapes.iter().map(job).collect()
}

fn dial(settings: &DialSettings) -> Dialer {
    Dialer::from(match settings.clone() {
        DialSettings::Vsock { cid, port } => Target::Vsock { cid, port },
        DialSettings::Hybrid { path, port } => Target::Hybrid { path, port },
        DialSettings::Unix { path } => Target::Unix { path },
    })
}

fn limits(set: &LimitSettings) -> Limits {
    let usual = Limits::default();
    let size = |set: Option<u32>, usual| set.map_or(usual, |set| usize::try_from(set).unwrap_or(usize::MAX));
    let seconds = |set: Option<u32>, usual| set.map_or(usual, |set| Duration::from_secs(set.into()));
    Limits {
        message_bytes: size(set.message_bytes, usual.message_bytes),
        bytes_per_second: set.bytes_per_second.unwrap_or(usual.bytes_per_second),
        events_per_second: set.events_per_second.unwrap_or(usual.events_per_second),
        event_burst: set.event_burst.unwrap_or(usual.event_burst),
        events_kept: size(set.events_kept, usual.events_kept),
        history_bytes: size(set.history_bytes, usual.history_bytes),
        state_bytes: size(set.state_bytes, usual.state_bytes),
        interfaces: size(set.interfaces, usual.interfaces),
        addresses: size(set.addresses, usual.addresses),
        file_systems: size(set.file_systems, usual.file_systems),
        users: size(set.users, usual.users),
        disks: size(set.disks, usual.disks),
        calls_per_second: set.calls_per_second.unwrap_or(usual.calls_per_second),
        open_calls: set.open_calls.unwrap_or(usual.open_calls),
        unread: seconds(set.unread_seconds, usual.unread),
        busy: seconds(set.busy_seconds, usual.busy),
    }
}
