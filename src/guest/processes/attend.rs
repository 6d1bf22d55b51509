//! Task that looks after one program, from its start until no more output can come from it.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::pipe;
use tokio::process::Child;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::guest::processes::lock;
use crate::guest::processes::table::{Output, Table};

/// Maximum number of bytes read from a pipe at once.
const PART: usize = 16 * 1024;

/// Program that was started.
pub(super) struct Process {
    pub table: Arc<Mutex<Table>>,
    pub pid: u32,
    /// Serial number that distinguishes the program from an earlier one with the same PID.
    pub serial: u64,
    /// Time after the program's end for which other processes may hold its outputs open and still add to them.
    pub patience: Duration,
    /// Slots for programs that have ended but whose pipes other processes still hold open after that time.
    pub left: Arc<Semaphore>,
}

/// Pipe to the program's input, the bytes to write, and the memory reserved for them.
pub(super) type Input = (pipe::Sender, Vec<u8>, OwnedSemaphorePermit);

impl Process {
    /// Looks after the program; `place` is released when it has finished.
    pub async fn attend(
        self,
        place: OwnedSemaphorePermit,
        mut child: Child,
        input: Option<Input>,
        outputs: [Option<pipe::Receiver>; 2],
    ) {
        let mut feeding = pin!(feed(input));
        let [output, errors] = outputs;
        lock(&self.table).opened(self.pid, self.serial, [output.is_some(), errors.is_some()]);
        let mut reading = pin!(async {
            tokio::join!(self.keep(Output::Output, output), self.keep(Output::Errors, errors));
        });
        let (mut fed, mut read) = (false, false);
        let status = loop {
            tokio::select! {
                status = child.wait() => break status,
                () = &mut feeding, if !fed => fed = true,
                () = &mut reading, if !read => read = true,
            }
        };
        if !read {
            // A process that the program has started may still read the input, and write output in return.
            let draining = async {
                loop {
                    tokio::select! {
                        () = &mut feeding, if !fed => fed = true,
                        () = &mut reading => break,
                    }
                }
            };
            read = timeout(self.patience, draining).await.is_ok();
        }
        let status = status.inspect_err(|error| {
            tracing::warn!("cannot find out how process {} ended: {error}", self.pid);
        });
        lock(&self.table).finish(self.pid, self.serial, status.unwrap_or_default(), Instant::now());
        drop(place);
        // Beyond the maximum, the pipes of this program are closed.
        let Ok(_place) = self.left.try_acquire() else { return };
        match (fed, read) {
            (false, false) => drop(tokio::join!(feeding, reading)),
            (true, false) => reading.await,
            // Any other process that reads the input was not promised any.
            (_, true) => {}
        }
    }

    /// Keeps the output from a pipe until it is closed.
    async fn keep(&self, which: Output, pipe: Option<pipe::Receiver>) {
        let Some(pipe) = pipe else { return };
        while pipe.readable().await.is_ok() && self.take(which, &pipe) {
            tokio::task::consume_budget().await;
        }
        lock(&self.table).closed(self.pid, self.serial, which);
    }

    /// Reads the available output, and returns whether more may come.
    fn take(&self, which: Output, pipe: &pipe::Receiver) -> bool {
        let mut part = [0; PART];
        match pipe.try_read(&mut part) {
            Ok(0) => false,
            Ok(length) => {
                lock(&self.table).append(self.pid, self.serial, which, &part[..length]);
                true
            }
            Err(error) => {
                matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted)
            }
        }
    }
}

async fn feed(input: Option<Input>) {
    if let Some((mut pipe, bytes, _room)) = input
        && let Err(error) = pipe.write_all(&bytes).await
    {
        // No error to report: a program need not read its input.
        tracing::debug!("input was not read: {error}");
    }
}
