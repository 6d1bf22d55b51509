//! Addresses of a network interface that are given to it and taken away, by rtnetlink(7).

use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd as _;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, socket,
};

/// rtnetlink(7): `RTM_NEWADDR` and `RTM_DELADDR`.
const NEW: u16 = 20;
const DELETE: u16 = 21;
/// netlink(7): a request that is acknowledged, and for a new address that it may be there already.
const REQUEST: u16 = 0x1 | 0x4;
const CREATE: u16 = 0x400 | 0x100;
/// `NLMSG_ERROR`, which is the acknowledgement as well.
const ERROR: u16 = 2;
/// `IFA_ADDRESS`, `IFA_LOCAL` and `IFA_FLAGS`.
const ADDRESS: u16 = 1;
const LOCAL: u16 = 2;
const FLAGS: u16 = 8;
/// `IFA_F_NODAD`: an address that is the host's by its administrator's word is usable at once.
const NO_DAD: u32 = 0x02;
const FAMILY_V4: u8 = 2;
const FAMILY_V6: u8 = 10;

/// The addresses that an interface has.
///
/// # Errors
/// As getifaddrs(3) gives them; and if there is no such interface.
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
    ask(&message(NEW, REQUEST | CREATE, if_nametoindex(interface)?, address))
}

/// Takes an address away from an interface.
///
/// # Errors
/// If there is no such interface, it does not have the address, or the kernel refuses.
pub fn remove(interface: &str, address: IpAddr) -> io::Result<()> {
    ask(&message(DELETE, REQUEST, if_nametoindex(interface)?, address))
}

fn message(kind: u16, flags: u16, index: u32, address: IpAddr) -> Vec<u8> {
    let (family, bytes) = match address {
        IpAddr::V4(address) => (FAMILY_V4, address.octets().to_vec()),
        IpAddr::V6(address) => (FAMILY_V6, address.octets().to_vec()),
    };
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let mut body = vec![family, bits, 0, 0];
    body.extend(index.to_ne_bytes());
    attribute(&mut body, ADDRESS, &bytes);
    if address.is_ipv4() {
        attribute(&mut body, LOCAL, &bytes);
    } else {
        attribute(&mut body, FLAGS, &NO_DAD.to_ne_bytes());
    }
    let length = u32::try_from(16 + body.len()).unwrap_or(u32::MAX);
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // The sequence number and the port: there is one request on each socket.
    message.extend([0; 8]);
    message.extend(body);
    message
}

/// Lengths of all attributes that are used are multiples of four.
fn attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
}

fn ask(message: &[u8]) -> io::Result<()> {
    let socket =
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    send(socket.as_raw_fd(), message, MsgFlags::empty())?;
    let mut answer = [0; 1024];
    // The kernel has answered before send(2) returns.
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT)?;
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is none");
    let answer = answer.get(..length).ok_or_else(malformed)?;
    let kind = answer.get(4..6).and_then(|kind| kind.try_into().ok()).map(u16::from_ne_bytes);
    let error = answer.get(16..20).and_then(|error| error.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, error) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(errno)) => Err(io::Error::from_raw_os_error(-errno)),
        _ => Err(malformed()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_as_the_kernel_reads_them() {
        let message = message(NEW, REQUEST | CREATE, 7, "192.0.2.1".parse().unwrap());
        assert_eq!(message.len(), 40);
        assert_eq!(message[..4], 40_u32.to_ne_bytes());
        assert_eq!(message[16..20], [2, 32, 0, 0]);
        assert_eq!(message[28..32], [192, 0, 2, 1]);
        assert_eq!(super::message(DELETE, REQUEST, 7, "::1".parse().unwrap()).len(), 52);
        assert!(of("no-such-interface").is_err());
        assert!(of("lo").unwrap().contains(&"127.0.0.1".parse().unwrap()));
    }
}
