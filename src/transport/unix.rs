//! Listeners on unix sockets.

use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use nix::sys::stat::{Mode, umask};
use tokio::net::{UnixListener, UnixStream};

/// Why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process listens there.
    #[error("{0} is in use by another process")]
    InUse(PathBuf),
    /// There is a file that is no socket; it is left alone.
    #[error("{0} exists and is no socket")]
    NoSocket(PathBuf),
    /// The system's refusal.
    #[error("cannot listen on {path}")]
    Io {
        /// The socket's path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// A listening socket that removes its file when it is dropped.
#[derive(Debug)]
pub struct Listener {
    inner: UnixListener,
    path: PathBuf,
}

impl Listener {
    /// Listens at `path`, for root and the process's own user only. A socket that nobody listens on any
    /// more is replaced.
    ///
    /// # Errors
    /// If somebody does, or the path is taken by something else, or cannot be used.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => return Err(Error::NoSocket(path.to_owned())),
            Ok(_) if has_listener(path).map_err(io)? => return Err(Error::InUse(path.to_owned())),
            Ok(_) => std::fs::remove_file(path).map_err(io)?,
            Err(_) => {}
        }
        // The mode is right from the beginning; listeners are made before there is another thread.
        let before = umask(Mode::from_bits_truncate(0o177));
        let listener = StdListener::bind(path);
        umask(before);
        let listener = listener.map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        Ok(Self { inner: UnixListener::from_std(listener).map_err(io)?, path: path.to_owned() })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next client.
    ///
    /// # Errors
    /// As accept(2) gives them.
    pub async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.inner.accept().await?.0)
    }
}

/// Whether somebody listens on the socket at `path`; one that does not accept in time counts.
fn has_listener(path: &Path) -> io::Result<bool> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match connect(probe.as_raw_fd(), &UnixAddr::new(path)?) {
        Ok(()) | Err(Errno::EAGAIN | Errno::EINPROGRESS) => Ok(true),
        Err(Errno::ECONNREFUSED | Errno::ENOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!("cannot remove {}: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[tokio::test]
    async fn a_listener_that_hangs_is_in_use_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let hung = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
        nix::sys::socket::bind(hung.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        nix::sys::socket::listen(&hung, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
        let mut crowd = Vec::new();
        for _ in 0..3 {
            let flags = SockFlag::SOCK_NONBLOCK;
            let client = socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
            let _ = connect(client.as_raw_fd(), &UnixAddr::new(&path).unwrap());
            crowd.push(client);
        }
        assert!(matches!(Listener::bind(&path), Err(Error::InUse(_))));
    }

    #[tokio::test]
    async fn only_a_socket_that_nobody_uses_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(StdListener::bind(&path).unwrap());
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(matches!(Listener::bind(&path), Err(Error::InUse(_))));
        drop(listener);
        assert!(!path.exists());
        std::fs::File::create(&path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(Error::NoSocket(_))));
        assert!(path.exists());
    }
}
