//! Lookup of the machine that has an address on a link of this host, in the kernel's neighbour table, which
//! decides where packets are sent.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use nix::sys::socket::SockProtocol;

use super::netlink::{self, CREATE, LIST, Netlink, attribute, ip, u16_at, u32_at};

/// rtnetlink(7): `RTM_NEWNEIGH` and `RTM_GETNEIGH`, `RTM_NEWROUTE` and `RTM_GETROUTE`.
const NEIGHBOUR: u16 = 28;
const NEIGHBOURS: u16 = 30;
const ROUTE: u16 = 24;
const ROUTES: u16 = 26;
/// `struct rtmsg` and `struct ndmsg`
const ROUTE_HEAD: usize = 12;
const NEIGHBOUR_HEAD: usize = 12;
/// `RTA_DST`, `RTA_OIF`, `RTA_GATEWAY` and `RTA_VIA`.
const DESTINATION: u16 = 1;
const INTERFACE: u16 = 4;
const GATEWAY: u16 = 5;
const VIA: u16 = 18;
/// Route types `RTN_UNICAST` and `RTN_LOCAL`.
const UNICAST: u8 = 1;
const LOCAL: u8 = 2;
/// Neighbour attributes `NDA_DST` and `NDA_LLADDR`.
const OF: u16 = 1;
const HARDWARE: u16 = 2;
/// Flag `NTF_USE`: the kernel probes the address, as if there was a packet to send.
const USE: u8 = 0x01;
/// `NUD_REACHABLE`, `_STALE`, `_DELAY`, `_PROBE` and `_PERMANENT`: packets are sent to the hardware address.
const VALID: u16 = 0x02 | 0x04 | 0x08 | 0x10 | 0x80;

/// Owner of an address, as the kernel sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// Address of this host itself.
    Own,
    /// Machine with this hardware address, in lower case.
    At(String),
    /// Address that is on no link of this host: it is behind a router, or has no route.
    OffLink,
    /// Address on a link for which no machine has answered yet.
    Nobody,
}

/// Looks up the owners of these addresses. Makes the kernel probe the addresses whose entry is missing or old,
/// so that a later lookup finds them. Without the privilege for that (`CAP_NET_ADMIN`), entries appear only
/// through the traffic of other programs.
///
/// # Errors
/// If the kernel does not answer the query.
pub fn look(addresses: &BTreeSet<IpAddr>) -> io::Result<BTreeMap<IpAddr, Seen>> {
    let mut kernel = Netlink::open(SockProtocol::NetlinkRoute)?;
    let (mut seen, mut on_link) = (BTreeMap::new(), BTreeMap::new());
    for address in addresses {
        match route(&mut kernel, *address)? {
            Ok(interface) => drop(on_link.insert((interface, *address), Seen::Nobody)),
            Err(elsewhere) => drop(seen.insert(*address, elsewhere)),
        }
    }
    if on_link.is_empty() {
        return Ok(seen);
    }
    for (interface, address) in on_link.keys() {
        if let Err(error) = kernel.ask(NEIGHBOUR, CREATE, &neighbour(*interface, *address)) {
            tracing::debug!(%address, %error, "the kernel does not resolve an address");
        }
    }
    for (kind, body) in kernel.ask(NEIGHBOURS, LIST, &[0; NEIGHBOUR_HEAD])? {
        if let Some((of, hardware)) = entry(&body).filter(|_| kind == NEIGHBOUR)
            && let Some(known) = on_link.get_mut(&of)
        {
            *known = Seen::At(hardware);
        }
    }
    seen.extend(on_link.into_iter().map(|((_, address), seen)| (address, seen)));
    Ok(seen)
}

/// The interface on whose link an address is, or where it is else.
fn route(kernel: &mut Netlink, address: IpAddr) -> io::Result<Result<u32, Seen>> {
    let bytes = netlink::octets(address);
    let mut body = vec![0; ROUTE_HEAD];
    body[0] = netlink::family(address);
    body[1] = u8::try_from(bytes.len() * 8).unwrap_or(u8::MAX);
    netlink::add(&mut body, DESTINATION, &bytes);
    let answer = match kernel.ask(ROUTES, 0, &body) {
        Ok(answer) => answer,
        // These are answers about the address; of a socket they would be others.
        Err(error) if error.raw_os_error().is_some() && error.kind() != io::ErrorKind::PermissionDenied => {
            return Ok(Err(Seen::OffLink));
        }
        Err(error) => return Err(error),
    };
    let found = answer.into_iter().find(|(kind, _)| *kind == ROUTE);
    Ok(found.map_or(Err(Seen::OffLink), |(_, body)| where_to(&body)))
}

