//! This end of a program: standard streams, each with a thread of its own, as they may block; signals; and the terminal.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read as _, Write};
use std::os::fd::AsFd as _;
use std::sync::mpsc as blocking;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::replay::WINDOW;
use crate::sys::terminal::{self, Raw};
use crate::wire::proto::v1::TerminalSize;

/// Bytes read at once.
const PART: usize = WINDOW / 4;

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
pub fn raw() -> io::Result<Option<Raw>> {
    let input = io::stdin();
    if input.is_terminal() { Raw::make(input.as_fd()).map(Some) } else { Ok(None) }
}

/// Says something to the person at this end, whatever mode the terminal is in.
#[allow(clippy::print_stderr, reason = "what a person should know, beside the output of the program")]
pub fn say(words: &str, is_raw: bool) {
    eprint!("guestctl: {words}{}", if is_raw { "\r\n" } else { "\n" });
}

/// What is read from standard input, part by part; an empty one is the end.
pub fn input() -> io::Result<mpsc::Receiver<Vec<u8>>> {
    let (parts, receiver) = mpsc::channel(1);
    thread("input", move || {
        let mut input = io::stdin().lock();
        let mut part = vec![0; PART];
        loop {
            let length = match input.read(&mut part) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // What cannot be read has no more.
                read => read.unwrap_or(0),
            };
            if parts.blocking_send(part[..length].to_vec()).is_err() || length == 0 {
                return;
            }
        }
    })?;
    Ok(receiver)
}

/// What was written: to which stream, and up to which number; or that nobody reads it any more.
#[derive(Debug)]
pub enum Written {
    /// All bytes before this number.
    Up(usize, u64),
    /// The reader is gone.
    Broken,
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
    /// If there are no threads.
    pub fn start() -> io::Result<Self> {
        let (done, written) = mpsc::unbounded_channel();
        let errors = queue("errors", 1, io::stderr(), done.clone())?;
        Ok(Self { queues: [queue("output", 0, io::stdout(), done)?, errors], written })
    }

    /// Has bytes written, of which the first has this number.
    pub fn write(&self, which: usize, offset: u64, bytes: Vec<u8>) {
        // The thread lives as long as this.
        let _ = self.queues[which].send((offset, bytes));
    }
}

fn queue(
    name: &str,
    which: usize,
    mut stream: impl Write + Send + 'static,
    done: mpsc::UnboundedSender<Written>,
) -> io::Result<blocking::Sender<(u64, Vec<u8>)>> {
    let (sender, parts) = blocking::channel::<(u64, Vec<u8>)>();
    thread(name, move || {
        let mut is_broken = false;
        for (offset, part) in parts {
            if !is_broken && stream.write_all(&part).and_then(|()| stream.flush()).is_err() {
                is_broken = true;
                let _ = done.send(Written::Broken);
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
pub struct Signals(Vec<(Heard, Signal)>);

impl Signals {
    /// Those are heard from now on, and do not end this process.
    ///
    /// # Errors
    /// If they cannot be.
    pub fn hear() -> io::Result<Self> {
        let mut all = Vec::new();
        let kinds = [
            SignalKind::hangup(),
            SignalKind::interrupt(),
            SignalKind::quit(),
            SignalKind::terminate(),
            SignalKind::user_defined1(),
            SignalKind::user_defined2(),
        ];
        for kind in kinds {
            let number = u32::try_from(kind.as_raw_value()).unwrap_or_default();
            all.push((Heard::Signal(number), signal(kind)?));
        }
        all.push((Heard::Resized, signal(SignalKind::window_change())?));
        Ok(Self(all))
    }

    /// The next one.
    pub async fn next(&mut self) -> Heard {
        std::future::poll_fn(|context| {
            for (heard, signal) in &mut self.0 {
                if let std::task::Poll::Ready(Some(())) = signal.poll_recv(context) {
                    return std::task::Poll::Ready(*heard);
                }
            }
            std::task::Poll::Pending
        })
        .await
    }
}
