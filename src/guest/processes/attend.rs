//! Looks after one program from its start until nothing more can come from it.

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

/// Bytes taken from a pipe at once.
const PART: usize = 16 * 1024;

/// One program that was started.
pub(super) struct Process {
    pub table: Arc<Mutex<Table>>,
    pub pid: u32,
    /// Tells it from an earlier one with the same process id.
    pub serial: u64,
    /// How long after its end others may hold its outputs open, and what they write still counts as its own.
    pub patience: Duration,
    /// Where those have a place whose pipes others hold after that.
    pub left: Arc<Semaphore>,
}

/// Where the input goes, what it is, and the room that it takes.
pub(super) type Input = (pipe::Sender, Vec<u8>, OwnedSemaphorePermit);

impl Process {
    /// `place` is free again when the program has finished.
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
            // A process that it has started may read the rest of the input, and answer it.
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
        // One too many has its pipes closed.
        let Ok(_place) = self.left.try_acquire() else { return };
        match (fed, read) {
            (false, false) => drop(tokio::join!(feeding, reading)),
            (true, false) => reading.await,
            // Whoever else reads the input has not been told of any.
            (_, true) => {}
        }
    }

    /// Keeps what comes out of a pipe, until it is closed.
    async fn keep(&self, which: Output, pipe: Option<pipe::Receiver>) {
        let Some(pipe) = pipe else { return };
        while pipe.readable().await.is_ok() && self.take(which, &pipe) {
            tokio::task::consume_budget().await;
        }
        lock(&self.table).closed(self.pid, self.serial, which);
    }

    /// Takes what is in a pipe, and says whether more may come.
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
        // A program need not read what it is given.
        tracing::debug!("input was not read: {error}");
    }
}
