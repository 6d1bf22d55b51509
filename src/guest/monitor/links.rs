//! Network interfaces and addresses, rtnetlink(7): those at which this guest can be reached, without those of
//! containers.

use std::convert::Infallible;
use std::io;
use std::net::IpAddr;

use crate::guest::Guest;
use crate::guest::monitor::{Source, follow};
use crate::guest::network::{self, Interface, hardware_address};
use crate::sys::link_news::LinkNews;
use crate::wire::proto::v1::{InterfacesChanged, NetworkInterface};

/// Name patterns of interfaces created by containers, their networks and their load balancers, and of tunnels that
/// the kernel creates by itself. `*` matches any text, `?` one character.
pub const IGNORED: [&str; 35] = [
    // Docker's bridges have twelve digits; bridges that a person has created (br0, br-lan, br-ex) are reported.
    "br-????????????",
    "cali*",
    "cbr?",
    "cilium*",
    "cni*",
    "docker*",
    "dummy*",
    "erspan0",
    "flannel*",
    "genev_sys_*",
    "gre0",
    "gretap0",
    "ifb*",
    "ip6_vti0",
    "ip6gre0",
    "ip6tnl*",
    "ip_vti0",
    "kube-*",
    "lxc*",
    "lxd*",
    "nerdctl*",
    "nodelocaldns",
    "ovn-k8s-*",
    "ovs-system",
    "podman*",
    "sit0",
    "teql0",
    "tunl*",
    "veth*",
    "virbr*",
    "vnet*",
    "vxlan.calico",
    "vxlan_sys_*",
    "weave",
    "wireguard.cali",
];

/// Maximum number of links and addresses in one state or event: the first ones in their order.
const MOST_LINKS: usize = 128;
const MOST_ADDRESSES: usize = 64;

/// Network interface that is reported to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Link {
    name: String,
    /// Hardware address; `None` unless it has six bytes.
    hardware_address: Option<[u8; 6]>,
    running: bool,
    /// Addresses with their prefix lengths: IPv4 first, sorted by value, link-local IPv6 addresses last.
    addresses: Vec<(IpAddr, u32)>,
}

impl From<Link> for NetworkInterface {
    fn from(link: Link) -> Self {
        Self {
            name: link.name,
            hardware_address: link.hardware_address.map(hardware_address).unwrap_or_default(),
            running: link.running,
            addresses: link.addresses.iter().map(|(ip, prefix)| format!("{ip}/{prefix}")).collect(),
        }
    }
}

impl Source for LinkNews {
    async fn changed(&self) -> io::Result<()> {
        LinkNews::changed(self).await
    }

    fn has_changed(&self) -> io::Result<bool> {
        LinkNews::has_changed(self)
    }
}

pub(super) async fn watch(guest: Guest, ignored: Vec<String>) -> io::Result<Infallible> {
    let news = LinkNews::subscribe()?;
    let mut known = Vec::new();
    follow(&guest, &news, || {
        let links = select(network::interfaces()?, &ignored);
        if links != known {
            known.clone_from(&links);
            guest.events.tell(InterfacesChanged { interfaces: links.into_iter().map(Into::into).collect() });
        }
        Ok(())
    })
    .await
}

/// Selects the interfaces to report, in an order that does not depend on the kernel's.
fn select(interfaces: Vec<Interface>, ignored: &[String]) -> Vec<Link> {
    let mut links: Vec<Link> = Vec::new();
    for interface in interfaces {
        // An IPv4 address with a label is listed as if it had an interface of its own, such as eth0:1.
        let name = interface.name.split(':').next().unwrap_or_default();
        if interface.loopback || ignored.iter().any(|pattern| matches(pattern.as_bytes(), name.as_bytes())) {
            continue;
        }
        let addresses = interface.addresses.iter().map(|address| (address.ip, address.prefix));
        if let Some(link) = links.iter_mut().find(|link| link.name == name) {
            link.addresses.extend(addresses);
        } else {
            links.push(Link {
                name: name.to_owned(),
                hardware_address: interface.hardware_address(),
                running: interface.running,
                addresses: addresses.collect(),
            });
        }
    }
    links.sort_unstable_by(|one, other| one.name.cmp(&other.name));
    links.truncate(MOST_LINKS);
    for link in &mut links {
        link.addresses.sort_unstable_by_key(|(ip, prefix)| (is_link_local(*ip), *ip, *prefix));
        link.addresses.truncate(MOST_ADDRESSES);
    }
    links
}

