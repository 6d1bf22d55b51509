//! Connection tracking of the kernel (conntrack) for flows whose destination is rewritten. A flow keeps the
//! route of its first packet, whatever rules are set later, until its entry is deleted.

use std::io;
use std::net::IpAddr;

use nix::sys::socket::SockProtocol;

use super::netlink::{self, LIST, Netlink, attribute, ip};

/// `IPCTNL_MSG_CT_GET` and `IPCTNL_MSG_CT_DELETE` of `NFNL_SUBSYS_CTNETLINK`.
const GET: u16 = 0x101;
const DELETE: u16 = 0x102;
/// Size of `struct nfgenmsg`.
const HEAD: usize = 4;
/// `CTA_TUPLE_ORIG`, `CTA_ID` and `CTA_ZONE`.
const ORIGINAL: u16 = 1;
const ID: u16 = 12;
const ZONE: u16 = 18;
/// `CTA_TUPLE_IP` and `CTA_TUPLE_PROTO`, and what is in them: `CTA_IP_V4_DST`, `CTA_IP_V6_DST`, `CTA_PROTO_NUM` and
/// `CTA_PROTO_DST_PORT`.
const TUPLE_IP: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
const TO_V4: u16 = 2;
const TO_V6: u16 = 4;
const PROTOCOL: u16 = 1;
const TO_PORT: u16 = 3;
/// Flag `NLA_F_NESTED` of an attribute's type.
const NESTED: u16 = 0x8000;

/// Destination of the first packet of a flow: address, IP protocol number and port.
pub type Destination = (IpAddr, u8, u16);

/// Forgets flows of one family by where they were sent; returns how many.
///
/// # Errors
/// If the kernel does not list them, or does not forget one, for want of a privilege (`CAP_NET_ADMIN`) as well.
pub fn forget(is_ipv4: bool, is_meant: impl Fn(&Destination) -> bool) -> io::Result<usize> {
    let mut kernel = Netlink::open(SockProtocol::NetlinkNetFilter)?;
    let head = [if is_ipv4 { 2 } else { 10 }, 0, 0, 0];
    let mut count = 0;
    for (_, body) in kernel.ask(GET, LIST, &head)? {
        let Some(attributes) = body.get(HEAD..) else { continue };
        if body.first() != head.first() || !destination(attributes).is_some_and(|found| is_meant(&found)) {
            continue;
        }
        let mut request = head.to_vec();
        for (kind, flag) in [(ORIGINAL, NESTED), (ID, 0), (ZONE, 0)] {
            if let Some(value) = attribute(attributes, kind) {
                netlink::add(&mut request, kind | flag, value);
            }
        }
        match kernel.ask(DELETE, 0, &request) {
            Ok(_) => count += 1,
            // The flow has ended meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(count)
}

fn destination(attributes: &[u8]) -> Option<Destination> {
    let original = attribute(attributes, ORIGINAL)?;
    let (addresses, protocol) = (attribute(original, TUPLE_IP)?, attribute(original, TUPLE_PROTOCOL)?);
    let to = ip(attribute(addresses, TO_V4).or_else(|| attribute(addresses, TO_V6))?)?;
    let port = attribute(protocol, TO_PORT)?.first_chunk().map(|bytes| u16::from_be_bytes(*bytes))?;
    Some((to, *attribute(protocol, PROTOCOL)?.first()?, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_is_known_by_where_it_was_sent() {
        let mut addresses = Vec::new();
        netlink::add(&mut addresses, 1, &[203, 0, 113, 9]);
        netlink::add(&mut addresses, TO_V4, &[192, 0, 2, 1]);
        let mut protocol = Vec::new();
        netlink::add(&mut protocol, PROTOCOL, &[17]);
        netlink::add(&mut protocol, 2, &40_000_u16.to_be_bytes());
        netlink::add(&mut protocol, TO_PORT, &53_u16.to_be_bytes());
        let mut original = Vec::new();
        netlink::add(&mut original, TUPLE_IP | NESTED, &addresses);
        netlink::add(&mut original, TUPLE_PROTOCOL | NESTED, &protocol);
        let mut message = Vec::new();
        netlink::add(&mut message, ORIGINAL | NESTED, &original);
        assert_eq!(destination(&message), Some(("192.0.2.1".parse().unwrap(), 17, 53)));
        assert_eq!(destination(&message[..20]), None);
        assert_eq!(destination(&[]), None);
    }
}
