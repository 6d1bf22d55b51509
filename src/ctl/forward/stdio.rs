//! `guestctl forward --stdio`: one connection, between a target and standard input and output.
//!
//! Standard streams may block, so each has a thread. A socket pair connects the threads with the event loop.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

use super::call::{Call, Carried, Event, Wanted};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::door::Door;
use crate::ctl::standard;
use crate::sys::error_chain;
use crate::sys::socket::Socket;
use crate::text::target::Target;
use crate::transport::carry::Ended;

/// Exit code after the connection was lost.
const LOST: u8 = 255;
/// Bytes that are read at once.
const PART: usize = 64 << 10;
/// Time for the bytes read from standard input to reach the target after the target has closed its sending
/// side.
const LEFTOVERS: Duration = Duration::from_secs(12);

/// Reasons why the connection has ended.
enum Over {
    /// The connection has ended in this way.
    Ended(Ended),
    /// The connection was refused.
    Refused(Error),
    /// The call was lost. Data that was received before is still to be written.
    Lost(Error, FuturesUnordered<Carried>),
}

/// Carries the connection until the target has closed it, and everything is written to standard output.
///
/// # Errors
/// [`Error::NotRun`] if the connection was lost, or broken by the target.
pub async fn run(door: &Door, name: &str, target: Target) -> Result<(), Error> {
    let (here, there) = StdStream::pair().map_err(failed)?;
    there.set_nonblocking(true).map_err(failed)?;
    let there = UnixStream::from_std(there).map_err(failed)?;
    let wanted = (Socket::Unix(there), target);
    let input_ended = Arc::new(AtomicBool::new(false));
    let (written, mut output) = oneshot::channel();
    let ended = Arc::clone(&input_ended);
    let work = async {
        let line = door.dial().await?;
        // Standard input is read only once the connection exists: data read earlier would be lost if the connection
        // fails.
        line.over(async |daemon| converse(&daemon, name, wanted, || start(&here, ended, written)).await).await
    };
    let mut work = Box::pin(work);
    let over = tokio::select! {
        over = &mut work => over?,
        written = &mut output => {
            // The target sends no more, but data sent to it earlier still has to arrive.
            outcome(written)?;
            if input_ended.load(Ordering::Acquire) {
                let _ = tokio::time::timeout(LEFTOVERS, work).await;
            }
            return Ok(());
        }
    };
    let ended = match over {
        Over::Refused(error) => return Err(error),
        Over::Ended(ended) => Ok(ended),
        Over::Lost(error, mut running) => {
            while running.next().await.is_some() {}
            Err(error)
        }
    };
    // Everything that was received is written first.
    outcome(output.await)?;
    match ended? {
        Ended::Well => Ok(()),
        Ended::Reset => Err(Error::NotRun(format!("the target in {name} has reset the connection"), LOST)),
        Ended::Broken(reason) => {
            Err(Error::NotRun(format!("standard input and output have broken: {reason}"), LOST))
        }
    }
}

fn failed(error: io::Error) -> Error {
    Error::Read("standard input".to_owned(), error)
}

fn outcome(written: Result<io::Result<()>, oneshot::error::RecvError>) -> Result<(), Error> {
    // A thread that ended without a result was never started.
    written.unwrap_or(Ok(())).map_err(Error::Print)
}

/// Opens a call that carries one connection. `start` is called once the connection exists.
async fn converse(
    daemon: &Daemon,
    name: &str,
    wanted: Wanted,
    start: impl FnOnce() -> io::Result<()>,
) -> Result<Over, Error> {
    let mut call = match Call::open(daemon, name).await {
        Ok(call) => call,
        Err(lost) => return Ok(Over::Refused(lost.into_error())),
    };
    start().map_err(failed)?;
    call.connect(wanted);
    Ok(match call.next().await {
        Ok(Event::Refused(target, reason)) => {
            Over::Refused(Error::Program(format!("cannot reach {target} in {name}: {reason}")))
        }
        Ok(Event::Ended(ended)) => {
            if ended == Ended::Well {
                call.farewell().await;
            }
            Over::Ended(ended)
        }
        Err(lost) => {
            let words = format!("lost the connection to {name}: {}", error_chain::words(&lost.into_error()));
            Over::Lost(Error::NotRun(words, LOST), call.lose())
        }
    })
}

/// Starts the threads. `written` receives the result of standard output after the last byte.
fn start(
    here: &StdStream,
    input_ended: Arc<AtomicBool>,
    written: oneshot::Sender<io::Result<()>>,
) -> io::Result<()> {
    let (mut from_guest, mut to_guest) = (here.try_clone()?, here.try_clone()?);
    let (mut input, mut output) = (standard::stream(io::stdin())?, standard::stream(io::stdout())?);
    thread("input", move || {
        // The other end notices which side broke. An input that cannot be read counts as ended.
        if let Err(error) = copy(&mut input, &mut to_guest) {
            tracing::debug!("standard input: {error}");
        }
        let _ = to_guest.shutdown(Shutdown::Write);
        input_ended.store(true, Ordering::Release);
    })?;
    thread("output", move || {
        let done = copy(&mut from_guest, &mut output);
        if done.is_err() {
            // This lets the target know that its output is no longer read.
            let _ = from_guest.shutdown(Shutdown::Both);
        }
        let _ = written.send(done);
    })
}

fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// Copies until the end of the input.
fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut part = vec![0; PART];
    loop {
        let length = match from.read(&mut part) {
            Ok(0) => return Ok(()),
            Ok(length) => length,
            Err(error) => {
                standard::may_try_again(error)?;
                continue;
            }
        };
        standard::write(&mut *to, part.get(..length).unwrap_or_default())?;
    }
}