/// Returns whether this is a link-local IPv6 address. Link-local IPv4 addresses are sorted as any other: some
/// clouds reach a guest by them.
fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => (0..=name.len()).any(|skipped| matches(rest, &name[skipped..])),
        (Some((wanted, rest)), Some((character, after))) => {
            (*wanted == b'?' || wanted == character) && matches(rest, after)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::network::Address;

    fn interface(name: &str, addresses: &[&str]) -> Interface {
        let address = |text: &&str| {
            let (ip, prefix) = text.split_once('/').unwrap();
            Address { ip: ip.parse().unwrap(), prefix: prefix.parse().unwrap() }
        };
        Interface {
            name: name.to_owned(),
            link_address: Some(vec![2, 0, 0, 0, 0, 1]),
            loopback: name == "lo",
            running: true,
            addresses: addresses.iter().map(address).collect(),
            statistics: None,
        }
    }

    fn ignored() -> Vec<String> {
        IGNORED.map(str::to_owned).to_vec()
    }

    #[test]
    fn what_containers_make_is_left_out() {
        let left_out = "lo docker0 br-0123456789ab veth12ab34c cali0123456789a cni0 flannel.1 flannel-v6.1 cilium_host \
            cilium_vxlan lxc_health lxc0123 lxdbr0 virbr0 vnet3 kube-ipvs0 kube-bridge nodelocaldns tunl0 ip6tnl0 dummy0 \
            ifb0 podman1 vxlan.calico weave vethwe-bridge ovs-system genev_sys_6081 cbr0 sit0";
        let kept = "eth0 ens3 enp1s0 eno1 wlan0 bond0 team0 br0 br-lan br-ex vlan100 eth0.100 wg0 tun0 tap0 ppp0 ib0 \
            enx525400123456 vxlan0 vrf1 brq weave1 docke";
        let all = left_out.split_whitespace().chain(kept.split_whitespace());
        let links = select(all.map(|name| interface(name, &[])).collect(), &ignored());
        let mut expected: Vec<_> = kept.split_whitespace().collect();
        expected.sort_unstable();
        assert_eq!(links.iter().map(|link| link.name.as_str()).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_order_is_not_the_kernels() {
        let links = select(
            vec![
                interface("eth1", &["fe80::1/64", "2001:db8::2/64", "192.0.2.7/24"]),
                interface("eth0", &["fd00::1/8", "fe80::2/64", "198.51.100.1/24"]),
                interface("eth1:old", &["10.0.0.1/8", "169.254.0.1/16"]),
            ],
            &[],
        );
        let told: Vec<_> = links
            .iter()
            .map(|link| {
                let addresses: Vec<_> =
                    link.addresses.iter().map(|(ip, prefix)| format!("{ip}/{prefix}")).collect();
                format!("{} {}", link.name, addresses.join(" "))
            })
            .collect();
        assert_eq!(
            told,
            [
                "eth0 198.51.100.1/24 fd00::1/8 fe80::2/64",
                "eth1 10.0.0.1/8 169.254.0.1/16 192.0.2.7/24 2001:db8::2/64 fe80::1/64"
            ]
        );
    }

    #[test]
    fn there_is_an_end_to_it() {
        let addresses: Vec<_> =
            (0..300).map(|number| format!("10.0.{}.{}/32", number / 256, number % 256)).collect();
        let addresses: Vec<_> = addresses.iter().map(String::as_str).collect();
        let interfaces = (0..300).map(|number| interface(&format!("eth{number:03}"), &addresses)).collect();
        let links = select(interfaces, &ignored());
        assert_eq!((links.len(), links[0].addresses.len()), (MOST_LINKS, MOST_ADDRESSES));
    }

    #[test]
    fn patterns() {
        for (pattern, name, expected) in [
            ("eth0", "eth0", true),
            ("eth0", "eth", false),
            ("eth", "eth0", false),
            ("eth*", "eth", true),
            ("*", "", true),
            ("*0", "eth0", true),
            ("*0", "eth01", false),
            ("e?h*", "eth10", true),
            ("eth?", "eth", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), expected, "{pattern} {name}");
        }
    }
}
