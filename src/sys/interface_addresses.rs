//! Adding and removing addresses of a network interface, by rtnetlink(7).

use std::io;
use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::SockProtocol;

use super::netlink::{self, CREATE, Netlink};

/// rtnetlink(7): `RTM_NEWADDR` and `RTM_DELADDR`.
const NEW: u16 = 20;
const DELETE: u16 = 21;
/// netlink(7): a new address may be there already.
const REPLACE: u16 = 0x100;
/// `IFA_ADDRESS`, `IFA_LOCAL` and `IFA_FLAGS`.
const ADDRESS: u16 = 1;
const LOCAL: u16 = 2;
const FLAGS: u16 = 8;
/// `IFA_F_NODAD`: an address that is the host's by its administrator's word is usable at once.
const NO_DAD: u32 = 0x02;

/// Returns the addresses of an interface.
///
/// # Errors
/// The errors of getifaddrs(3); also if there is no such interface.
pub fn of(interface: &str) -> io::Result<Vec<IpAddr>> {
    if_nametoindex(interface)?;
    let mut found = Vec::new();
    for one in getifaddrs()?.filter(|one| one.interface_name == interface) {
        let Some(address) = one.address else { continue };
        if let Some(address) = address.as_sockaddr_in() {
            found.push(address.ip().into());
        } else if let Some(address) = address.as_sockaddr_in6() {
            found.push(address.ip().into());
        }
    }
    Ok(found)
}

/// Gives an interface an address of its own, without a network behind it; one that it has is left.
///
/// # Errors
/// If there is no such interface, or the kernel refuses.
pub fn add(interface: &str, address: IpAddr) -> io::Result<()> {
    change(NEW, CREATE | REPLACE, if_nametoindex(interface)?, address)
}

/// Takes an address away from an interface.
///
/// # Errors
/// If there is no such interface, it does not have the address, or the kernel refuses.
pub fn remove(interface: &str, address: IpAddr) -> io::Result<()> {
    change(DELETE, 0, if_nametoindex(interface)?, address)
}

fn change(kind: u16, flags: u16, index: u32, address: IpAddr) -> io::Result<()> {
    Netlink::open(SockProtocol::NetlinkRoute)?.ask(kind, flags, &body(index, address)).map(drop)
}

fn body(index: u32, address: IpAddr) -> Vec<u8> {
    let bytes = netlink::octets(address);
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let mut body = vec![netlink::family(address), bits, 0, 0];
    body.extend(index.to_ne_bytes());
    netlink::add(&mut body, ADDRESS, &bytes);
    if address.is_ipv4() {
        netlink::add(&mut body, LOCAL, &bytes);
    } else {
        netlink::add(&mut body, FLAGS, &NO_DAD.to_ne_bytes());
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_as_the_kernel_reads_them() {
        let four = body(7, "192.0.2.1".parse().unwrap());
        assert_eq!(four.len(), 24);
        assert_eq!(four[..4], [2, 32, 0, 0]);
        assert_eq!(four[12..16], [192, 0, 2, 1]);
        assert_eq!(body(7, "::1".parse().unwrap()).len(), 36);
        assert!(of("no-such-interface").is_err());
        assert!(of("lo").unwrap().contains(&"127.0.0.1".parse().unwrap()));
    }
}
