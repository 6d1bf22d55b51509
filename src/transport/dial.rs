//! Dialers: how the host half reaches an agent.
//!
//! A [`Dial`] gives a [`BoxStream`] and is what people see. [`Target`] is the one for agents that this host reaches by itself;
//! to add a kind of these: a variant of it, its `Display`, and its arm where it is dialled. Whoever reaches agents otherwise
//! has a [`Dial`] of its own.

use std::any::Any;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, VsockAddr, bind, connect, getsockopt, socket, sockopt,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio_vsock::{VMADDR_CID_ANY, VsockStream};

use crate::sys::descriptor::watch_writable;
use crate::transport::BoxStream;
use crate::wire::hybrid;

/// Greatest port that only root may bind, on vsock as on TCP. Agents do not answer peers with a higher one.
const LAST_PRIVILEGED_PORT: u32 = 1023;

/// Port of the agent. This host may itself be a guest, and the socket unit of its own agent needs the port.
const AGENT_PORT: u32 = 970;

/// Address of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// Vsock address (`AF_VSOCK`).
    Vsock {
        /// Context identifier of the guest.
        cid: u32,
        /// Port of the agent.
        port: u32,
    },
    /// Hybrid vsock: a unix socket that takes `CONNECT <port>`.
    Hybrid {
        /// Path of the socket.
        path: PathBuf,
        /// Port of the agent.
        port: u32,
    },
    /// A unix socket that leads straight to an agent.
    Unix {
        /// Path of the socket.
        path: PathBuf,
    },
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vsock { cid, port } => write!(formatter, "vsock:{cid}:{port}"),
            Self::Hybrid { path, port } => write!(formatter, "hybrid:{}:{port}", path.display()),
            Self::Unix { path } => write!(formatter, "unix:{}", path.display()),
        }
    }
}

impl Dial for Target {
    fn dial(&self, source: Source) -> Dialing<'_> {
        match self {
            Self::Vsock { cid, port } => Box::pin(vsock(*cid, *port, source)),
            Self::Hybrid { path, port } => Box::pin(hybrid(path, *port)),
            Self::Unix { path } => Box::pin(async { Ok(Box::new(unix(path).await?) as BoxStream) }),
        }
    }

    fn is_same(&self, other: &dyn Dial) -> bool {
        (other as &dyn Any).downcast_ref() == Some(self)
    }
}

/// Reason why there is no stream to an agent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Missing socket file.
    #[error("there is no socket {0}")]
    Missing(PathBuf),
    /// Socket file that no process listens on.
    #[error("no process listens on the socket {0}")]
    Refused(PathBuf),
    /// The hypervisor closed the stream instead of answering CONNECT, or the guest refused.
    #[error("nothing listens in the guest")]
    NobodyListens,
    /// No guest has this CID now.
    #[error("no guest has the CID {0}")]
    NoSuchCid(u32),
    /// Agents answer only to privileged ports, and this process may not bind one.
    #[error("a vsock port below 1024 cannot be bound; this needs root or CAP_NET_BIND_SERVICE")]
    Unprivileged,
    /// Each connection to a guest needs a privileged port of its own.
    #[error("every vsock port below 1024 is in use")]
    NoPortLeft,
    /// The answer to CONNECT makes no sense.
    #[error("the hypervisor's vsock socket does not speak hybrid vsock")]
    Hybrid(#[from] hybrid::AnswerError),
    /// Deadline that passed.
    #[error("no answer within {} s", .0.as_secs_f32())]
    Timeout(Duration),
    /// Endpoint that does not exist yet and may appear; in the words of the dialler.
    #[error("{0}")]
    NotYet(String),
    /// VM whose configuration has no channel to an agent; in the words of the dialler.
    #[error("{why}")]
    NoWay {
        /// Device or setting that is missing.
        why: String,
        /// Action that would fix it.
        remedy: String,
        /// True if the owner of the VM has chosen this, so that it is not a fault.
        is_meant: bool,
    },
    /// Any other error.
    #[error("cannot be reached")]
    Io(#[from] io::Error),
}

/// Port that an `AF_VSOCK` stream originates from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Port below 1024, which shows an agent without keys that the dialling process was privileged. There are
    /// 1022.
    Privileged,
    /// Any: an agent with keys knows its host half by its key, and one without says that it has none.
    Any,
}

