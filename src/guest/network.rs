//! Network interfaces, their addresses and counters.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;

use crate::sys::net_dev::{self, Statistics};
use crate::sys::root::Root;

/// One network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Such as `eth0`.
    pub name: String,
    /// The link-layer address, where it is one of six bytes.
    pub hardware_address: Option<[u8; 6]>,
    /// It leads nowhere but back.
    pub loopback: bool,
    /// It is up and has a carrier.
    pub running: bool,
    /// IP addresses in the kernel's order.
    pub addresses: Vec<Address>,
    /// Counters; absent for what /proc/net/dev does not list.
    pub statistics: Option<Statistics>,
}

/// An IP address with the length of its network's prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// 0–32 or 0–128.
    pub prefix: u32,
}

/// A link-layer address as people write it, such as `52:54:00:12:34:56`.
pub fn hardware_address(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

/// All interfaces, in the kernel's order: one pass over one answer of the kernel, however many there are.
///
/// # Errors
/// As getifaddrs(3) gives them.
pub fn interfaces(root: &Root) -> io::Result<Vec<Interface>> {
    let counters = root.read("/proc/net/dev").unwrap_or_default();
    let counters = String::from_utf8_lossy(&counters);
    let statistics = net_dev::parse(&counters);
    let mut interfaces = interfaces_without_counters()?;
    for interface in &mut interfaces {
        interface.statistics = statistics.get(interface.name.as_str()).copied();
    }
    Ok(interfaces)
}

/// As [`interfaces`], for who needs no counters.
///
/// # Errors
/// As getifaddrs(3) gives them.
pub fn interfaces_without_counters() -> io::Result<Vec<Interface>> {
    let mut interfaces: Vec<Interface> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    for entry in getifaddrs()? {
        let place = *places.entry(entry.interface_name).or_insert_with_key(|name| {
            interfaces.push(Interface {
                name: name.clone(),
                hardware_address: None,
                loopback: entry.flags.contains(InterfaceFlags::IFF_LOOPBACK),
                running: entry.flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING),
                addresses: Vec::new(),
                statistics: None,
            });
            interfaces.len() - 1
        });
        let (Some(interface), Some(address)) = (interfaces.get_mut(place), entry.address) else { continue };
        if let Some(link) = address.as_link_addr() {
            interface.hardware_address = link.addr().filter(|_| link.halen() == 6);
        } else if let Some(ip) = ip(&address) {
            let prefix = entry.netmask.as_ref().and_then(self::ip).map_or(0, prefix_length);
            interface.addresses.push(Address { ip, prefix });
        }
    }
    Ok(interfaces)
}

fn ip(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
}

fn prefix_length(mask: IpAddr) -> u32 {
    match mask {
        IpAddr::V4(mask) => u32::from(mask).count_ones(),
        IpAddr::V6(mask) => u128::from(mask).count_ones(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_there() {
        let interfaces = interfaces(&Root::default()).unwrap();
        let loopback = interfaces.iter().find(|interface| interface.name == "lo").unwrap();
        assert_eq!(loopback.hardware_address, Some([0; 6]));
        assert!(loopback.loopback);
        assert!(loopback.addresses.contains(&Address { ip: "127.0.0.1".parse().unwrap(), prefix: 8 }));
        assert!(loopback.statistics.is_some());
    }
}
