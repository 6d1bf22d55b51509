//! The guest's end of a virtio-serial port.
//!
//! Such a port has one stream for its whole life, and hosts come and go on it. Without a host poll(2) says
//! HUP for ever, read(2) returns 0 at once and write(2) gives EAGAIN, so the usual registration with an
//! event loop would spin. Here the port is in an epoll of its own, edge-triggered, and only that epoll is in
//! the event loop: it wakes when something changes, and never otherwise.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, timeout_at};

use crate::sys::descriptor::watch_readable;
use crate::transport::appearance::Watch;

/// Time between two attempts to open a port that another process has open.
const BUSY_RETRY: Duration = Duration::from_secs(5);
/// Time that a port may take to appear before a message is logged: during boot udev may not have created its
/// name yet.
const SETTLE: Duration = Duration::from_secs(5);
/// Size of the read that checks whether a host is connected.
const PROBE: usize = 4096;

/// Time to wait before a port counts as having no host. The first request of a host and the notification that
/// it has connected are on different queues of the device, and the request may arrive first.
const NEWS: Duration = Duration::from_secs(1);

/// Open virtio-serial port.
#[derive(Debug)]
pub struct Port {
    file: File,
    epoll: Epoll,
    /// The epoll itself, in the event loop.
    changes: AsyncFd<OwnedFd>,
    /// Waiting for room to write.
    wants_room: bool,
    /// Data that was read before the session began.
    early: Vec<u8>,
    /// Until when news of a host are waited for.
    patience: Option<Pin<Box<Sleep>>>,
}

impl Port {
    /// Opens the port at `path`.
    ///
    /// # Errors
    /// If the port does not exist, is in use (EBUSY), or cannot be polled.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&file, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0))?;
        let changes = watch_readable(epoll.0.try_clone()?)?;
        Ok(Self { file, epoll, changes, wants_room: false, early: Vec::new(), patience: None })
    }

    /// Opens the port at `path`, waiting for it to appear and for other users of it to go away.
    ///
    /// # Errors
    /// If it cannot be used for another reason.
    pub async fn open_when_there(path: &Path) -> io::Result<Self> {
        let mut said = None;
        let settled = Instant::now() + SETTLE;
        loop {
            let watch = Watch::new(path);
            let error = match Self::open(path) {
                Ok(port) => return Ok(port),
                Err(error) => error,
            };
            let problem = error.raw_os_error();
            if problem == Some(libc::ENOENT) && Instant::now() < settled {
                if let Ok(changed) = timeout_at(settled, watch.changed()).await {
                    changed?;
                }
                continue;
            }
            let news = said.replace(problem) != Some(problem);
            match problem {
                Some(libc::ENOENT) => {
                    if news {
                        tracing::warn!("{}: no such port; waiting for it to appear", path.display());
                    }
                    watch.changed().await?;
                }
                Some(libc::EBUSY) => {
                    if news {
                        tracing::warn!(
                            "{}: in use by another process (is qemu-guest-agent running?); trying again every {} s",
                            path.display(),
                            BUSY_RETRY.as_secs()
                        );
                    }
                    sleep(BUSY_RETRY).await;
                }
                // The device node of a port that is just being unplugged.
                Some(libc::ENODEV | libc::ENXIO) => sleep(BUSY_RETRY).await,
                _ => return Err(error),
            }
        }
    }

    /// Completes when a host has the other end open, or has left something to read.
    ///
    /// # Errors
    /// If the port is unplugged.
    pub async fn attached(&mut self) -> io::Result<()> {
        loop {
            if !self.is_hung_up()? {
                return Ok(());
            }
            let mut probe = [0; PROBE];
            match self.file.read(&mut probe) {
                Ok(0) => {}
                Ok(length) => {
                    self.early.extend_from_slice(&probe[..length]);
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
            std::future::poll_fn(|context| self.poll_changed(context)).await?;
        }
    }

    /// Returns whether no host has the other end open.
    fn is_hung_up(&self) -> io::Result<bool> {
        let mut ports = [PollFd::new(self.file.as_fd(), PollFlags::POLLOUT)];
        poll(&mut ports, PollTimeout::ZERO)?;
        Ok(ports[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP)))
    }

    /// Ready once for every change since it was last ready.
    fn poll_changed(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut ready = ready!(self.changes.poll_read_ready(context))?;
        self.epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::ZERO)?;
        ready.clear_ready();
        Poll::Ready(Ok(()))
    }

    fn watch_for_room(&mut self, on: bool) -> io::Result<()> {
        if self.wants_room != on {
            let mut flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
            flags.set(EpollFlags::EPOLLOUT, on);
            self.epoll.modify(&self.file, &mut EpollEvent::new(flags, 0))?;
            self.wants_room = on;
        }
        Ok(())
    }
}

/// Reports end-of-file when the host disconnects; [`Port::attached`] waits for the next one.
impl AsyncRead for &mut Port {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.early.is_empty() {
            let length = self.early.len().min(buffer.remaining());
            buffer.put_slice(&self.early[..length]);
            self.early.drain(..length);
            return Poll::Ready(Ok(()));
        }
        loop {
            match self.file.read(buffer.initialize_unfilled()) {
                Ok(length) => {
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(self.poll_changed(context))?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

/// Reports a broken pipe for a write to a port whose host has disconnected, after a short time in which the
/// next one may connect.
impl AsyncWrite for &mut Port {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.file.write(bytes) {
                Ok(length) => {
                    self.patience = None;
                    self.watch_for_room(false)?;
                    return Poll::Ready(Ok(length));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.is_hung_up()? {
                        let patience = self.patience.get_or_insert_with(|| Box::pin(sleep(NEWS)));
                        if patience.as_mut().poll(context).is_ready() {
                            self.patience = None;
                            self.watch_for_room(false)?;
                            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
                        }
                    }
                    self.watch_for_room(true)?;
                    ready!(self.poll_changed(context))?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The port itself needs a real one (tests/vm); how it is waited for does not.
    #[tokio::test]
    async fn a_port_is_noticed_when_it_appears_with_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("virtio-ports/org.qemu.guest_agent.0");
        let waiting = Port::open_when_there(&path);
        let appearing = async {
            tokio::task::yield_now().await;
            std::fs::create_dir(path.parent().unwrap()).unwrap();
            tokio::task::yield_now().await;
            // Any file that can be polled will do.
            nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        };
        let (port, ()) =
            tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(waiting, appearing) })
                .await
                .unwrap();
        port.unwrap();
    }
}
