//! Programs that clients start: what they write is kept, within bounds, until somebody asks how they ended.
//!
//! ```text
//! start ──▶ running ──ended──▶ draining ──pipes closed, or too late──▶ finished ──asked for, old, or too many──▶ gone
//! ```
//!
//! A program that has ended runs on for those who ask until its outputs are closed, too: what a process writes that it has
//! started is its output as well. One that holds them for good, such as a daemon, is waited for no longer than
//! [`Processes::wait_for_outputs`] says; then they count as cut off, and what comes later is read and thrown away, so that
//! nobody dies of it. [`Processes::care`] is the one task that looks after
//! all of them; the table of results is shared with those who ask.

mod attend;
mod table;

use std::fmt;
use std::future::pending;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::net::unix::pipe;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::sleep_until;

use crate::sys::refused::Refused;
use crate::sys::root::Root;
use crate::sys::spawn::{self, Start};
use table::Table;

pub use table::{Ended, Kept, State};

/// Programs that may run at the same time.
pub const MAX_RUNNING: usize = 256;
/// How long after a program's end its outputs are waited for, unless the settings say otherwise.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Programs that have ended and whose pipes are still held open by others; those of one more are closed.
const MAX_LEFT: usize = 64;
/// Bytes of each output of a program that are kept.
pub const MAX_OUTPUT: usize = 16 << 20;
/// Bytes of input that wait to be read by all programs together.
const MAX_INPUT: usize = 64 << 20;

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// [`MAX_RUNNING`] programs run.
    #[error("{MAX_RUNNING} programs are running, which is the limit")]
    TooMany,
    /// Others have not read theirs.
    #[error("running programs have not read {} MiB of their input yet, and no more is accepted", MAX_INPUT >> 20)]
    TooMuchInput,
    /// The system's refusal.
    #[error("cannot run {program}")]
    Start {
        /// As it was given.
        program: String,
        /// The reason.
        source: io::Error,
    },
}

/// Which outputs are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Capture {
    /// None; they go to /dev/null.
    #[default]
    None,
    /// The standard output.
    Output,
    /// The standard error.
    Errors,
    /// Both, each by itself.
    Separated,
    /// Both as one, in the order in which they were written.
    Merged,
}

/// What to run.
#[derive(Debug)]
pub struct Task {
    /// The name or path of the program.
    pub program: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Its whole environment; else the agent's, but for what the service manager tells the agent.
    pub environment: Option<Vec<(String, String)>>,
    /// What it reads; else nothing.
    pub input: Option<Vec<u8>>,
    /// What is kept of what it writes.
    pub capture: Capture,
}

type Attendance = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The programs that were started.
pub struct Processes {
    table: Arc<Mutex<Table>>,
    places: Arc<Semaphore>,
    left: Arc<Semaphore>,
    /// Milliseconds.
    patience: AtomicU64,
    /// Permits are KiB.
    input: Arc<Semaphore>,
    begun: mpsc::UnboundedSender<Attendance>,
    waiting: tokio::sync::Mutex<mpsc::UnboundedReceiver<Attendance>>,
}

impl Default for Processes {
    fn default() -> Self {
        let (begun, waiting) = mpsc::unbounded_channel();
        Self {
            table: Arc::default(),
            places: Arc::new(Semaphore::new(MAX_RUNNING)),
            left: Arc::new(Semaphore::new(MAX_LEFT)),
            patience: AtomicU64::new(milliseconds(PATIENCE)),
            input: Arc::new(Semaphore::new(MAX_INPUT >> 10)),
            begun,
            waiting: waiting.into(),
        }
    }
}

impl fmt::Debug for Processes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Processes").finish_non_exhaustive()
    }
}

/// Outputs that were told and are still in memory; they count as such until this is dropped.
pub struct Sending {
    table: Arc<Mutex<Table>>,
    bytes: usize,
}

