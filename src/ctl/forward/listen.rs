//! Where guestctl listens for what it forwards.

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
/// How long accepting rests when this process, or the system, has no room for another connection.
const REST: Duration = Duration::from_millis(500);

/// All of them. Those that are paths are removed when this is dropped, if they are still its own.
pub struct Listeners {
    all: Vec<Listener>,
    /// Where the next client is looked for first, so that none is kept waiting by others.
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
    /// Listens as `specs` say, at `usual` where they name no address.
    ///
    /// # Errors
    /// If one of them cannot be listened at.
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

    /// Where it is listened, and for what.
    pub fn all(&self) -> impl Iterator<Item = (String, &Target)> {
        self.all.iter().map(|one| {
            let place = match &one.socket {
                Bound::Tcp(listener) => listener.local_addr().map(|address| address.to_string()),
                Bound::Unix(listener) => Ok(listener.path().display().to_string()),
            };
            (place.unwrap_or_default(), &one.target)
        })
    }

    /// The next client, and what it is for.
    ///
    /// # Errors
    /// If there was no room for it: it waits, and so do others.
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
                    // That one has gone already.
                    Poll::Ready(Err(error)) if !has_no_room(&error) => {
                        tracing::debug!("a client is gone before it is accepted: {error}");
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

/// Whether a client was not accepted because something is used up. Everything else is about that one client.
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
