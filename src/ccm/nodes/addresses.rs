//! Selection of a Node's addresses from those that its VM's agent reports. Pure.
//!
//! An address of the Node is kept as long as the VM has it, so that addresses that come and go on an
//! interface (that of a load balancer, or one for a control plane) do not replace it.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::NodeAddress;

use crate::ccm::instance::{Instance, Interface};
use crate::ccm::net::Net;
use crate::ccm::objects::{Node, PROVIDED_NODE_IP, annotation, name};

const INTERNAL: &str = "InternalIP";
const EXTERNAL: &str = "ExternalIP";
const HOSTNAME: &str = "Hostname";

/// Settings for the selection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// Network on the host whose interface is used; without it, the first interface with an address.
    pub network: Option<String>,
    /// Ranges of internal addresses; empty for any address.
    pub internal: Vec<Net>,
    /// Ranges of external addresses, among the remaining ones.
    pub external: Vec<Net>,
}

/// Returns the addresses that a Node is to have. `not` are those of load balancers.
///
/// # Errors
/// Fails with a message for people if they cannot be determined; the present addresses stay.
pub fn wanted(
    node: &Node,
    instance: &Instance,
    choice: &Choice,
    not: &BTreeSet<IpAddr>,
) -> Result<Vec<NodeAddress>, String> {
    let own: Vec<Vec<Net>> = instance.interfaces.iter().map(|one| usable(one, not)).collect();
    let everywhere: Vec<IpAddr> = own.iter().flatten().map(|net| net.address).collect();
    let has = || {
        let internal = node.addresses.iter().filter(|one| one.type_ == INTERNAL);
        internal.filter_map(|one| one.address.parse::<IpAddr>().ok())
    };
    let internal = if let Some(provided) = annotation(&node.metadata, PROVIDED_NODE_IP) {
        provided_by_kubelet(provided, instance)?
    } else {
        let is_meant =
            |one: &Interface| choice.network.as_ref().is_none_or(|network| one.network == *network);
        let of_interface = instance
            .interfaces
            .iter()
            .zip(&own)
            .find(|(one, addresses)| is_meant(one) && !addresses.is_empty())
            .map(|(_, addresses)| addresses.as_slice())
            .unwrap_or_default();
        let fits = |net: &&Net| {
            choice.internal.is_empty() || choice.internal.iter().any(|one| one.contains(net.address))
        };
        let candidates: Vec<IpAddr> = of_interface.iter().filter(fits).map(|net| net.address).collect();
        let first = |is_v4: bool| {
            let kept = has().find(|one| one.is_ipv4() == is_v4 && candidates.contains(one));
            kept.or_else(|| candidates.iter().copied().find(|one| one.is_ipv4() == is_v4))
        };
        // The order of the families is kept.
        let is_v4_first = has().next().is_none_or(|one| one.is_ipv4());
        [first(is_v4_first), first(!is_v4_first)].into_iter().flatten().collect()
    };
    if internal.is_empty() {
        return Err(missing(instance, choice));
    }
    let is_external = |address: &IpAddr| {
        !internal.contains(address) && choice.external.iter().any(|one| one.contains(*address))
    };
    let external = everywhere.into_iter().filter(is_external);
    let one = |kind: &str, address: String| NodeAddress { type_: kind.to_owned(), address };
    let mut all: Vec<_> = internal.iter().map(|address| one(INTERNAL, address.to_string())).collect();
    all.extend(external.map(|address| one(EXTERNAL, address.to_string())));
    // Host names and DNS names are kubelet's to set.
    let names = node.addresses.iter().filter(|one| one.type_ != INTERNAL && one.type_ != EXTERNAL);
    all.extend(names.cloned());
    if !all.iter().any(|one| one.type_ == HOSTNAME) {
        all.push(one(HOSTNAME, name(&node.metadata).to_owned()));
    }
    Ok(all)
}

/// Returns the addresses of an interface by which others reach this VM, without those of load balancers.
/// Single addresses (/32 or /128) were usually added by others, and count only if there is nothing else.
fn usable(interface: &Interface, not: &BTreeSet<IpAddr>) -> Vec<Net> {
    let own = interface.addresses.iter().filter(|net| !not.contains(&net.address)).copied();
    let own: Vec<Net> = own.collect();
    let (beside, of_network): (Vec<Net>, Vec<Net>) = own.into_iter().partition(|net| net.is_single());
    if of_network.is_empty() { beside } else { of_network }
}

fn provided_by_kubelet(provided: &str, instance: &Instance) -> Result<Vec<IpAddr>, String> {
    let mut all: Vec<IpAddr> = Vec::new();
    for text in provided.split(',').map(str::trim) {
        let address: IpAddr = text
            .parse()
            .map_err(|_| format!("kubelet's --node-ip says {text:?}, which is not an address"))?;
        // An unspecified address matches any address of its family.
        if address.is_unspecified() {
            continue;
        }
        let mut reported = instance.interfaces.iter().flat_map(|one| &one.addresses);
        if !reported.any(|net| net.address == address) {
            return Err(format!(
                "kubelet's --node-ip says {address}, which is not an address that the VM's agent reports"
            ));
        }
        if !all.contains(&address) {
            all.push(address);
        }
    }
    Ok(all)
}

