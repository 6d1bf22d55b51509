//! Messages of rtnetlink(7), pure: requests for all links and all addresses, and what the kernel answers.

use std::collections::HashSet;
use std::net::IpAddr;

use nix::libc;

/// Size of `struct nlmsghdr`.
const HEAD: usize = 16;
/// Size of `struct ifinfomsg`.
const LINK_HEAD: usize = 16;
/// Size of `struct ifaddrmsg`.
const ADDRESS_HEAD: usize = 8;
/// Size of `struct rtattr`.
const ATTRIBUTE_HEAD: usize = 4;

const ERROR: u16 = small(libc::NLMSG_ERROR);
const DONE: u16 = small(libc::NLMSG_DONE);
const OVERRUN: u16 = small(libc::NLMSG_OVERRUN);

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "what fields of 16 bits hold")]
const fn small(constant: i32) -> u16 {
    constant as u16
}

/// A link of the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// The kernel's number of it.
    pub index: u32,
    /// Interface name, such as `eth0`.
    pub name: String,
    /// Flags `IFF_*` of netdevice(7).
    pub flags: u32,
    /// The link-layer address: six bytes for Ethernet, none for a tunnel without one.
    pub address: Vec<u8>,
    /// Reported since Linux 2.6.35.
    pub statistics: Option<Statistics>,
}

/// Counters of a link since it is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Received bytes.
    pub receive_bytes: u64,
    /// Received packets.
    pub receive_packets: u64,
    /// Packets that were received with errors.
    pub receive_errors: u64,
    /// Packets dropped on receipt, those that the device missed among them (as /proc/net/dev counts them).
    pub receive_dropped: u64,
    /// Transmitted bytes.
    pub transmit_bytes: u64,
    /// Transmitted packets.
    pub transmit_packets: u64,
    /// Packets that could not be sent.
    pub transmit_errors: u64,
    /// Packets dropped before they were sent.
    pub transmit_dropped: u64,
}

/// An IP address of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Index of the link.
    pub link: u32,
    /// Label, for IPv4 addresses only: the link's name, or one that was set, such as `eth0:1`.
    pub label: Option<String>,
    /// Local address.
    pub ip: IpAddr,
    /// Prefix length: 0–32 or 0–128.
    pub prefix: u8,
}

/// Reason why an answer cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// The kernel refused, with this errno.
    #[error("the kernel refuses to list the network's links")]
    Refused(i32),
    /// Truncated answer, or one that violates the protocol.
    #[error("the kernel's list of the network's links is malformed")]
    Malformed,
}

/// Links and addresses that were received so far.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Links in the kernel's order.
    pub links: Vec<Link>,
    /// Addresses in the kernel's order.
    pub addresses: Vec<Address>,
    /// True if something changed meanwhile, so that entries may be missing.
    pub interrupted: bool,
}

/// Requests all links; the answer has the same `sequence`.
pub fn links_request(sequence: u32) -> Vec<u8> {
    // Without the counters of IPv6, which are longer than all the rest.
    const LEAVE_OUT: u32 = libc::RTEXT_FILTER_SKIP_STATS.cast_unsigned();
    let mut body = vec![0; LINK_HEAD];
    body.extend_from_slice(&8_u16.to_ne_bytes());
    body.extend_from_slice(&libc::IFLA_EXT_MASK.to_ne_bytes());
    body.extend_from_slice(&LEAVE_OUT.to_ne_bytes());
    request(libc::RTM_GETLINK, sequence, &body)
}

/// Requests all addresses of all families.
pub fn addresses_request(sequence: u32) -> Vec<u8> {
    request(libc::RTM_GETADDR, sequence, &[0; ADDRESS_HEAD])
}

fn request(kind: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
    const FLAGS: u16 = small(libc::NLM_F_REQUEST | libc::NLM_F_DUMP);
    #[allow(clippy::cast_possible_truncation, reason = "some tens of bytes")]
    let length = (HEAD + body.len()) as u32;
    let mut message = Vec::with_capacity(HEAD + body.len());
    message.extend_from_slice(&length.to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&FLAGS.to_ne_bytes());
    message.extend_from_slice(&sequence.to_ne_bytes());
    message.extend_from_slice(&0_u32.to_ne_bytes());
    message.extend_from_slice(body);
    message
}

