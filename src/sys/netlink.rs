//! Questions to the kernel by netlink(7), and all that it answers to each.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, socket,
};

/// netlink(7): a request that is acknowledged, one for a list, and one that makes what is not there.
const REQUEST: u16 = 0x1;
const ACKNOWLEDGE: u16 = 0x4;
pub const LIST: u16 = 0x300;
pub const CREATE: u16 = 0x400;
/// `NLMSG_ERROR`, which is the acknowledgement as well, and `NLMSG_DONE`, the end of a list.
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Size of `struct nlmsghdr`.
const HEAD: usize = 16;
/// More than the kernel puts into one datagram.
const BUFFER: usize = 64 << 10;

/// A socket that is connected to the kernel.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

/// Message of the kernel: its type, and the bytes after its header.
pub type Message = (u16, Vec<u8>);

impl Netlink {
    /// Opens one for a part of the kernel.
    ///
    /// # Errors
    /// As socket(2) and connect(2) give them.
    pub fn open(part: SockProtocol) -> io::Result<Self> {
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, part)?;
        // Connected to the kernel, so that no other process can send to it.
        connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self { socket, buffer: vec![0; BUFFER] })
    }

    /// Sends a request, and returns all messages of the answer.
    ///
    /// # Errors
    /// The errno with which the kernel refuses the request; `InvalidData` for a malformed answer.
    pub fn ask(&mut self, kind: u16, flags: u16, body: &[u8]) -> io::Result<Vec<Message>> {
        let length = u32::try_from(HEAD + body.len()).unwrap_or(u32::MAX);
        let mut request = length.to_ne_bytes().to_vec();
        let acknowledged = if flags & LIST == LIST { 0 } else { ACKNOWLEDGE };
        request.extend(kind.to_ne_bytes());
        request.extend((REQUEST | acknowledged | flags).to_ne_bytes());
        // The sequence number and the port: one request is under way at a time.
        request.extend([0; 8]);
        request.extend(body);
        send(self.socket.as_raw_fd(), &request, MsgFlags::empty())?;
        let mut all = Vec::new();
        while !self.receive(&mut all)? {}
        Ok(all)
    }

    /// Takes one datagram; true once it was the last one.
    fn receive(&mut self, all: &mut Vec<Message>) -> io::Result<bool> {
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is malformed");
        // The kernel has written the next datagram before the call that takes one, or sends, returns.
        let length = match recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT) {
            Err(Errno::EINTR) => return Ok(false),
            received => received?,
        };
        let mut rest = self.buffer.get(..length).ok_or_else(malformed)?;
        while !rest.is_empty() {
            let length = u32_at(rest, 0).and_then(|length| usize::try_from(length).ok());
            let message = rest.get(..length.ok_or_else(malformed)?).ok_or_else(malformed)?;
            let (kind, body) = (u16_at(message, 4), message.get(HEAD..));
            let (kind, body) = kind.zip(body).ok_or_else(malformed)?;
            match kind {
                ERROR | DONE => {
                    // The end of a list has an errno as well, and old kernels leave it out.
                    let errno = u32_at(body, 0).map_or(0, u32::cast_signed);
                    return if errno == 0 { Ok(true) } else { Err(io::Error::from_raw_os_error(-errno)) };
                }
                _ => all.push((kind, body.to_vec())),
            }
            rest = rest.get(message.len().next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(false)
    }
}

/// Attributes with their kinds, up to one that is malformed.
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    // The upper bits say how the value is written.
    const KIND: u16 = 0x3fff;
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(rest, 0)?);
        let value = rest.get(4..length)?;
        let kind = u16_at(rest, 2)? & KIND;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of the first attribute of a kind.
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(of, _)| *of == kind).map(|(_, value)| value)
}

/// Appends an attribute, padded to four bytes.
pub fn add(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

/// An address as attributes have it.
pub fn ip(value: &[u8]) -> Option<IpAddr> {
    let four = <[u8; 4]>::try_from(value).ok().map(IpAddr::from);
    four.or_else(|| <[u8; 16]>::try_from(value).ok().map(IpAddr::from))
}

/// The bytes of an address.
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// Returns the number of `AF_INET` or `AF_INET6` for an address.
pub fn family(address: IpAddr) -> u8 {
    if address.is_ipv4() { 2 } else { 10 }
}

/// Two bytes as this machine orders them.
pub fn u16_at(bytes: &[u8], place: usize) -> Option<u16> {
    bytes.get(place..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

/// Four bytes as this machine orders them.
pub fn u32_at(bytes: &[u8], place: usize) -> Option<u32> {
    bytes.get(place..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_they_are_written() {
        let mut body = Vec::new();
        add(&mut body, 1, &[192, 0, 2, 1]);
        add(&mut body, 0x8002, b"abc");
        add(&mut body, 3, &[]);
        assert_eq!(body.len() % 4, 0);
        let found: Vec<_> = attributes(&body).collect();
        assert_eq!(found, [(1, &[192, 0, 2, 1][..]), (2, b"abc"), (3, b"")]);
        assert_eq!(attribute(&body, 1).and_then(ip), Some("192.0.2.1".parse().unwrap()));
        assert_eq!(attributes(&[9, 0, 1, 0, 7]).next(), None, "it is cut off");
        assert_eq!(attributes(&[0, 0, 1, 0]).next(), None);
    }
}