fn missing(instance: &Instance, choice: &Choice) -> String {
    let reported: Vec<_> = instance
        .interfaces
        .iter()
        .flat_map(|one| &one.addresses)
        .map(|net| net.address.to_string())
        .collect();
    let reported = if reported.is_empty() {
        "the VM's agent has reported no address yet; check that it is running".to_owned()
    } else {
        format!("the VM's agent reports {}", reported.join(", "))
    };
    match &choice.network {
        Some(network) => format!("it has no address in the network {network:?}: {reported}"),
        None if !choice.internal.is_empty() => format!("it has no address in --node-cidr: {reported}"),
        None => format!("it has no address: {reported}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(network: &str, addresses: &[&str]) -> Interface {
        Interface {
            network: network.into(),
            name: String::new(),
            addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        }
    }

    fn instance(interfaces: &[Interface]) -> Instance {
        Instance { interfaces: interfaces.to_vec(), is_current: true, ..Instance::default() }
    }

    fn node(addresses: &[&str]) -> Node {
        let mut node = Node::default();
        node.metadata.name = Some("a".into());
        let split = |text: &&str| {
            let (kind, address) = text.split_once(' ').unwrap();
            NodeAddress { type_: kind.into(), address: address.into() }
        };
        node.addresses = addresses.iter().map(split).collect();
        node
    }

    fn words(wanted: Result<Vec<NodeAddress>, String>) -> String {
        let all = wanted
            .map(|all| all.iter().map(|one| format!("{} {}", one.type_, one.address)).collect::<Vec<_>>());
        all.map_or_else(|why| why, |all| all.join(", "))
    }

    fn of(node: &Node, interfaces: &[Interface], choice: &Choice) -> String {
        words(wanted(node, &instance(interfaces), choice, &BTreeSet::new()))
    }

    #[test]
    fn the_first_address_of_each_family_and_what_it_has_stays() {
        let usual = Choice::default();
        let two = [interface("", &[]), interface("", &["192.0.2.7/24", "192.0.2.9/24", "2001:db8::7/64"])];
        assert_eq!(of(&node(&[]), &two, &usual), "InternalIP 192.0.2.7, InternalIP 2001:db8::7, Hostname a");
        let has = node(&["InternalIP 2001:db8::7", "InternalIP 192.0.2.9", "Hostname b", "InternalDNS a.b"]);
        assert_eq!(
            of(&has, &two, &usual),
            "InternalIP 2001:db8::7, InternalIP 192.0.2.9, Hostname b, InternalDNS a.b"
        );
        let gone = node(&["InternalIP 192.0.2.200"]);
        assert_eq!(of(&gone, &two, &usual), "InternalIP 192.0.2.7, InternalIP 2001:db8::7, Hostname a");
    }

    #[test]
    fn addresses_of_load_balancers_are_not_the_nodes() {
        let one = [interface("", &["192.0.2.1/32", "192.0.2.5/24", "192.0.2.7/24"])];
        let not = BTreeSet::from(["192.0.2.5".parse().unwrap()]);
        let all = wanted(&node(&[]), &instance(&one), &Choice::default(), &not);
        assert_eq!(words(all), "InternalIP 192.0.2.7, Hostname a");
        // Some networks assign only such addresses.
        let single = [interface("", &["192.0.2.1/32"])];
        assert_eq!(of(&node(&[]), &single, &Choice::default()), "InternalIP 192.0.2.1, Hostname a");
    }

    #[test]
    fn the_settings_choose_network_and_ranges() {
        let two = [interface("ns/one", &["192.0.2.7/24"]), interface("ns/two", &["198.51.100.7/24"])];
        let network = Choice { network: Some("ns/two".into()), ..Choice::default() };
        assert_eq!(of(&node(&[]), &two, &network), "InternalIP 198.51.100.7, Hostname a");
        let external = Choice { external: vec!["198.51.100.0/24".parse().unwrap()], ..Choice::default() };
        assert_eq!(
            of(&node(&[]), &two, &external),
            "InternalIP 192.0.2.7, ExternalIP 198.51.100.7, Hostname a"
        );
        let other = Choice { network: Some("ns/three".into()), ..Choice::default() };
        assert!(of(&node(&[]), &two, &other).contains("no address in the network \"ns/three\""));
        let range = Choice { internal: vec!["203.0.113.0/24".parse().unwrap()], ..Choice::default() };
        assert!(of(&node(&[]), &two, &range).contains("--node-cidr"));
        assert!(of(&node(&[]), &[], &Choice::default()).contains("check that it is running"));
    }

    #[test]
    fn kubelets_own_choice_counts_if_the_vm_has_it() {
        let two = [interface("", &["192.0.2.7/24"]), interface("", &["198.51.100.7/24", "2001:db8::7/64"])];
        let with = |provided: &str| {
            let mut node = node(&[]);
            node.metadata.annotations = Some([(PROVIDED_NODE_IP.to_owned(), provided.to_owned())].into());
            of(&node, &two, &Choice::default())
        };
        assert_eq!(with("198.51.100.7"), "InternalIP 198.51.100.7, Hostname a");
        assert_eq!(with("2001:db8::7,192.0.2.7"), "InternalIP 2001:db8::7, InternalIP 192.0.2.7, Hostname a");
        assert!(with("192.0.2.8").contains("not an address that"));
        assert!(with("x").contains("\"x\", which is not an address"));
    }
}