fn where_to(body: &[u8]) -> Result<u32, Seen> {
    let attributes = body.get(ROUTE_HEAD..).unwrap_or_default();
    let is_direct = attribute(attributes, GATEWAY).or_else(|| attribute(attributes, VIA)).is_none();
    let interface = attribute(attributes, INTERFACE).and_then(|value| u32_at(value, 0));
    match (body.get(7), interface) {
        (Some(&LOCAL), _) => Err(Seen::Own),
        (Some(&UNICAST), Some(interface)) if is_direct => Ok(interface),
        _ => Err(Seen::OffLink),
    }
}

/// A request that the kernel ask who has an address.
fn neighbour(interface: u32, address: IpAddr) -> Vec<u8> {
    let mut body = vec![netlink::family(address), 0, 0, 0];
    body.extend(interface.to_ne_bytes());
    body.extend([0, 0, USE, 0]);
    netlink::add(&mut body, OF, &netlink::octets(address));
    body
}

/// An entry of the table that packets are sent by: interface and address, and the hardware address.
fn entry(body: &[u8]) -> Option<((u32, IpAddr), String)> {
    let (interface, state) = (u32_at(body, 4)?, u16_at(body, 8)?);
    let attributes = body.get(NEIGHBOUR_HEAD..)?;
    let address = ip(attribute(attributes, OF)?)?;
    let hardware = attribute(attributes, HARDWARE).filter(|_| state & VALID != 0)?;
    let hardware: Vec<_> = hardware.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(((interface, address), hardware.join(":")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_is_at_its_own_addresses() {
        let addresses = ["127.0.0.1", "127.9.9.9", "::1"].map(|text| text.parse().unwrap()).into();
        let seen = look(&addresses).unwrap();
        assert_eq!(seen.len(), 3);
        assert!(seen.values().all(|one| *one == Seen::Own), "{seen:?}");
    }

    #[test]
    fn only_entries_that_packets_are_sent_by_count() {
        let body = |state: u16| {
            let mut body = vec![2, 0, 0, 0];
            body.extend(7_u32.to_ne_bytes());
            body.extend(state.to_ne_bytes());
            body.extend([0, 0]);
            netlink::add(&mut body, OF, &[192, 0, 2, 1]);
            netlink::add(&mut body, HARDWARE, &[0x52, 0x54, 0, 0, 0, 0xa]);
            body
        };
        let of = (7, "192.0.2.1".parse().unwrap());
        assert_eq!(entry(&body(0x04)), Some((of, "52:54:00:00:00:0a".to_owned())));
        for state in [0, 0x01, 0x20, 0x40] {
            assert_eq!(entry(&body(state)), None, "{state:#x}");
        }
        assert_eq!(entry(&body(0x04)[..11]), None);
    }

    #[test]
    fn a_route_says_where_an_address_is() {
        let body = |kind: u8, more: &[(u16, &[u8])]| {
            let mut body = vec![2, 32, 0, 0, 0, 0, 0, kind, 0, 0, 0, 0];
            netlink::add(&mut body, INTERFACE, &7_u32.to_ne_bytes());
            for (kind, value) in more {
                netlink::add(&mut body, *kind, value);
            }
            body
        };
        assert_eq!(where_to(&body(UNICAST, &[])), Ok(7));
        assert_eq!(where_to(&body(LOCAL, &[])), Err(Seen::Own));
        for (kind, more) in [(UNICAST, GATEWAY), (UNICAST, VIA), (6, 0), (3, 0)] {
            assert_eq!(where_to(&body(kind, &[(more, &[192, 0, 2, 1])])), Err(Seen::OffLink));
        }
        assert_eq!(where_to(&[]), Err(Seen::OffLink));
    }
}