impl Drop for Sending {
    fn drop(&mut self) {
        lock(&self.table).sent(self.bytes);
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Processes {
    /// How long after the end of programs that are started from now on their outputs are waited for.
    pub fn wait_for_outputs(&self, patience: Duration) {
        self.patience.store(milliseconds(patience), Ordering::Relaxed);
    }

    /// Starts a program and gives its process id; `may`, if there is something to ask, is asked about the path that
    /// the program has when every link is followed.
    ///
    /// # Errors
    /// If `may` or the system refuses, or too much runs. A program that cannot be executed is an error and not one
    /// that ends.
    pub async fn start<E>(
        &self,
        root: &Root,
        task: Task,
        may: Option<impl Fn(&Path) -> Result<(), E> + Send + 'static>,
    ) -> Result<u32, E>
    where
        E: From<Error> + Send + 'static,
    {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| Error::TooMany)?;
        let name = task.program.clone();
        let failed = |source| Error::Start { program: name.clone(), source };
        let mut pipes = Pipes::default();
        let input = match task.input {
            None => None,
            Some(bytes) => {
                let size = u32::try_from(bytes.len() >> 10).map_err(|_| Error::TooMuchInput)?;
                let taken = Arc::clone(&self.input).try_acquire_many_owned(size);
                let taken = taken.map_err(|_| Error::TooMuchInput)?;
                Some((pipes.input().map_err(failed)?, bytes, taken))
            }
        };
        let outputs = pipes.outputs(task.capture).map_err(failed)?;
        let Pipes { streams } = pipes;
        let Task { program, arguments, environment, .. } = task;
        let start = Start {
            program: program.into(),
            arguments: arguments.into_iter().map(Into::into).collect(),
            environment: environment
                .map(|all| all.into_iter().map(|(name, value)| (name.into(), value.into())).collect()),
            streams,
            manner: None,
        };
        let may = may.map(|may| move |path: &Path| may(path).map_err(Refused::Caller));
        let child = spawn::start(root.clone(), start, may).await.map_err(|refused| match refused {
            Refused::Caller(error) => error,
            Refused::System(source) => failed(source).into(),
        })?;
        let Some(pid) = child.id() else {
            return Err(failed(io::Error::other("it has no process id")).into());
        };
        let serial = lock(&self.table).begin(pid);
        let process = attend::Process {
            table: Arc::clone(&self.table),
            pid,
            serial,
            patience: Duration::from_millis(self.patience.load(Ordering::Relaxed)),
            left: Arc::clone(&self.left),
        };
        let attendance = Box::pin(process.attend(place, child, input, outputs));
        // The receiver is a part of this very struct.
        let _ = self.begun.send(attendance);
        Ok(pid)
    }

    /// Bytes of what [`Processes::state`] would tell of a program's outputs.
    pub fn size(&self, pid: i64) -> usize {
        u32::try_from(pid).map_or(0, |pid| lock(&self.table).size(pid))
    }

    /// How a program does. Once it is told that it has finished, it is forgotten; its outputs are in memory for as long as
    /// they are held with what comes beside them.
    pub fn state(&self, pid: i64) -> Option<(State, Sending)> {
        let pid = u32::try_from(pid).ok()?;
        let mut table = lock(&self.table);
        let bytes = table.size(pid);
        let state = table.take(pid)?;
        table.sending(bytes);
        Some((state, Sending { table: Arc::clone(&self.table), bytes }))
    }

    /// Looks after what was started, for ever.
    pub async fn care(&self) {
        let mut waiting = self.waiting.lock().await;
        let mut running = FuturesUnordered::new();
        loop {
            let expiry = lock(&self.table).expire(Instant::now());
            tokio::select! {
                Some(begun) = waiting.recv() => running.push(begun),
                Some(()) = running.next(), if !running.is_empty() => {}
                () = async {
                    match expiry {
                        Some(expiry) => sleep_until(expiry.into()).await,
                        None => pending().await,
                    }
                } => {}
            }
        }
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The program's ends of its pipes.
#[derive(Default)]
struct Pipes {
    streams: [Option<OwnedFd>; 3],
}

impl Pipes {
    fn input(&mut self) -> io::Result<pipe::Sender> {
        let (reader, writer) = io::pipe()?;
        self.streams[0] = Some(reader.into());
        pipe::Sender::from_owned_fd(writer.into())
    }

    fn outputs(&mut self, capture: Capture) -> io::Result<[Option<pipe::Receiver>; 2]> {
        let mut receivers = [None, None];
        let wanted = match capture {
            Capture::None => [false, false],
            Capture::Output | Capture::Merged => [true, false],
            Capture::Errors => [false, true],
            Capture::Separated => [true, true],
        };
        for place in [0, 1] {
            if wanted[place] {
                let (reader, writer) = io::pipe()?;
                self.streams[place + 1] = Some(writer.into());
                receivers[place] = Some(pipe::Receiver::from_owned_fd(reader.into())?);
            }
        }
        if capture == Capture::Merged {
            self.streams[2] = self.streams[1].as_ref().map(OwnedFd::try_clone).transpose()?;
        }
        Ok(receivers)
    }
}
