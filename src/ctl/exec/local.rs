//! This end of a program: standard streams, each with a thread of its own, as they may block; signals; and the terminal.

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

/// Bytes read at once: as many as one message to a console may have.
pub const PART: usize = 16 << 10;

/// The size of the terminal at this end, if there is one.
pub fn size() -> Option<TerminalSize> {
    let (input, output, errors) = (io::stdin(), io::stdout(), io::stderr());
    let all = [input.as_fd(), output.as_fd(), errors.as_fd()];
    let size = all.into_iter().find_map(|stream| terminal::size(stream).ok())?;
    Some(TerminalSize { rows: size.rows.into(), columns: size.columns.into() })
}

/// Random bytes of the kernel.
///
/// # Errors
/// If it gives none.
pub fn random(bytes: &mut [u8]) -> io::Result<()> {
    File::open("/dev/urandom")?.read_exact(bytes)
}

/// Has the terminal at standard input pass on each key, if there is one.
///
/// # Errors
/// If it does not.
pub fn raw() -> io::Result<Option<Changed>> {
    let input = io::stdin();
    if input.is_terminal() { Changed::raw(input.as_fd()).map(Some) } else { Ok(None) }
}

/// Says something to the person at this end, whatever mode the terminal is in.
pub fn say(words: &str, is_raw: bool) {
    let line = format!("guestctl: {words}{}", if is_raw { "\r\n" } else { "\n" });
    // There is nobody else to tell.
    let _ = io::stderr().write_all(line.as_bytes());
}

/// What is read from standard input, part by part; an empty one is the end, and after an error comes nothing.
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

/// What has become of bytes that were to be written.
#[derive(Debug)]
pub enum Written {
    /// To this stream, all before this number were.
    Up(usize, u64),
    /// The reader of a stream is gone: what else is for it is thrown away.
    NoReader,
    /// To this stream no more can be written.
    Failed(usize, io::Error),
}

/// Standard output and error.
#[derive(Debug)]
pub struct Outputs {
    queues: [blocking::Sender<(u64, Vec<u8>)>; 2],
    /// What was written.
    pub written: mpsc::UnboundedReceiver<Written>,
}

impl Outputs {
    /// Starts writing.
    ///
    /// # Errors
    /// If there are no threads, or no more files can be open.
    pub fn start() -> io::Result<Self> {
        let (done, written) = mpsc::unbounded_channel();
        let errors = queue("errors", 1, stream(io::stderr())?, done.clone())?;
        Ok(Self { queues: [queue("output", 0, stream(io::stdout())?, done)?, errors], written })
    }

    /// Has bytes written, of which the first has this number.
    pub fn write(&self, which: usize, offset: u64, bytes: Vec<u8>) {
        // The thread lives as long as this, or has told why not.
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

/// What a signal of this process means to the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// It is to get this one.
    Signal(u32),
    /// The terminal has another size.
    Resized,
}

/// Signals that are passed on.
pub type Signals = signals::Signals<Heard>;

/// Those are heard from now on, and do not end this process.
///
/// # Errors
/// If they cannot be.
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
