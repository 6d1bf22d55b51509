//! Listeners on unix sockets.
//!
//! A listener that has ended leaves its socket file behind. The next one has to remove that file, but never
//! the file of a running listener. A process that checks a socket file and replaces it holds a lock on its
//! directory (flock(2)), so that two processes that start at the same time do not remove each other's file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, connect, listen, socket};
use nix::sys::stat::{Mode, fchmod};
use tokio::net::{UnixListener, UnixStream};

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;
/// Time to wait for another process to unlock the directory.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Between two tries to lock it.
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Reason why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Socket that another process listens on.
    #[error("{0} is in use by another process")]
    InUse(PathBuf),
    /// File that is not a socket; it is left alone.
    #[error("{0} exists and is not a socket")]
    NoSocket(PathBuf),
    /// Directory that another process keeps locked.
    #[error("the directory of {0} is locked by another process")]
    Locked(PathBuf),
    /// Error of the operating system.
    #[error("cannot listen on {path}")]
    Io {
        /// Path of the socket.
        path: PathBuf,
        /// Cause of the failure.
        source: io::Error,
    },
}

/// A listening socket. One that it bound itself it removes when it is dropped.
#[derive(Debug)]
pub struct Listener {
    inner: UnixListener,
    path: PathBuf,
    /// Device and inode of the file that is its own.
    file: Option<(u64, u64)>,
}

impl Listener {
    /// Listens at `path`, for root and the user of this process only. A stale socket is replaced.
    ///
    /// # Errors
    /// If another process listens there, or the path is occupied by another file, or cannot be used.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        let io = |source| Error::Io { path: path.to_owned(), source };
        let lock = lock_folder(path)?;
        match std::fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => return Err(Error::NoSocket(path.to_owned())),
            Ok(_) if has_listener(path).map_err(io)? => return Err(Error::InUse(path.to_owned())),
            Ok(_) => std::fs::remove_file(path).map_err(io)?,
            Err(_) => {}
        }
        let socket = bound(path).map_err(|error| io(error.into()))?;
        let found = std::fs::symlink_metadata(path).map_err(io)?;
        drop(lock);
        let inner = UnixListener::from_std(StdListener::from(socket)).map_err(io)?;
        Ok(Self { inner, path: path.to_owned(), file: Some((found.dev(), found.ino())) })
    }

    /// Takes over a unix socket that listens already. Its file is not this listener's to remove.
    ///
    /// # Errors
    /// If it is no such socket.
    pub fn adopt(socket: OwnedFd) -> io::Result<Self> {
        let listener = StdListener::from(socket);
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let path = address.as_pathname().unwrap_or(Path::new("a unix socket")).to_owned();
        Ok(Self { inner: UnixListener::from_std(listener)?, path, file: None })
    }

    /// Sets whether all users who can reach the socket may connect, or root and the user of this process only.
    ///
    /// # Errors
    /// The errors of chmod(2); also if the socket at its path is not this one.
    pub fn open_to_all(&self, open: bool) -> io::Result<()> {
        if !self.is_there() {
            return Err(io::Error::from(io::ErrorKind::NotFound));
        }
        let mode = if open { 0o666 } else { 0o600 };
        std::fs::set_permissions(&self.path, std::fs::Permissions::from_mode(mode))
    }

    /// Returns whether users other than its owner can traverse the socket's directory.
    pub fn is_in_reach(&self) -> bool {
        let folder = self.path.parent().and_then(|folder| std::fs::metadata(folder).ok());
        folder.is_some_and(|found| found.mode() & 0o001 != 0)
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the socket's path still leads to this socket.
    pub fn is_there(&self) -> bool {
        let found = std::fs::symlink_metadata(&self.path).map(|found| (found.dev(), found.ino())).ok();
        self.file.is_none() || self.file == found
    }

    /// Waits for the next client.
    ///
    /// # Errors
    /// The errors of accept(2).
    pub async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.inner.accept().await?.0)
    }

    /// Polls for the next client, for callers that listen on several sockets.
    pub fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<UnixStream>> {
        self.inner.poll_accept(context).map_ok(|(stream, _)| stream)
    }
}

