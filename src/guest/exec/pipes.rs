//! The agent's ends of a program's pipes, or of its terminal.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use crate::sys::descriptor;
use crate::sys::terminal::{self, Size};

/// What ends a line of input, and the input if there is none (Ctrl-D).
const END: u8 = 4;

/// The controlling end of a terminal; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Terminal(Arc<AsyncFd<OwnedFd>>);

/// Where output comes from.
#[derive(Debug)]
pub(super) enum Source {
    Pipe(pipe::Receiver),
    Terminal(Terminal),
}

/// Where input goes.
#[derive(Debug)]
pub(super) enum Sink {
    Pipe(pipe::Sender),
    Terminal(Terminal),
}

impl Terminal {
    /// A new one of this size, and the program's end.
    pub fn open(size: Size) -> io::Result<(Self, OwnedFd)> {
        let (controller, end) = terminal::open(size)?;
        Ok((Self(Arc::new(descriptor::watch_both(controller)?)), end))
    }

    /// Gives it another size.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        terminal::set_size(self.0.get_ref(), size)
    }

    /// The process group in its foreground.
    pub fn foreground(&self) -> Option<nix::unistd::Pid> {
        terminal::foreground(self.0.get_ref())
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.0.try_io(Interest::READABLE, |controller| Ok(nix::unistd::read(controller, bytes)?));
        match read {
            // Nobody has the other end open any more.
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::EIO as i32) => Ok(0),
            read => read,
        }
    }
}

impl Source {
    /// Waits until there is something to read, or the end.
    pub async fn readable(source: Option<&Self>) {
        let ready = match source {
            Some(Self::Pipe(pipe)) => pipe.readable().await,
            Some(Self::Terminal(terminal)) => terminal.0.readable().await.map(drop),
            None => std::future::pending().await,
        };
        // An error comes again when it is read.
        drop(ready);
    }

    /// Reads what is there; none if there is nothing now.
    pub fn read(&self, bytes: &mut [u8]) -> Option<io::Result<usize>> {
        let read = match self {
            Self::Pipe(pipe) => pipe.try_read(bytes),
            Self::Terminal(terminal) => terminal.read(bytes),
        };
        later(read)
    }
}

impl Sink {
    /// Waits until something can be written.
    pub async fn writable(sink: Option<&Self>) {
        let ready = match sink {
            Some(Self::Pipe(pipe)) => pipe.writable().await,
            Some(Self::Terminal(terminal)) => terminal.0.writable().await.map(drop),
            None => std::future::pending().await,
        };
        drop(ready);
    }

    /// Writes what there is room for; none if there is no room now.
    pub fn write(&self, bytes: &[u8]) -> Option<io::Result<usize>> {
        let written = match self {
            Self::Pipe(pipe) => pipe.try_write(bytes),
            Self::Terminal(terminal) => {
                terminal.0.try_io(Interest::WRITABLE, |controller| Ok(nix::unistd::write(controller, bytes)?))
            }
        };
        later(written)
    }

    /// Nothing more comes: the program reads the end.
    pub fn end(self) {
        match self {
            Self::Pipe(pipe) => drop(pipe),
            // One that does not fit ends nothing, as with a person who types too much.
            Self::Terminal(terminal) => drop(Self::Terminal(terminal).write(&[END])),
        }
    }
}

fn later(done: io::Result<usize>) -> Option<io::Result<usize>> {
    match done {
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => None,
        done => Some(done),
    }
}
