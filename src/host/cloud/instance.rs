//! A VM as its cluster and its load balancers see it. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::addresses::Subnet;
use crate::host::fleet::Known;
use crate::wire::proto::v1::{self, PowerState, SessionState, instance::Power};

/// Interfaces of a VM, and addresses of each, that are reported at most.
const MOST_INTERFACES: usize = 32;
const MOST_ADDRESSES: usize = 64;
/// Longest name of a Node, or of an interface in a guest, in bytes.
pub(super) const LONGEST_NAME: usize = 253;

/// VM of a cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Cluster that the VM belongs to.
    pub cluster: String,
    /// Description of the VM as it is sent to its cluster.
    pub instance: v1::Instance,
    /// True while the VM's agent has a session.
    pub connected: bool,
    /// True if the VM's agent can make health checks.
    pub able: bool,
    /// Hardware addresses that the settings assign to the VM, in lower case. Reports of its guest do not count.
    pub hardware: BTreeSet<String>,
}

pub use crate::host::health_checks::CAPABILITY;

impl Member {
    /// Describes a VM. `networks` are the networks of its interfaces in the settings, by hardware address. Returns
    /// `None` for a VM without a cluster.
    pub fn of(known: &Known, networks: Option<&BTreeMap<String, String>>) -> Option<Self> {
        let vm = &known.vm;
        if vm.cluster.is_empty() {
            return None;
        }
        let view = &known.view;
        let connected = view.session() == SessionState::Connected;
        let guest = view.guest.as_ref().filter(|_| connected);
        let able = guest.is_some_and(|guest| guest.capabilities.iter().any(|one| one == CAPABILITY));
        let node = known.state.as_ref().and_then(|state| state.node.as_ref());
        let node_name = node.map(|node| node.name.clone()).filter(|name| name.len() <= LONGEST_NAME);
        let topology = view.topology.as_ref().and_then(|standing| standing.wanted.clone());
        let instance = v1::Instance {
            vm_uid: vm.ids.lasting.clone(),
            provider_id: vm.ids.provider.clone(),
            name: vm.name.clone(),
            system_uuid: vm.ids.dmi.clone().unwrap_or_default(),
            node_name: node_name.unwrap_or_default(),
            power: power(view.power(), connected).into(),
            interfaces: interfaces(known, networks),
            addresses_current: connected,
            topology,
            instance_type: String::new(),
        };
        let hardware = networks.into_iter().flat_map(BTreeMap::keys).cloned().collect();
        Some(Self { cluster: vm.cluster.clone(), instance, connected, able, hardware })
    }

    /// Returns the power state of the VM, as far as it is known.
    pub fn power(&self) -> Power {
        self.instance.power()
    }

    /// Returns the addresses of the VM, each with its subnet.
    pub fn addresses(&self) -> impl Iterator<Item = (IpAddr, Subnet)> {
        let all = self.instance.interfaces.iter().flat_map(|interface| &interface.addresses);
        all.filter_map(|text| Subnet::parse_interface(text).ok())
    }
}

/// Returns the power state as the hypervisor reports it. If that is unknown, an agent that answers proves that the
/// VM runs.
fn power(power: PowerState, connected: bool) -> Power {
    match power {
        PowerState::Running => Power::Running,
        PowerState::Paused => Power::Paused,
        PowerState::Off => Power::Stopped,
        PowerState::Unspecified if connected => Power::Running,
        PowerState::Unspecified => Power::Unknown,
    }
}

