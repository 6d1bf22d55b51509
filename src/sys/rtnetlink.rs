//! Query for all links of the network namespace of this process with all their addresses, by rtnetlink(7).
//!
//! `getifaddrs(3)` makes the same query, but 4 KiB at a time, and does not return all counters.

pub mod message;

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, socket,
};

use message::{Answer, Wrong};

/// More than the kernel puts into one datagram (32 KiB), unless one link alone is larger.
const BUFFER: usize = 64 << 10;

/// Maximum number of queries, repeated when something changes meanwhile.
const ATTEMPTS: usize = 3;

/// Returns all links and all addresses. On a machine whose links change continually, some of them may be
/// missing.
///
/// # Errors
/// The errors of socket(2), connect(2), send(2) and recv(2); `InvalidData` for a malformed answer.
pub fn links_and_addresses() -> io::Result<Answer> {
    let mut buffer = vec![0; BUFFER];
    let mut answer = attempt(&mut buffer)?;
    for _ in 1..ATTEMPTS {
        if answer.is_whole() {
            break;
        }
        answer = attempt(&mut buffer)?;
    }
    Ok(answer)
}

fn attempt(buffer: &mut Vec<u8>) -> io::Result<Answer> {
    let socket =
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    // Connected to the kernel, so that no other process can send to it.
    connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    let mut answer = Answer::default();
    for (sequence, request) in [(1, message::links_request(1)), (2, message::addresses_request(2))] {
        send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
        while !receive(&socket, buffer, sequence, &mut answer)? {}
    }
    Ok(answer)
}

/// Takes one datagram; true once it was the last one.
fn receive(socket: &OwnedFd, buffer: &mut Vec<u8>, sequence: u32, answer: &mut Answer) -> io::Result<bool> {
    // The kernel writes the next datagram before the call that takes one returns, so there is nothing to wait for.
    // With MSG_TRUNC the call says how long it is, even if the buffer is shorter.
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
    let length = match recv(socket.as_raw_fd(), buffer, flags) {
        Err(Errno::EINTR) => return Ok(false),
        received => received?,
    };
    let Some(datagram) = buffer.get(..length) else {
        // This message is lost; the buffer is large enough for it at the next attempt.
        buffer.resize(length, 0);
        answer.interrupted = true;
        return Ok(false);
    };
    answer.take(datagram, sequence).map_err(|wrong| match wrong {
        Wrong::Refused(errno) => io::Error::from_raw_os_error(errno),
        Wrong::Malformed => io::Error::new(io::ErrorKind::InvalidData, wrong),
    })
}
