//! A connected socket of either kind that is carried on by programs: TCP, or unix.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::time::Duration;

use nix::libc;
use nix::sys::socket::{Shutdown, setsockopt, shutdown, sockopt};
use tokio::net::{TcpStream, UnixStream};

/// Keepalive settings of TCP connections: seconds of silence before the first probe, and their interval and
/// number.
const IDLE: u32 = 60;
const INTERVAL: u32 = 15;
const PROBES: u32 = 4;
/// Time before another attempt to connect to a unix socket whose backlog is full.
const AGAIN: Duration = Duration::from_millis(20);

/// Connected stream socket.
#[derive(Debug)]
pub enum Socket {
    /// TCP socket.
    Tcp(TcpStream),
    /// Unix socket.
    Unix(UnixStream),
}

impl Socket {
    /// One of TCP, which sends at once what is written, and notices some 2 minutes after its peer has vanished.
    pub fn tcp(stream: TcpStream) -> Self {
        let set = || -> nix::Result<()> {
            setsockopt(&stream, sockopt::TcpNoDelay, &true)?;
            setsockopt(&stream, sockopt::KeepAlive, &true)?;
            setsockopt(&stream, sockopt::TcpKeepIdle, &IDLE)?;
            setsockopt(&stream, sockopt::TcpKeepInterval, &INTERVAL)?;
            setsockopt(&stream, sockopt::TcpKeepCount, &PROBES)
        };
        // If the peer has disconnected already, the next read reports it.
        if let Err(error) = set() {
            tracing::debug!("cannot set options of a socket: {error}");
        }
        Self::Tcp(stream)
    }

    /// Connects to an address.
    ///
    /// # Errors
    /// If nothing answers there.
    pub async fn to_address(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        // If no process listens on a port of this machine, the kernel may choose the same port for this end, and the
        // socket connects to itself.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        Ok(Self::tcp(stream))
    }

    /// Connects to a unix socket; waits while the backlog of its listener is full.
    ///
    /// # Errors
    /// If no process listens there.
    pub async fn to_path(path: &Path) -> io::Result<Self> {
        loop {
            match UnixStream::connect(path).await {
                Ok(stream) => return Ok(Self::Unix(stream)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => tokio::time::sleep(AGAIN).await,
                Err(error) => return Err(error),
            }
        }
    }

    /// Completes when there may be something to read, the end included.
    ///
    /// # Errors
    /// If the event loop has ended.
    pub async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.readable().await,
            Self::Unix(stream) => stream.readable().await,
        }
    }

    /// Completes when there may be room for more.
    ///
    /// # Errors
    /// If the event loop has ended.
    pub async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Unix(stream) => stream.writable().await,
        }
    }

    /// Reads as much as `buffer` has room for; 0 is the end.
    ///
    /// # Errors
    /// The errors of read(2); `WouldBlock` if there is no data now.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read(buffer),
            Self::Unix(stream) => stream.try_read(buffer),
        }
    }

    /// Writes some of these parts.
    ///
    /// # Errors
    /// The errors of writev(2); `WouldBlock` if there is no room now.
    pub fn try_write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write_vectored(parts),
            Self::Unix(stream) => stream.try_write_vectored(parts),
        }
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }

    /// Tells the peer that nothing more is written, after all that was.
    ///
    /// # Errors
    /// If the connection has broken.
    pub fn end_writing(&self) -> io::Result<()> {
        Ok(shutdown(self.descriptor().as_raw_fd(), Shutdown::Write)?)
    }

    /// Bytes that were written, and that the peer's kernel does not have yet; of a unix socket none.
    pub fn unsent(&self) -> usize {
        let Self::Tcp(stream) = self else { return 0 };
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel fills in an int, which lives here.
        let done = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
        if done == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
    }

    /// Returns whether the socket still has a peer.
    pub fn is_connected(&self) -> bool {
        match self {
            Self::Tcp(stream) => stream.peer_addr().is_ok(),
            Self::Unix(stream) => stream.peer_addr().is_ok(),
        }
    }

    /// Closes the socket abruptly: a TCP peer gets a reset, and unsent data is discarded.
    pub fn abort(self) {
        if let Self::Tcp(stream) = &self {
            // One that has broken cannot be broken again.
            let _ = stream.set_zero_linger();
        }
    }
}
