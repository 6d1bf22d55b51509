//! A listener whose kind was chosen by the settings.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::sys::socket::{
    AddressFamily, SockType, SockaddrLike as _, SockaddrStorage, getsockname, getsockopt, sockopt,
};

use crate::transport::{BoxStream, later, unix, vsock};

/// A peer that may say something.
pub struct Incoming {
    /// Stream of the client.
    pub stream: BoxStream,
    /// Reason why the client is accepted only if it authenticates; absent if a plain connection is allowed.
    pub plain_refusal: Option<String>,
}

impl Incoming {
    /// The stream of a peer that does not have to prove anything.
    ///
    /// # Errors
    /// Why it has to.
    pub fn plain(self) -> Result<BoxStream, String> {
        self.plain_refusal.map_or(Ok(self.stream), Err)
    }
}

/// Source of incoming streams.
#[derive(Debug)]
pub enum Listener {
    /// Listener on a vsock port.
    Vsock(vsock::Listener),
    /// Listener on a unix socket.
    Unix(unix::Listener),
    /// A vsock port, as soon as the kernel has vsock.
    Later(later::Listener),
    /// No source: no peer ever connects.
    Nothing,
}

impl Listener {
    /// Takes over a unix or vsock socket that listens already; on vsock `guard` says who is let in.
    ///
    /// # Errors
    /// If it is of another kind, or does not listen.
    pub fn adopt(socket: OwnedFd, guard: vsock::Guard) -> io::Result<Self> {
        let listens = getsockopt(&socket, sockopt::AcceptConn)?;
        if !listens || getsockopt(&socket, sockopt::SockType)? != SockType::Stream {
            return Err(io::Error::other("it is not a stream socket that listens"));
        }
        match getsockname::<SockaddrStorage>(socket.as_raw_fd())?.family() {
            Some(AddressFamily::Unix) => Ok(Self::Unix(unix::Listener::adopt(socket)?)),
            Some(AddressFamily::Vsock) => Ok(Self::Vsock(vsock::Listener::adopt(socket, guard))),
            _ => Err(io::Error::other("it is neither a unix nor a vsock socket")),
        }
    }

    /// Waits for the next peer, and returns its name for the log, and its stream or the reason why it is not
    /// accepted.
    ///
    /// # Errors
    /// The errors of accept(2).
    pub async fn accept(&self) -> io::Result<(String, Result<Incoming, String>)> {
        match self {
            Self::Vsock(listener) => from_vsock(listener).await,
            Self::Later(listener) => from_vsock(listener.listening().await?).await,
            Self::Unix(listener) => {
                let stream = listener.accept().await?;
                let path = listener.path().display();
                let name = match stream.peer_cred() {
                    Ok(peer) => format!("{path} (pid {}, uid {})", peer.pid().unwrap_or(0), peer.uid()),
                    Err(_) => path.to_string(),
                };
                Ok((name, Ok(Incoming { stream: Box::new(stream), plain_refusal: None })))
            }
            Self::Nothing => std::future::pending().await,
        }
    }
}

async fn from_vsock(listener: &vsock::Listener) -> io::Result<(String, Result<Incoming, String>)> {
    let (peer, stream) = listener.accept().await?;
    let incoming =
        |(stream, plain_refusal)| Incoming { stream: Box::new(stream) as BoxStream, plain_refusal };
    Ok((peer, stream.map(incoming)))
}
