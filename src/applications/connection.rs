//! Session with a database over its Unix socket: every wait has a deadline, and the identity of the peer is
//! checked.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::{OFlag, open};
use nix::sys::socket::sockopt::{PeerCredentials, SendTimeout};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket,
};
use nix::sys::stat::{Mode, SFlag, fstat};
use nix::sys::time::TimeVal;
use nix::unistd::Uid;

use super::Problem;

/// Connected stream to the database, and the process at its other end.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// PID of the process that listens.
    server: i32,
}

impl Connection {
    /// Connects to a socket that belongs to this process's user and on which a process of the same user listens.
    ///
    /// # Errors
    /// If the path is anything else, or the connection is not accepted by the deadline.
    pub fn open(path: &Path, until: Instant) -> Result<Self, Problem> {
        let name = path.display();
        let failed = |error: nix::Error| Problem::new(format_args!("cannot connect to {name}: {error}"));
        // Connect through the descriptor of the file that was checked, even if the path leads elsewhere by then.
        let file = open(path, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(failed)?;
        let about = fstat(&file).map_err(failed)?;
        if SFlag::from_bits_truncate(about.st_mode) & SFlag::S_IFMT != SFlag::S_IFSOCK {
            return Err(Problem::new(format_args!("{name} is not a socket")));
        }
        let own = Uid::effective();
        if about.st_uid != own.as_raw() {
            return Err(Problem::new(format_args!(
                "{name} belongs to the user {}, not to {own}",
                about.st_uid
            )));
        }
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None);
        let socket = socket.map_err(failed)?;
        setsockopt(&socket, SendTimeout, &time_value(left(until)?)).map_err(failed)?;
        let address =
            UnixAddr::new(format!("/proc/self/fd/{}", file.as_raw_fd()).as_str()).map_err(failed)?;
        connect(socket.as_raw_fd(), &address).map_err(failed)?;
        let peer = getsockopt(&socket, PeerCredentials).map_err(failed)?;
        if peer.uid() != own.as_raw() {
            return Err(Problem::new(format_args!(
                "a process of the user {} listens on {name}, not one of {own}",
                peer.uid()
            )));
        }
        Ok(Self { stream: UnixStream::from(socket), server: peer.pid() })
    }

    /// Returns the PID of the process that listens, or that listened when the socket was created.
    pub fn server(&self) -> i32 {
        self.server
    }

    /// Sends all bytes.
    ///
    /// # Errors
    /// If they are not accepted by the deadline, or the session has ended.
    pub fn send(&mut self, bytes: &[u8], until: Instant) -> Result<(), Problem> {
        let mut rest = bytes;
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(left(until)?)).map_err(ended)?;
            match self.stream.write(rest) {
                Ok(0) => return Err(Problem::new("the database has ended the session")),
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(error) if is_late(&error) => {}
                Err(error) => return Err(ended(error)),
            }
        }
        Ok(())
    }

    /// Fills the buffer.
    ///
    /// # Errors
    /// If not enough bytes arrive by the deadline, or the session has ended.
    pub fn receive(&mut self, buffer: &mut [u8], until: Instant) -> Result<(), Problem> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            filled += self.receive_some(rest, until)?;
        }
        Ok(())
    }

    /// Receives at least one byte, or none if the buffer is empty.
    ///
    /// # Errors
    /// If nothing arrives by the deadline, or the session has ended.
    pub fn receive_some(&mut self, buffer: &mut [u8], until: Instant) -> Result<usize, Problem> {
        loop {
            self.stream.set_read_timeout(Some(left(until)?)).map_err(ended)?;
            match self.stream.read(buffer) {
                Ok(0) if !buffer.is_empty() => {
                    return Err(Problem::new("the database has ended the session"));
                }
                Ok(length) => return Ok(length),
                Err(error) if is_late(&error) => {}
                Err(error) => return Err(ended(error)),
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Returns the time until the deadline.
///
/// # Errors
/// If less than a millisecond is left.
pub fn left(until: Instant) -> Result<Duration, Problem> {
    let left = until.saturating_duration_since(Instant::now());
    // Socket timeouts have a resolution of microseconds, and 0 means no timeout.
    if left < Duration::from_millis(1) {
        return Err(Problem::new("the database did not answer in time"));
    }
    Ok(left)
}

fn time_value(time: Duration) -> TimeVal {
    let seconds = time.as_secs().try_into().unwrap_or(i64::MAX);
    TimeVal::new(seconds, time.subsec_micros().into())
}

fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn ended(error: io::Error) -> Problem {
    Problem::new(format_args!("the session with the database has ended: {error}"))
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    fn refused(path: &Path) -> String {
        Connection::open(path, soon()).unwrap_err().to_string()
    }

    #[test]
    fn what_is_sent_arrives_and_the_end_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let mut connection = Connection::open(&path, soon()).unwrap();
        assert_eq!(connection.server().cast_unsigned(), std::process::id());
        let (mut other, _) = listener.accept().unwrap();
        connection.send(b"question", soon()).unwrap();
        let mut buffer = [0; 8];
        other.read_exact(&mut buffer).unwrap();
        other.write_all(&buffer).unwrap();
        let mut answer = [0; 8];
        connection.receive(&mut answer, soon()).unwrap();
        assert_eq!(&answer, b"question");
        let late = connection.receive(&mut answer, Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert!(late.to_string().contains("in time"), "{late}");
        drop(other);
        let end = connection.receive(&mut answer, soon()).unwrap_err();
        assert!(end.to_string().contains("has ended the session"), "{end}");
    }

    #[test]
    fn links_and_files_are_not_connected_to() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name| directory.path().join(name);
        let _listener = UnixListener::bind(path("socket")).unwrap();
        std::os::unix::fs::symlink(path("socket"), path("link")).unwrap();
        std::fs::write(path("file"), "").unwrap();
        for name in ["link", "file"] {
            assert!(refused(&path(name)).contains("is not a socket"), "{}", refused(&path(name)));
        }
        assert!(refused(&path("missing")).contains("ENOENT"), "{}", refused(&path("missing")));
        drop(UnixListener::bind(path("left")).unwrap());
        assert!(refused(&path("left")).contains("ECONNREFUSED"), "{}", refused(&path("left")));
    }
}