/// A socket that listens at `path`. Its file has its mode from the beginning, as unix(7) takes it from the socket.
fn bound(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    fchmod(socket.as_fd(), Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    listen(&socket, Backlog::new(BACKLOG)?)?;
    Ok(socket)
}

/// Locks the directory of `path`, which excludes other listeners that check the socket files in it.
fn lock_folder(path: &Path) -> Result<Flock<File>, Error> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let io = |source| Error::Io { path: path.to_owned(), source };
    let mut opened =
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(folder).map_err(io)?;
    let begun = Instant::now();
    loop {
        match Flock::lock(opened, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((again, Errno::EAGAIN)) if begun.elapsed() < LOCK_PATIENCE => opened = again,
            Err((_, Errno::EAGAIN)) => return Err(Error::Locked(path.to_owned())),
            Err((_, error)) => return Err(io(error.into())),
        }
        std::thread::sleep(LOCK_RETRY);
    }
}

/// Returns whether a process listens on the socket at `path`. A process that does not accept in time counts as
/// one.
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
    /// Removes the file while the socket still listens, so that no other process takes it for a stale one.
    fn drop(&mut self) {
        let found = std::fs::symlink_metadata(&self.path).map(|found| (found.dev(), found.ino())).ok();
        if self.file.is_none() || self.file != found {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!("cannot remove {}: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_listener_that_hangs_is_in_use_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let hung = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
        bind(hung.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        listen(&hung, Backlog::new(0).unwrap()).unwrap();
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
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o600);
        for (open, expected) in [(true, 0o666), (false, 0o600)] {
            listener.open_to_all(open).unwrap();
            assert_eq!(mode(), expected);
        }
        assert!(matches!(Listener::bind(&path), Err(Error::InUse(_))));
        drop(listener);
        assert!(!path.exists());
        File::create(&path).unwrap();
        assert!(matches!(Listener::bind(&path), Err(Error::NoSocket(_))));
        assert!(path.exists());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn of_many_who_start_at_once_on_a_socket_left_behind_one_listens() {
        for _ in 0..20 {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("socket");
            drop(StdListener::bind(&path).unwrap());
            let start = std::sync::Arc::new(std::sync::Barrier::new(4));
            let mut starters = tokio::task::JoinSet::new();
            for _ in 0..4 {
                let (path, start) = (path.clone(), std::sync::Arc::clone(&start));
                starters.spawn(async move {
                    start.wait();
                    Listener::bind(&path)
                });
            }
            let outcomes = starters.join_all().await;
            let listening: Vec<_> = outcomes.iter().filter(|outcome| outcome.is_ok()).collect();
            assert_eq!(listening.len(), 1, "{outcomes:?}");
            assert!(has_listener(&path).unwrap(), "the one that listens is not the one that is found");
        }
    }

    #[tokio::test]
    async fn nobody_looks_at_a_socket_left_behind_while_another_replaces_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        drop(StdListener::bind(&path).unwrap());
        let lock = lock_folder(&path).unwrap();
        let ours = path.clone();
        let mut second = tokio::task::spawn_blocking(move || Listener::bind(&ours));
        let early = tokio::time::timeout(Duration::from_millis(200), &mut second).await;
        assert!(early.is_err(), "it did not wait: {early:?}");
        std::fs::remove_file(&path).unwrap();
        let _first = StdListener::bind(&path).unwrap();
        drop(lock);
        assert!(matches!(second.await.unwrap(), Err(Error::InUse(_))));
    }

    #[tokio::test]
    async fn a_socket_of_somebody_else_at_the_same_place_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = Listener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Listener::bind(&path).unwrap();
        drop(first);
        assert!(has_listener(&path).unwrap());
        drop(second);
        assert!(!path.exists());
    }
}