/// The future of [`Dial::dial`].
pub type Dialing<'a> = Pin<Box<dyn Future<Output = Result<BoxStream, Error>> + Send + 'a>>;

/// Makes streams to one agent. Its words say where that is, to people.
pub trait Dial: Any + fmt::Debug + fmt::Display + Send + Sync {
    /// Makes one more stream, from such a port where there are ports. Dropping the future gives up. There is no deadline: see
    /// [`within`].
    fn dial(&self, source: Source) -> Dialing<'_>;

    /// Returns whether the other dialler reaches the same endpoint in the same way, so that a session made through
    /// it can stay.
    fn is_same(&self, other: &dyn Dial) -> bool;
}

/// A [`Dial`] of some kind, which is shared and compared.
#[derive(Debug, Clone)]
pub struct Dialer(Arc<dyn Dial>);

impl<D: Dial> From<D> for Dialer {
    fn from(dial: D) -> Self {
        Self(Arc::new(dial))
    }
}

impl Deref for Dialer {
    type Target = dyn Dial;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl PartialEq for Dialer {
    fn eq(&self, other: &Self) -> bool {
        self.is_same(&**other)
    }
}

impl Eq for Dialer {}

impl fmt::Display for Dialer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// Dials with a deadline.
///
/// # Errors
/// If there is no stream when `deadline` has passed, or none can be had.
pub async fn within(dialer: &dyn Dial, source: Source, deadline: Duration) -> Result<BoxStream, Error> {
    tokio::time::timeout(deadline, dialer.dial(source)).await.unwrap_or(Err(Error::Timeout(deadline)))
}

async fn hybrid(path: &Path, port: u32) -> Result<BoxStream, Error> {
    let mut stream = unix(path).await?;
    stream.write_all(hybrid::request(port).as_bytes()).await.map_err(closed)?;
    let mut answer = hybrid::Answer::default();
    loop {
        let byte = stream.read_u8().await.map_err(closed)?;
        if answer.push(byte)?.is_some() {
            return Ok(Box::new(stream) as BoxStream);
        }
    }
}

/// The stream's end before the answer is how hybrid vsock says no.
fn closed(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            Error::NobodyListens
        }
        _ => Error::Io(error),
    }
}

async fn unix(path: &Path) -> Result<UnixStream, Error> {
    UnixStream::connect(path).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::Missing(path.to_owned()),
        io::ErrorKind::ConnectionRefused => Error::Refused(path.to_owned()),
        _ => Error::Io(error),
    })
}

async fn vsock(cid: u32, port: u32, source: Source) -> Result<BoxStream, Error> {
    VsockDial::begin(cid, port, source)?.finish().await
}

/// A stream over `AF_VSOCK` that comes about, in the network namespace in which it was begun.
#[derive(Debug)]
pub struct VsockDial {
    socket: OwnedFd,
    cid: u32,
    is_connected: bool,
}

impl VsockDial {
    /// Begins to connect, and does not wait.
    ///
    /// # Errors
    /// If there can be no stream.
    pub fn begin(cid: u32, port: u32, source: Source) -> Result<Self, Error> {
        let socket = match source {
            Source::Privileged => privileged_socket()?,
            // The kernel chooses a port when it connects.
            Source::Any => plain_socket()?,
        };
        match connect(socket.as_raw_fd(), &VsockAddr::new(cid, port)) {
            Ok(()) => Ok(Self { socket, cid, is_connected: true }),
            Err(Errno::EINPROGRESS | Errno::EAGAIN) => Ok(Self { socket, cid, is_connected: false }),
            Err(error) => Err(explain(cid, error)),
        }
    }

    /// Waits until it is connected.
    ///
    /// # Errors
    /// If it cannot be.
    pub async fn finish(self) -> Result<BoxStream, Error> {
        let Self { mut socket, cid, is_connected } = self;
        if !is_connected {
            let waiting = watch_writable(socket)?;
            drop(waiting.writable().await?);
            socket = waiting.into_inner();
            let error = getsockopt(&socket, sockopt::SocketError).map_err(io::Error::from)?;
            if error != 0 {
                return Err(explain(cid, Errno::from_raw(error)));
            }
        }
        Ok(Box::new(VsockStream::new(socket.into())?) as BoxStream)
    }
}

