//! Sockets on which guestctl accepts clients to forward.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use nix::libc;
use tokio::net::{TcpListener, TcpSocket};
use tokio::time::Sleep;

use super::spec::{Listen, Spec};
use crate::ctl::Error;
use crate::sys::socket::Socket;
use crate::text::target::Target;
use crate::transport::unix;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// Pause in accepting when this process, or the system, has no resources for another connection.
const REST: Duration = Duration::from_millis(500);

/// All listening sockets. Paths are removed on drop if they still belong to these sockets.
pub struct Listeners {
    all: Vec<Listener>,
    /// Index of the listener that is polled first, so that no listener starves the others.
    next: usize,
    rest: Option<Pin<Box<Sleep>>>,
}

struct Listener {
    socket: Bound,
    target: Target,
}

enum Bound {
    Tcp(TcpListener),
    Unix(unix::Listener),
}

impl Listeners {
    /// Listens as `specs` require, at `usual` where they name no address.
    ///
    /// # Errors
    /// Fails if one of them cannot be bound.
    pub fn bind(specs: Vec<Spec>, usual: IpAddr) -> Result<Self, Error> {
        let all = specs.into_iter().map(|spec| {
            let Some(listen) = spec.listen else {
                let words = format!("specify where to listen for {0}, as in 8080:{0}", spec.target);
                return Err(Error::Program(words));
            };
            let socket = match &listen {
                Listen::Port(port) => tcp(SocketAddr::new(usual, *port)),
                Listen::Address(address) => tcp(*address),
                Listen::Path(path) => {
                    let bound = unix::Listener::bind(path);
                    bound
                        .map(Bound::Unix)
                        .map_err(|error| Error::Program(crate::sys::error_chain::words(&error)))
                }
            };
            Ok(Listener { socket: socket?, target: spec.target })
        });
        Ok(Self { all: all.collect::<Result<_, _>>()?, next: 0, rest: None })
    }

    /// Returns the addresses of the listeners, with their targets.
    pub fn all(&self) -> impl Iterator<Item = (String, &Target)> {
        self.all.iter().map(|one| {
            let place = match &one.socket {
                Bound::Tcp(listener) => listener.local_addr().map(|address| address.to_string()),
                Bound::Unix(listener) => Ok(listener.path().display().to_string()),
            };
            (place.unwrap_or_default(), &one.target)
        })
    }

    /// Waits for the next client; returns it with its target.
    ///
    /// # Errors
    /// Fails if there were no resources for it; it keeps waiting, and so do others.
    pub async fn next(&mut self) -> io::Result<(Socket, Target)> {
        std::future::poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<io::Result<(Socket, Target)>> {
        if let Some(rest) = &mut self.rest {
            std::task::ready!(rest.as_mut().poll(context));
            self.rest = None;
        }
        for turn in 0..self.all.len() {
            let at = (self.next + turn) % self.all.len();
            let Some(listener) = self.all.get(at) else { continue };
            let accepted = loop {
                match listener.socket.poll(context) {
                    // This client has already disconnected.
                    Poll::Ready(Err(error)) if !has_no_room(&error) => {
                        tracing::debug!("a client disconnected before it was accepted: {error}");
                    }
                    other => break other,
                }
            };
            match accepted {
                Poll::Pending => {}
                Poll::Ready(Ok(socket)) => {
                    self.next = at + 1;
                    return Poll::Ready(Ok((socket, listener.target.clone())));
                }
                Poll::Ready(Err(error)) => {
                    self.rest = Some(Box::pin(tokio::time::sleep(REST)));
                    return Poll::Ready(Err(error));
                }
            }
        }
        Poll::Pending
    }
}

impl Bound {
    fn poll(&self, context: &mut Context<'_>) -> Poll<io::Result<Socket>> {
        match self {
            Self::Tcp(listener) => listener.poll_accept(context).map_ok(|(stream, _)| Socket::tcp(stream)),
            Self::Unix(listener) => listener.poll_accept(context).map_ok(Socket::Unix),
        }
    }
}

/// Returns whether a client could not be accepted because resources are exhausted. All other errors concern
/// that one client.
fn has_no_room(error: &io::Error) -> bool {
    let used_up = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| used_up.contains(&code))
}

fn tcp(address: SocketAddr) -> Result<Bound, Error> {
    let bind = || -> io::Result<TcpListener> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    bind().map(Bound::Tcp).map_err(|error| Error::Program(format!("cannot listen on {address}: {error}")))
}
