//! Network interfaces, their addresses and counters.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;

use nix::libc;

use crate::sys::rtnetlink;
use crate::sys::rtnetlink::message::{Answer, Link, Statistics};

/// Network interface with its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Name, such as `eth0`. IPv4 addresses with a label of their own form an interface with that name, such as
    /// `eth0:1`.
    pub name: String,
    /// Link-layer address of any length; `None` if no link has the interface's name up to a `:`.
    pub link_address: Option<Vec<u8>>,
    /// True for the loopback interface.
    pub loopback: bool,
    /// True if the interface is up and has a carrier.
    pub running: bool,
    /// IP addresses in the kernel's order.
    pub addresses: Vec<Address>,
    /// Counters; `None` if no link has this name.
    pub statistics: Option<Statistics>,
}

/// IP address with its prefix length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// IP address without its prefix length.
    pub ip: IpAddr,
    /// Prefix length: 0–32 for IPv4, 0–128 for IPv6.
    pub prefix: u32,
}

/// Formats a link-layer address, such as `52:54:00:12:34:56`.
pub fn hardware_address(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

impl Interface {
    /// Returns the link-layer address if it has six bytes.
    pub fn hardware_address(&self) -> Option<[u8; 6]> {
        self.link_address.as_deref()?.try_into().ok()
    }
}

/// Returns all interfaces, in the kernel's order.
///
/// # Errors
/// The errors of [`rtnetlink::links_and_addresses`].
pub fn interfaces() -> io::Result<Vec<Interface>> {
    Ok(arrange(rtnetlink::links_and_addresses()?))
}

/// Groups addresses by interface, in one pass however many there are.
fn arrange(answer: Answer) -> Vec<Interface> {
    let by_number: HashMap<u32, usize> =
        answer.links.iter().enumerate().map(|(place, link)| (link.index, place)).collect();
    let mut interfaces: Vec<Interface> = answer.links.into_iter().map(interface).collect();
    // Filled only when the first label needs it.
    let mut by_name: HashMap<String, usize> = HashMap::new();
    for address in answer.addresses {
        let Some(&link) = by_number.get(&address.link) else { continue };
        let place = match address.label.filter(|label| *label != interfaces[link].name) {
            None => link,
            Some(label) => {
                if by_name.is_empty() {
                    let all = interfaces.iter().enumerate();
                    by_name = all.map(|(place, interface)| (interface.name.clone(), place)).collect();
                }
                by_name.get(&label).copied().unwrap_or_else(|| {
                    let device = label.split(':').next().and_then(|device| by_name.get(device));
                    interfaces.push(Interface {
                        link_address: device.and_then(|place| interfaces[*place].link_address.clone()),
                        name: label.clone(),
                        addresses: Vec::new(),
                        statistics: None,
                        ..interfaces[link]
                    });
                    by_name.insert(label, interfaces.len() - 1);
                    interfaces.len() - 1
                })
            }
        };
        interfaces[place].addresses.push(Address { ip: address.ip, prefix: address.prefix.into() });
    }
    interfaces
}

fn interface(link: Link) -> Interface {
    const RUNNING: u32 = (libc::IFF_UP | libc::IFF_RUNNING).cast_unsigned();
    const LOOPBACK: u32 = libc::IFF_LOOPBACK.cast_unsigned();
    Interface {
        name: link.name,
        link_address: Some(link.address),
        loopback: link.flags & LOOPBACK != 0,
        running: link.flags & RUNNING == RUNNING,
        addresses: Vec::new(),
        statistics: link.statistics,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_there() {
        let interfaces = interfaces().unwrap();
        let loopback = interfaces.iter().find(|interface| interface.name == "lo").unwrap();
        assert_eq!(loopback.hardware_address(), Some([0; 6]));
        assert!(loopback.loopback);
        assert!(loopback.addresses.contains(&Address { ip: "127.0.0.1".parse().unwrap(), prefix: 8 }));
        assert!(loopback.statistics.is_some());
    }
}
