//! Change notifications of the kernel for network links and addresses, rtnetlink(7).
//!
//! The contents of a message are not read: the caller reads all links again, which also works after messages
//! were lost.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use nix::errno::Errno;
use nix::libc::{RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR, RTMGRP_LINK};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};
use tokio::io::Interest;

use crate::sys::descriptor::wait;

/// Messages that are taken in one go, so that a flood does not keep the event loop.
const AT_ONCE: usize = 4096;

/// A subscription to changes of links and addresses in the network namespace of this process.
#[derive(Debug)]
pub struct LinkNews(OwnedFd);

impl LinkNews {
    /// Subscribes to all changes from now on.
    ///
    /// # Errors
    /// The errors of socket(2) and bind(2).
    pub fn subscribe() -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        let groups = (RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR).cast_unsigned();
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups))?;
        Ok(Self(socket))
    }

    /// Waits for a change. All notifications up to then count as one change.
    ///
    /// # Errors
    /// The errors of recv(2).
    pub async fn changed(&self) -> io::Result<()> {
        while !self.has_changed()? {
            wait(self.0.as_fd(), Interest::READABLE).await?;
        }
        Ok(())
    }

    /// Returns whether there was a change since the last one that was reported.
    ///
    /// # Errors
    /// The errors of recv(2).
    pub fn has_changed(&self) -> io::Result<bool> {
        let mut changed = false;
        for _ in 0..AT_ONCE {
            // A message that is larger than the buffer is truncated, and the rest is discarded.
            match recv(self.0.as_raw_fd(), &mut [0; 1], MsgFlags::MSG_DONTWAIT) {
                // ENOBUFS: there were more messages than the socket holds.
                Ok(_) | Err(Errno::ENOBUFS) => changed = true,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(changed)
    }
}
