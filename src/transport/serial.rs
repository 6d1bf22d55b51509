//! A serial line: what goes in at one end comes out at the other, byte by byte.

#[cfg(feature = "agent")]
use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
#[cfg(feature = "agent")]
use std::os::unix::fs::OpenOptionsExt as _;
#[cfg(feature = "agent")]
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
#[cfg(feature = "agent")]
use std::time::Duration;

use nix::libc;
use nix::sys::termios::{
    ControlFlags, FlushArg, SetArg, SpecialCharacterIndices, cfmakeraw, tcflush, tcgetattr, tcsetattr,
};
use nix::unistd::{read, write};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::sys::descriptor::watch_both;
#[cfg(feature = "agent")]
use crate::transport::appearance::Watch;

/// Time between two attempts to use a line that is unavailable.
#[cfg(feature = "agent")]
const RETRY: Duration = Duration::from_secs(5);

/// Open serial line.
#[derive(Debug)]
pub struct Line(AsyncFd<OwnedFd>);

impl Line {
    /// Opens the line at `path`; see [`Line::of`].
    ///
    /// # Errors
    /// The errors of open(2); ENOTTY if it is not a serial line.
    #[cfg(feature = "agent")]
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        Self::of(OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?.into())
    }

    /// Takes everything off an open line, which does not block, that a terminal would want: bytes go through as they are, at 38400
    /// baud as with qemu-ga, and no signal of a modem ends it. What came before is dropped.
    ///
    /// # Errors
    /// ENOTTY if it is no line.
    pub fn of(file: OwnedFd) -> io::Result<Self> {
        let mut settings = tcgetattr(&file)?;
        cfmakeraw(&mut settings);
        settings.control_flags |= ControlFlags::CLOCAL | ControlFlags::CREAD;
        settings.control_chars[SpecialCharacterIndices::VMIN as usize] = 1;
        settings.control_chars[SpecialCharacterIndices::VTIME as usize] = 0;
        // Does the same as cfsetspeed(3), which has several versions and cannot be linked statically.
        settings.control_flags.remove(ControlFlags::CBAUD);
        settings.control_flags |= ControlFlags::from_bits_retain(libc::B38400);
        tcflush(&file, FlushArg::TCIFLUSH)?;
        tcsetattr(&file, SetArg::TCSANOW, &settings)?;
        Ok(Self(watch_both(file)?))
    }

    /// Opens the line at `path`, waiting for it to appear and to be usable.
    ///
    /// # Errors
    /// If it is no line, or may not be opened.
    #[cfg(feature = "agent")]
    pub async fn open_when_there(path: &Path) -> io::Result<Self> {
        let mut said = None;
        loop {
            let watch = Watch::new(path);
            let error = match Self::open(path) {
                Ok(line) => return Ok(line),
                Err(error) => error,
            };
            let problem = error.raw_os_error();
            let news = said.replace(problem) != Some(problem);
            let wait = match problem {
                Some(libc::ENOENT) => watch.changed().await,
                // The line has no hardware behind it, was unplugged or hung up at the other end, or is in use by another
                // process.
                Some(libc::EIO | libc::ENXIO | libc::ENODEV | libc::EBUSY) => {
                    if news {
                        let seconds = RETRY.as_secs();
                        tracing::warn!("{}: {error}; trying again every {seconds} s", path.display());
                    }
                    tokio::time::sleep(RETRY).await;
                    Ok(())
                }
                _ => return Err(error),
            };
            wait?;
        }
    }
}

/// End of file means that the line was hung up; it has to be opened again.
impl AsyncRead for Line {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.0.poll_read_ready(context))?;
            let unfilled = buffer.initialize_unfilled();
            match ready.try_io(|line| Ok(read(line.get_ref(), unfilled)?)) {
                Ok(Ok(length)) => {
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                // The other end of a pseudo terminal was closed.
                Ok(Err(error)) if error.raw_os_error() == Some(libc::EIO) => return Poll::Ready(Ok(())),
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Poll::Ready(Err(error)),
                Err(_not_yet) => {}
            }
        }
    }
}

impl AsyncWrite for Line {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.0.poll_write_ready(context))?;
            match ready.try_io(|line| Ok(write(line.get_ref(), bytes)?)) {
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(outcome) => return Poll::Ready(outcome),
                Err(_not_yet) => {}
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

#[cfg(all(test, feature = "agent"))]
mod tests {
    use std::io::{Read as _, Write as _};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn bytes_go_through_as_they_are_and_a_hang_up_is_an_end() {
        let pair = nix::pty::openpty(None, None).unwrap();
        let path = nix::unistd::ttyname(&pair.slave).unwrap();
        let mut line = Line::open(&path).unwrap();
        drop(pair.slave);
        let mut host = std::fs::File::from(pair.master);
        let all: Vec<u8> = (0..=255).collect();
        host.write_all(&all).unwrap();
        let mut found = [0; 256];
        line.read_exact(&mut found).await.unwrap();
        assert_eq!(found, all[..]);
        line.write_all(&all).await.unwrap();
        host.read_exact(&mut found).unwrap();
        assert_eq!(found, all[..]);
        drop(host);
        assert_eq!(line.read(&mut found).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn what_is_no_line_is_refused() {
        let error = Line::open_when_there(Path::new("/dev/null")).await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