impl Answer {
    /// Takes one datagram, which is one message or several; true once it was the last one. What answers another
    /// request is passed over.
    ///
    /// # Errors
    /// [`Wrong`]
    pub fn take(&mut self, datagram: &[u8], sequence: u32) -> Result<bool, Wrong> {
        let mut rest = datagram;
        while !rest.is_empty() {
            let length = u32_at(rest, 0).ok_or(Wrong::Malformed)? as usize;
            let message = rest.get(..length).ok_or(Wrong::Malformed)?;
            let body = message.get(HEAD..).ok_or(Wrong::Malformed)?;
            rest = rest.get(aligned(length)..).unwrap_or_default();
            if u32_at(message, 8) == Some(sequence) && self.add(message, body)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn add(&mut self, message: &[u8], body: &[u8]) -> Result<bool, Wrong> {
        const INTERRUPTED: u16 = small(libc::NLM_F_DUMP_INTR);
        let kind = u16_at(message, 4).ok_or(Wrong::Malformed)?;
        self.interrupted |= u16_at(message, 6).is_some_and(|flags| flags & INTERRUPTED != 0);
        // The end of a list has an errno as well, and old kernels leave it out.
        let refused = u32_at(body, 0).map_or(0, |code| code.cast_signed().saturating_neg());
        match kind {
            libc::RTM_NEWLINK => self.links.extend(link(body)),
            libc::RTM_NEWADDR => self.addresses.extend(address(body)),
            ERROR | DONE if refused > 0 => return Err(Wrong::Refused(refused)),
            DONE => return Ok(true),
            ERROR => return Err(Wrong::Malformed),
            OVERRUN => self.interrupted = true,
            _ => {}
        }
        Ok(false)
    }

    /// Returns whether the lists are consistent: nothing changed meanwhile, and each address belongs to a known
    /// link.
    pub fn is_whole(&self) -> bool {
        let known: HashSet<u32> = self.links.iter().map(|link| link.index).collect();
        !self.interrupted && self.addresses.iter().all(|address| known.contains(&address.link))
    }
}

/// Parses a link; `None` if it has no name.
fn link(body: &[u8]) -> Option<Link> {
    let mut link = Link {
        index: u32_at(body, 4)?,
        name: String::new(),
        flags: u32_at(body, 8)?,
        address: Vec::new(),
        statistics: None,
    };
    for (kind, value) in attributes(body.get(LINK_HEAD..)?) {
        match kind {
            libc::IFLA_IFNAME => link.name = text(value),
            libc::IFLA_ADDRESS => link.address = value.to_vec(),
            libc::IFLA_STATS64 => link.statistics = statistics(value),
            _ => {}
        }
    }
    (!link.name.is_empty()).then_some(link)
}

/// Parses `struct rtnl_link_stats64`.
fn statistics(value: &[u8]) -> Option<Statistics> {
    let counter = |place: usize| {
        let bytes = value.get(place * 8..)?.first_chunk()?;
        Some(u64::from_ne_bytes(*bytes))
    };
    Some(Statistics {
        receive_packets: counter(0)?,
        transmit_packets: counter(1)?,
        receive_bytes: counter(2)?,
        transmit_bytes: counter(3)?,
        receive_errors: counter(4)?,
        transmit_errors: counter(5)?,
        receive_dropped: counter(6)?.wrapping_add(counter(15)?),
        transmit_dropped: counter(7)?,
    })
}

/// Parses an address; `None` if it is not an IP address.
fn address(body: &[u8]) -> Option<Address> {
    let (family, prefix) = (*body.first()?, *body.get(1)?);
    let mut label = None;
    let mut near = None;
    let mut far = None;
    for (kind, value) in attributes(body.get(ADDRESS_HEAD..)?) {
        match kind {
            libc::IFA_LOCAL => near = ip(family, value),
            // On a point-to-point link that of the other side; elsewhere the same, or the only one.
            libc::IFA_ADDRESS => far = ip(family, value),
            libc::IFA_LABEL => label = Some(text(value)).filter(|label| !label.is_empty()),
            _ => {}
        }
    }
    let ip = near.or(far)?;
    let most = if ip.is_ipv4() { 32 } else { 128 };
    Some(Address { link: u32_at(body, 4)?, label, ip, prefix: prefix.min(most) })
}

fn ip(family: u8, value: &[u8]) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => <[u8; 4]>::try_from(value).ok().map(IpAddr::from),
        libc::AF_INET6 => <[u8; 16]>::try_from(value).ok().map(IpAddr::from),
        _ => None,
    }
}

/// Attributes with their kinds, up to one that is malformed.
fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    // The upper bits say how the value is written.
    const KIND: u16 = 0x3fff;
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(rest, 0)?);
        let value = rest.get(ATTRIBUTE_HEAD..length)?;
        let kind = u16_at(rest, 2)? & KIND;
        rest = rest.get(aligned(length)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Up to its end, or a NUL.
fn text(value: &[u8]) -> String {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

fn u16_at(bytes: &[u8], place: usize) -> Option<u16> {
    bytes.get(place..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

fn u32_at(bytes: &[u8], place: usize) -> Option<u32> {
    bytes.get(place..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