/// Selects the interfaces to report from those that the agent reports. If the settings name the VM's interfaces,
/// only these are reported. Otherwise only those with addresses are, since programs in a guest create many
/// interfaces.
fn interfaces(known: &Known, networks: Option<&BTreeMap<String, String>>) -> Vec<v1::InstanceInterface> {
    let reported = known.state.iter().flat_map(|state| &state.interfaces);
    let networks = networks.filter(|networks| !networks.is_empty());
    let told = |interface: &v1::NetworkInterface| {
        let hardware_address = interface.hardware_address.to_ascii_lowercase();
        let network = match networks {
            None => String::new(),
            Some(networks) => networks.get(&hardware_address)?.clone(),
        };
        let is_global =
            |text: &&String| Subnet::parse_interface(text).is_ok_and(|(address, _)| is_global(address));
        let addresses: Vec<_> =
            interface.addresses.iter().filter(is_global).take(MOST_ADDRESSES).cloned().collect();
        let is_bare = networks.is_none() && addresses.is_empty();
        if hardware_address.is_empty() || is_bare || interface.name.len() > LONGEST_NAME {
            return None;
        }
        let name = interface.name.clone();
        Some(v1::InstanceInterface { hardware_address, network, name, addresses })
    };
    reported.filter_map(told).take(MOST_INTERFACES).collect()
}

/// Reports whether other machines can reach a machine at this address: it is neither loopback, link-local,
/// unspecified nor multicast.
pub(super) fn is_global(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            !address.is_loopback()
                && !address.is_link_local()
                && !address.is_unspecified()
                && !address.is_multicast()
        }
        IpAddr::V6(address) => {
            !address.is_loopback()
                && !address.is_unicast_link_local()
                && !address.is_unspecified()
                && !address.is_multicast()
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use tokio::time::Instant;

    use super::*;
    use crate::host::backends::Vm;

    /// Builds the fleet's view of a running VM with these addresses.
    pub fn known(vm: &Vm, addresses: &[&str], node: &str) -> Known {
        let interface = v1::NetworkInterface {
            name: "eth0".into(),
            hardware_address: "52:54:00:00:00:01".into(),
            running: true,
            addresses: addresses.iter().map(|&one| one.into()).collect(),
        };
        let mut view = v1::VirtualMachine::default();
        view.set_power(PowerState::Running);
        view.set_session(SessionState::Connected);
        view.guest =
            Some(v1::GuestInfo { capabilities: vec![CAPABILITY.into()], ..v1::GuestInfo::default() });
        let state = v1::GuestState {
            interfaces: vec![interface],
            node: Some(v1::Node { name: node.into(), ..v1::Node::default() }),
            ..v1::GuestState::default()
        };
        Known {
            vm: Arc::new(vm.clone()),
            view: Arc::new(view),
            state: Some(Arc::new(state)),
            since: Instant::now(),
        }
    }

    /// Builds a VM of the cluster `dev`.
    pub fn vm(uid: &str) -> Vm {
        let mut vm = Vm::at(&format!("vm-{uid}"), "/nowhere");
        vm.cluster = "dev".into();
        vm.ids.lasting = uid.into();
        vm
    }

    #[test]
    fn a_vm_is_told_as_it_is() {
        let mut known = known(&vm("u"), &["192.0.2.7/24", "fe80::1/64", "127.0.0.1/8", "junk"], "n1");
        let member = Member::of(&known, None).unwrap();
        assert_eq!(member.instance.interfaces[0].addresses, ["192.0.2.7/24"]);
        assert_eq!((member.instance.node_name.as_str(), member.power()), ("n1", Power::Running));
        assert!(member.able && member.connected && member.instance.addresses_current);
        // If the settings list its interfaces, no others count.
        let networks = |mac: &str| BTreeMap::from([(mac.to_owned(), "lan".to_owned())]);
        let member = Member::of(&known, Some(&networks("52:54:00:00:00:01"))).unwrap();
        assert_eq!(member.instance.interfaces[0].network, "lan");
        let member = Member::of(&known, Some(&networks("52:54:00:00:00:02"))).unwrap();
        assert_eq!(member.instance.interfaces, []);
        // Its session is lost, and no hypervisor reports whether it runs.
        let view = Arc::make_mut(&mut known.view);
        view.set_session(SessionState::Connecting);
        view.set_power(PowerState::Unspecified);
        let member = Member::of(&known, None).unwrap();
        assert_eq!((member.power(), member.connected, member.able), (Power::Unknown, false, false));
        assert_eq!(member.instance.interfaces.len(), 1, "what was known last");
        assert!(!member.instance.addresses_current);
        known.vm = Arc::new(Vm { cluster: String::new(), ..vm("u") });
        assert_eq!(Member::of(&known, None), None);
    }
}
