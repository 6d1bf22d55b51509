//! Dialers: how the host half reaches an agent.
//!
//! Each kind is a [`Dial`] that gives a [`BoxStream`]; [`Target`] says which kind, and is what people see. To
//! add a kind: a variant of [`Target`], its `Display`, its dialer, and its arm in [`Target::dialer`].

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
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

/// The greatest port that only root may bind, on vsock as on TCP. Agents answer nobody above it.
const LAST_PRIVILEGED_PORT: u32 = 1023;

/// Those of an agent: this host may be a guest itself, whose own agent's socket unit needs them.
const AGENT_PORTS: [u32; 2] = [970, 971];

/// Where an agent is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// `AF_VSOCK`.
    Vsock {
        /// Context identifier of the guest.
        cid: u32,
        /// Port of the agent.
        port: u32,
    },
    /// Hybrid vsock: a unix socket that takes `CONNECT <port>`.
    Hybrid {
        /// The socket.
        path: PathBuf,
        /// Port of the agent.
        port: u32,
    },
    /// A unix socket that leads straight to an agent.
    Unix {
        /// The socket.
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

impl Target {
    /// What dials this target.
    pub fn dialer(&self) -> Box<dyn Dial> {
        match self.clone() {
            Self::Vsock { cid, port } => Box::new(Vsock { cid, port }),
            Self::Hybrid { path, port } => Box::new(Hybrid { path, port }),
            Self::Unix { path } => Box::new(Unix { path }),
        }
    }
}

/// Why there is no stream to an agent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such socket file.
    #[error("there is no socket {0}")]
    Missing(PathBuf),
    /// The socket file is there, and nobody serves it.
    #[error("nobody serves the socket {0}")]
    Refused(PathBuf),
    /// The hypervisor closed the stream instead of answering CONNECT, or the guest refused.
    #[error("nobody listens in the guest")]
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
    /// The deadline passed.
    #[error("no answer within {} s", .0.as_secs_f32())]
    Timeout(Duration),
    /// Anything else.
    #[error("cannot be reached")]
    Io(#[from] io::Error),
}

/// The future of [`Dial::dial`].
pub type Dialing<'a> = Pin<Box<dyn Future<Output = Result<BoxStream, Error>> + Send + 'a>>;

/// Makes streams to one agent.
pub trait Dial: Send + Sync {
    /// Makes one more stream. Dropping the future gives up. There is no deadline: see [`within`].
    fn dial(&self) -> Dialing<'_>;
}

/// Dials with a deadline.
///
/// # Errors
/// If there is no stream when `deadline` has passed, or none can be had.
pub async fn within(dialer: &dyn Dial, deadline: Duration) -> Result<BoxStream, Error> {
    tokio::time::timeout(deadline, dialer.dial()).await.unwrap_or(Err(Error::Timeout(deadline)))
}

struct Unix {
    path: PathBuf,
}

impl Dial for Unix {
    fn dial(&self) -> Dialing<'_> {
        Box::pin(async { Ok(Box::new(unix(&self.path).await?) as BoxStream) })
    }
}

struct Hybrid {
    path: PathBuf,
    port: u32,
}

impl Dial for Hybrid {
    fn dial(&self) -> Dialing<'_> {
        Box::pin(async {
            let mut stream = unix(&self.path).await?;
            stream.write_all(hybrid::request(self.port).as_bytes()).await.map_err(closed)?;
            let mut answer = hybrid::Answer::default();
            loop {
                let byte = stream.read_u8().await.map_err(closed)?;
                if answer.push(byte)?.is_some() {
                    return Ok(Box::new(stream) as BoxStream);
                }
            }
        })
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

async fn unix(path: &PathBuf) -> Result<UnixStream, Error> {
    UnixStream::connect(path).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::Missing(path.clone()),
        io::ErrorKind::ConnectionRefused => Error::Refused(path.clone()),
        _ => Error::Io(error),
    })
}

struct Vsock {
    cid: u32,
    port: u32,
}

impl Dial for Vsock {
    fn dial(&self) -> Dialing<'_> {
        Box::pin(async {
            let socket = privileged_socket()?;
            match connect(socket.as_raw_fd(), &VsockAddr::new(self.cid, self.port)) {
                Ok(()) => Ok(Box::new(VsockStream::new(socket.into())?) as BoxStream),
                Err(Errno::EINPROGRESS | Errno::EAGAIN) => {
                    let waiting = watch_writable(socket)?;
                    drop(waiting.writable().await?);
                    let socket = waiting.into_inner();
                    let error = getsockopt(&socket, sockopt::SocketError).map_err(io::Error::from)?;
                    if error != 0 {
                        return Err(self.explain(Errno::from_raw(error)));
                    }
                    Ok(Box::new(VsockStream::new(socket.into())?) as BoxStream)
                }
                Err(error) => Err(self.explain(error)),
            }
        })
    }
}

impl Vsock {
    fn explain(&self, error: Errno) -> Error {
        match error {
            Errno::ENODEV | Errno::ENETUNREACH | Errno::EHOSTUNREACH => Error::NoSuchCid(self.cid),
            Errno::ECONNRESET | Errno::ECONNREFUSED => Error::NobodyListens,
            error => Error::Io(error.into()),
        }
    }
}

/// Ports that only root may bind and that no agent needs, from the greatest downwards.
fn source_ports() -> impl Iterator<Item = u32> {
    (1..=LAST_PRIVILEGED_PORT).rev().filter(|port| !AGENT_PORTS.contains(port))
}

/// A socket that is bound to a port below 1024. Each connection holds one, so that a host half has at most 1021
/// connections over `AF_VSOCK` at a time.
fn privileged_socket() -> Result<OwnedFd, Error> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Vsock, SockType::Stream, flags, None).map_err(io::Error::from)?;
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
    fn source_ports_are_privileged_and_leave_out_those_of_agents() {
        let ports: Vec<_> = source_ports().collect();
        assert_eq!((ports.len(), ports[0], ports.last()), (1021, 1023, Some(&1)));
        assert!(!ports.contains(&970) && !ports.contains(&971));
    }

    /// Answers one CONNECT with `answer` and returns what was asked and what followed.
    async fn hybrid_with(answer: &'static [u8]) -> (Result<BoxStream, Error>, Vec<u8>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        let dialer = Target::Hybrid { path, port: 970 }.dialer();
        let serving = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = vec![0; b"CONNECT 970\n".len()];
            stream.read_exact(&mut asked).await.unwrap();
            stream.write_all(answer).await.unwrap();
            asked
        };
        tokio::join!(within(&*dialer, SOON), serving)
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
        let dialer = Target::Unix { path: path.clone() }.dialer();
        assert!(matches!(within(&*dialer, SOON).await.err(), Some(Error::Missing(_))));
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(matches!(within(&*dialer, SOON).await.err(), Some(Error::Refused(_))));
    }

    #[tokio::test]
    async fn a_silent_hypervisor_ends_at_the_deadline() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock");
        let _listener = UnixListener::bind(&path).unwrap();
        let dialer = Target::Hybrid { path, port: 970 }.dialer();
        let error = within(&*dialer, Duration::from_millis(20)).await.err().unwrap();
        assert_eq!(error.to_string(), "no answer within 0.02 s");
    }
}
