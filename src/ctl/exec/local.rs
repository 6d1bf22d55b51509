//! Local end of a program: standard streams, each with a thread of its own, because they may block; signals;
//! and the terminal.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::os::fd::AsFd;
use std::sync::mpsc as blocking;

use tokio::signal::unix::SignalKind;
use tokio::sync::mpsc;

use crate::ctl::signals;
use crate::ctl::standard::{may_try_again, stream, write};
use crate::sys::terminal::{self, Changed};
use crate::wire::proto::v1::TerminalSize;

/// Bytes that are read at once: as many as one message to a console may have.
pub const PART: usize = 16 << 10;

/// Returns the size of the terminal at one of the standard streams, if there is one.
pub fn size() -> Option<TerminalSize> {
    let (input, output, errors) = (io::stdin(), io::stdout(), io::stderr());
    let all = [input.as_fd(), output.as_fd(), errors.as_fd()];
    let size = all.into_iter().find_map(|stream| terminal::size(stream).ok())?;
    Some(TerminalSize { rows: size.rows.into(), columns: size.columns.into() })
}

/// Fills a buffer with random bytes from the kernel.
///
/// # Errors
/// Fails if the kernel returns none.
pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    File::open("/dev/urandom")?.read_exact(bytes)
}

/// Makes the terminal at standard input pass on each key, if there is a terminal.
///
/// # Errors
/// Fails if its settings cannot be changed.
pub fn raw() -> io::Result<Option<Changed>> {
    let input = io::stdin();
    if input.is_terminal() { Changed::raw(input.as_fd()).map(Some) } else { Ok(None) }
}

/// Shows a message to the user, whatever mode the terminal is in.
pub fn say(words: &str, is_raw: bool) {
    let line = format!("guestctl: {words}{}", if is_raw { "\r\n" } else { "\n" });
    // A failure cannot be reported anywhere.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// Reads standard input part by part. An empty part marks the end, and nothing follows an error.
pub fn input() -> io::Result<mpsc::Receiver<io::Result<Vec<u8>>>> {
    let (parts, receiver) = mpsc::channel(1);
    let mut input = stream(io::stdin())?;
    thread("input", move || {
        let mut part = vec![0; PART];
        loop {
            let read = match input.read(&mut part) {
                Ok(length) => Ok(part[..length].to_vec()),
                Err(error) => match may_try_again(error) {
                    Ok(()) => continue,
                    Err(error) => Err(error),
                },
            };
            let is_last = read.as_ref().map_or(true, Vec::is_empty);
            if parts.blocking_send(read).is_err() || is_last {
                return;
            }
        }
    })?;
    Ok(receiver)
}

/// Result of writing.
#[derive(Debug)]
pub enum Written {
    /// All bytes before this number were written to this stream.
    Up(usize, u64),
    /// The reader of a stream has closed it. Further bytes for it are discarded.
    NoReader,
    /// Writing to this stream failed. Nothing more can be written to it.
    Failed(usize, io::Error),
}

/// Threads that write standard output and error.
#[derive(Debug)]
pub struct Outputs {
    queues: [blocking::Sender<(u64, Vec<u8>)>; 2],
    /// Results of writing.
    pub written: mpsc::UnboundedReceiver<Written>,
}

impl Outputs {
    /// Starts the threads that write.
    ///
    /// # Errors
    /// Fails if a thread cannot be started, or too many files are open.
    pub fn start() -> io::Result<Self> {
        let (done, written) = mpsc::unbounded_channel();
        let errors = queue("errors", 1, stream(io::stderr())?, done.clone())?;
        Ok(Self { queues: [queue("output", 0, stream(io::stdout())?, done)?, errors], written })
    }

    /// Queues bytes to be written to a stream. `offset` is the number of the first one.
    pub fn write(&self, which: usize, offset: u64, bytes: Vec<u8>) {
        // The thread ends only with this value, or after it has reported why.
        let _ = self.queues[which].send((offset, bytes));
    }
}

fn queue(
    name: &str,
    which: usize,
    stream: File,
    done: mpsc::UnboundedSender<Written>,
) -> io::Result<blocking::Sender<(u64, Vec<u8>)>> {
    let (sender, parts) = blocking::channel::<(u64, Vec<u8>)>();
    thread(name, move || {
        let mut has_reader = true;
        for (offset, part) in parts {
            match if has_reader { write(&stream, &part) } else { Ok(()) } {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    has_reader = false;
                    let _ = done.send(Written::NoReader);
                }
                Err(error) => {
                    let _ = done.send(Written::Failed(which, error));
                    return;
                }
            }
            if done.send(Written::Up(which, offset + part.len() as u64)).is_err() {
                return;
            }
        }
    })?;
    Ok(sender)
}

fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// Meaning of a signal of this process for the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// Signal to be sent to the program.
    Signal(u32),
    /// The size of the terminal has changed.
    Resized,
}

/// Signals that are passed on to the program.
pub type Signals = signals::Signals<Heard>;

/// Handles these signals from now on; they no longer end this process.
///
/// # Errors
/// Fails if the handlers cannot be installed.
pub fn signals() -> io::Result<Signals> {
    let kinds = [
        SignalKind::hangup(),
        SignalKind::interrupt(),
        SignalKind::quit(),
        SignalKind::terminate(),
        SignalKind::user_defined1(),
        SignalKind::user_defined2(),
    ];
    let passed_on = |kind: SignalKind| {
        let number = u32::try_from(kind.as_raw_value()).unwrap_or_default();
        (Heard::Signal(number), kind)
    };
    let resized = (Heard::Resized, SignalKind::window_change());
    Signals::hear(kinds.map(passed_on).into_iter().chain([resized]))
}