fn explain(cid: u32, error: Errno) -> Error {
    match error {
        Errno::ENODEV | Errno::ENETUNREACH | Errno::EHOSTUNREACH => Error::NoSuchCid(cid),
        Errno::ECONNRESET | Errno::ECONNREFUSED => Error::NobodyListens,
        error => Error::Io(error.into()),
    }
}

/// Ports that only root may bind and that no agent needs, from the greatest downwards.
fn source_ports() -> impl Iterator<Item = u32> {
    (1..=LAST_PRIVILEGED_PORT).rev().filter(|port| *port != AGENT_PORT)
}

fn plain_socket() -> Result<OwnedFd, Error> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    Ok(socket(AddressFamily::Vsock, SockType::Stream, flags, None).map_err(io::Error::from)?)
}

/// A socket that is bound to a port below 1024. Each connection holds one, so that a host half has at most 1022
/// connections with guests without keys over `AF_VSOCK` at a time.
fn privileged_socket() -> Result<OwnedFd, Error> {
    let socket = plain_socket()?;
    for port in source_ports() {
        match bind(socket.as_raw_fd(), &VsockAddr::new(VMADDR_CID_ANY, port)) {
            Ok(()) => return Ok(socket),
            Err(Errno::EADDRINUSE) => {}
            Err(Errno::EACCES | Errno::EPERM) => return Err(Error::Unprivileged),
            Err(error) => return Err(Error::Io(error.into())),
        }
    }
    Err(Error::NoPortLeft)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn targets_are_told_to_people() {
        let path = PathBuf::from("/run/a.sock");
        assert_eq!(Target::Vsock { cid: 3, port: 970 }.to_string(), "vsock:3:970");
        assert_eq!(Target::Hybrid { path: path.clone(), port: 970 }.to_string(), "hybrid:/run/a.sock:970");
        assert_eq!(Target::Unix { path }.to_string(), "unix:/run/a.sock");
    }

    #[test]
    fn only_what_reaches_the_same_is_the_same() {
        let dial = |port| Dialer::from(Target::Vsock { cid: 3, port });
        assert_eq!(dial(970), dial(970));
        assert_ne!(dial(970), dial(971));
    }

    #[test]
    fn source_ports_are_privileged_and_leave_out_that_of_agents() {
        let ports: Vec<_> = source_ports().collect();
        assert_eq!((ports.len(), ports[0], ports.last()), (1022, 1023, Some(&1)));
        assert!(!ports.contains(&970));
    }

    /// Answers one CONNECT with `answer` and returns what was asked and what followed.
    async fn hybrid_with(answer: &'static [u8]) -> (Result<BoxStream, Error>, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        let dialer = Target::Hybrid { path, port: 970 };
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = vec![0; b"CONNECT 970\n".len()];
            stream.read_exact(&mut asked).await.unwrap();
            stream.write_all(answer).await.unwrap();
            asked
        };
        tokio::join!(within(&dialer, Source::Privileged, SOON), serving)
    }

    #[tokio::test]
    async fn hybrid_vsock_leaves_the_guests_bytes_in_the_stream() {
        let (stream, asked) = hybrid_with(b"OK 5\nhello").await;
        assert_eq!(asked, b"CONNECT 970\n");
        let mut rest = String::new();
        stream.unwrap().read_to_string(&mut rest).await.unwrap();
        assert_eq!(rest, "hello");
    }

    #[tokio::test]
    async fn what_goes_wrong_is_told_apart() {
        let (closed, _) = hybrid_with(b"").await;
        assert!(matches!(closed.err(), Some(Error::NobodyListens)));
        let (garbage, _) = hybrid_with(b"HTTP/1.1 400\n").await;
        assert!(matches!(garbage.err(), Some(Error::Hybrid(_))));

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let dialer = Target::Unix { path: path.clone() };
        assert!(matches!(within(&dialer, Source::Privileged, SOON).await.err(), Some(Error::Missing(_))));
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(matches!(within(&dialer, Source::Privileged, SOON).await.err(), Some(Error::Refused(_))));
    }

    #[tokio::test]
    async fn a_silent_hypervisor_ends_at_the_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock");
        let _listener = UnixListener::bind(&path).unwrap();
        let dialer = Target::Hybrid { path, port: 970 };
        let error = within(&dialer, Source::Privileged, Duration::from_millis(20)).await.err().unwrap();
        assert_eq!(error.to_string(), "no answer within 0.02 s");
    }
}
