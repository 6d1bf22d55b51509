//! The agent's ends of a program's pipes, or of its terminal.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use crate::sys::descriptor;
use crate::sys::terminal::{self, Size};

/// End-of-file character (Ctrl-D): ends a line of input, and the whole input on an empty line.
const END: u8 = 4;

/// The controlling end of a terminal; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Terminal(Arc<AsyncFd<OwnedFd>>);

/// Stream that the program's output is read from.
#[derive(Debug)]
pub(super) enum Source {
    Pipe(pipe::Receiver),
    Terminal(Terminal),
}

/// Stream that the program's input is written to.
#[derive(Debug)]
pub(super) enum Sink {
    Pipe(pipe::Sender),
    Terminal(Terminal),
}

impl Terminal {
    /// Opens a terminal of this size; returns the controlling end and the program's end.
    pub fn open(size: Size) -> io::Result<(Self, OwnedFd)> {
        let (controller, end) = terminal::open(size)?;
        Ok((Self(Arc::new(descriptor::watch_both(controller)?)), end))
    }

    /// Changes the size of the terminal.
    pub fn resize(&self, size: Size) -> io::Result<()> {
        terminal::set_size(self.0.get_ref(), size)
    }

    /// Returns the foreground process group of the terminal.
    pub fn foreground(&self) -> Option<nix::unistd::Pid> {
        terminal::foreground(self.0.get_ref())
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.0.try_io(Interest::READABLE, |controller| Ok(nix::unistd::read(controller, bytes)?));
        match read {
            // No process has the program's end open any longer: Linux reports that as EIO, which is the end of the output.
            Err(error) if error.raw_os_error() == Some(nix::errno::Errno::EIO as i32) => Ok(0),
            read => read,
        }
    }
}

impl Source {
    /// Waits until output or its end can be read.
    pub async fn readable(source: Option<&Self>) {
        let ready = match source {
            Some(Self::Pipe(pipe)) => pipe.readable().await,
            Some(Self::Terminal(terminal)) => terminal.0.readable().await.map(drop),
            None => std::future::pending().await,
        };
        // An error is returned again by the next read.
        drop(ready);
    }

    /// Reads the available output; returns `None` if there is none now.
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

    /// Writes as many bytes as fit; returns `None` if none fit now.
    pub fn write(&self, bytes: &[u8]) -> Option<io::Result<usize>> {
        let written = match self {
            Self::Pipe(pipe) => pipe.try_write(bytes),
            Self::Terminal(terminal) => {
                terminal.0.try_io(Interest::WRITABLE, |controller| Ok(nix::unistd::write(controller, bytes)?))
            }
        };
        later(written)
    }

    /// Ends the input: the program reads end-of-file.
    pub fn end(self) {
        match self {
            Self::Pipe(pipe) => drop(pipe),
            // If the terminal's buffer is full, the character is lost and the input does not end, as with a person who
            // types too much.
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
