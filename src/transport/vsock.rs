//! The guest's listener on virtio-vsock, vsock(7), and who may connect to it.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::socket::{VsockAddr, getsockname};
use tokio_vsock::{VMADDR_CID_ANY, VsockListener, VsockStream};

/// The first source port that needs no privilege to take.
const FIRST_UNPRIVILEGED_PORT: u32 = 1024;

/// Peers that may connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guard {
    /// The context identifier of the host.
    pub peer_cid: u32,
    /// Let in any source port. For hybrid vsock, where the host's end is a unix socket whose mode is the
    /// guard, and for QGA, whose clients know nothing of source ports; with the kernel's vhost-vsock it lets every
    /// user of the host in.
    pub any_port: bool,
}

impl Guard {
    /// Returns why a peer with this context identifier is refused in any case; `None` if it may be accepted.
    pub fn refusal(self, cid: u32) -> Option<String> {
        if cid != self.peer_cid {
            return Some(format!("only connections from the context {} are accepted", self.peer_cid));
        }
        None
    }

    /// Returns why a peer with this source port must authenticate; `None` if it need not.
    pub fn plain_refusal(self, port: u32) -> Option<String> {
        (port >= FIRST_UNPRIVILEGED_PORT && !self.any_port).then(|| {
            format!(
                "its source port is not below {FIRST_UNPRIVILEGED_PORT}; if the hypervisor has hybrid vsock, set vsock.hybrid = true"
            )
        })
    }
}

/// The port of a vsock socket; `None` for a socket of another kind.
pub fn port(socket: &OwnedFd) -> Option<u32> {
    getsockname::<VsockAddr>(socket.as_raw_fd()).ok().map(|address| address.port())
}

/// A listener that lets in only whom its guard allows.
#[derive(Debug)]
pub struct Listener {
    inner: VsockListener,
    guard: Guard,
}

impl Listener {
    /// Listens on `port` of every context identifier that this guest has now or gets later.
    ///
    /// # Errors
    /// If the kernel has no vsock, or the port is taken.
    pub fn bind(port: u32, guard: Guard) -> io::Result<Self> {
        Self::bind_at(VMADDR_CID_ANY, port, guard)
    }

    /// Listens on `port` of the context identifier `cid` of this guest.
    ///
    /// # Errors
    /// As [`Listener::bind`], or if this guest has another one.
    pub fn bind_at(cid: u32, port: u32, guard: Guard) -> io::Result<Self> {
        let inner = VsockListener::bind(VsockAddr::new(cid, port))?;
        Ok(Self { inner, guard })
    }

    /// Takes over a vsock socket that listens already, see [`port`].
    pub fn adopt(socket: OwnedFd, guard: Guard) -> Self {
        Self { inner: VsockListener::from(socket), guard }
    }

    /// Waits for the next peer. Returns its name for the log, and its stream or the reason why it is refused (it
    /// is closed then). The stream comes with the reason why the peer must authenticate, if it must.
    ///
    /// # Errors
    /// The errors of accept(2).
    pub async fn accept(&self) -> io::Result<(String, Result<(VsockStream, Option<String>), String>)> {
        let (stream, peer) = self.inner.accept().await?;
        let name = format!("vsock {}:{}", peer.cid(), peer.port());
        let plain_refusal = self.guard.plain_refusal(peer.port());
        Ok((name, self.guard.refusal(peer.cid()).map_or(Ok((stream, plain_refusal)), Err)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_hosts_privileged_ports_are_let_in() {
        let guard = Guard { peer_cid: 2, any_port: false };
        let hybrid = Guard { peer_cid: 2, any_port: true };
        let cases = [
            ("the host, privileged", guard, 2, 1023, true),
            ("the host, unprivileged", guard, 2, 1024, false),
            ("hybrid", hybrid, 2, 1 << 30, true),
            ("this guest itself", guard, 1, 1023, false),
            ("another guest", guard, 3, 1023, false),
            ("this guest itself, hybrid", hybrid, 1, 1023, false),
        ];
        for (name, guard, cid, port, welcome) in cases {
            let refusal = guard.refusal(cid).or_else(|| guard.plain_refusal(port));
            assert_eq!(refusal.is_none(), welcome, "{name}");
        }
    }
}
