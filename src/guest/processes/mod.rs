//! Programs that clients start: their outputs are kept, within bounds, until a client asks how they ended.
//!
//! ```text
//! start ──▶ running ──ended──▶ draining ──pipes closed, or timeout──▶ finished ──fetched, old, or too many──▶ forgotten
//! ```
//!
//! Clients see a program that has ended as running until its outputs are closed as well: the output of processes
//! that it has started counts as its own. A process that never closes them, such as a daemon, is waited for no
//! longer than [`Processes::wait_for_outputs`] says. Then the outputs count as truncated, and later output is read
//! and discarded, so that no process is killed by a closed pipe. [`Processes::care`] is the one task that looks
//! after all programs; it shares the table of results with callers.

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

/// Maximum number of programs that may run at the same time.
pub const MAX_RUNNING: usize = 256;
/// Time for which the outputs of a program are still read after it has ended, unless the settings say otherwise.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of programs that have ended but whose pipes others still hold open; the pipes of one more are
/// closed.
const MAX_LEFT: usize = 64;
/// Maximum number of bytes of each output of a program that are kept.
pub const MAX_OUTPUT: usize = 16 << 20;
/// Maximum number of input bytes that wait to be read by all programs together.
const MAX_INPUT: usize = 64 << 20;

/// Reason why no program was started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// [`MAX_RUNNING`] programs are running.
    #[error("{MAX_RUNNING} programs are running, which is the limit")]
    TooMany,
    /// Other programs have not read their input yet, and the memory for it is used up.
    #[error("running programs have not read {} MiB of their input yet, and no more is accepted", MAX_INPUT >> 20)]
    TooMuchInput,
    /// The operating system refused to start the program.
    #[error("cannot run {program}")]
    Start {
        /// Name or path of the program, as given.
        program: String,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Selection of the outputs that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Capture {
    /// No output is kept; both go to /dev/null.
    #[default]
    None,
    /// Standard output only.
    Output,
    /// Standard error only.
    Errors,
    /// Both outputs, separately.
    Separated,
    /// Both outputs as one, in the order in which they were written.
    Merged,
}

/// Program to run, and how to run it.
#[derive(Debug)]
pub struct Task {
    /// Name or path of the program.
    pub program: String,
    /// Arguments, without the name of the program.
    pub arguments: Vec<String>,
    /// Whole environment of the program; if `None`, that of the agent without the variables that the service manager
    /// sets for it.
    pub environment: Option<Vec<(String, String)>>,
    /// Standard input; /dev/null if `None`.
    pub input: Option<Vec<u8>>,
    /// Outputs to keep.
    pub capture: Capture,
}

type Attendance = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Programs that clients have started with guest-exec.
pub struct Processes {
    table: Arc<Mutex<Table>>,
    places: Arc<Semaphore>,
    left: Arc<Semaphore>,
    /// Time to read outputs after a program's end, in milliseconds.
    patience: AtomicU64,
    /// Memory for input that was not read yet; one permit is 1 KiB.
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

/// Outputs that are being sent to a client and are still in memory; they count as kept until this is dropped.
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
    /// Sets the time for which outputs are still read after the end of programs that start from now on.
    pub fn wait_for_outputs(&self, patience: Duration) {
        self.patience.store(milliseconds(patience), Ordering::Relaxed);
    }

    /// Starts a program and returns its PID. `may`, if given, decides whether the program may be run; it gets the path
    /// of the program with every link resolved.
    ///
    /// # Errors
    /// If `may` or the system refuses, or a limit is reached. A program that cannot be executed is an error of the
    /// start, and not a program that ends.
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
        // Cannot fail: the receiver is a field of the same struct.
        let _ = self.begun.send(attendance);
        Ok(pid)
    }

    /// Returns how many bytes of a program's outputs [`Processes::state`] would return.
    pub fn size(&self, pid: i64) -> usize {
        u32::try_from(pid).map_or(0, |pid| lock(&self.table).size(pid))
    }

    /// Returns the state of a program. A program that is reported as finished is forgotten at once; its outputs count
    /// as in memory until the returned `Sending` is dropped.
    pub fn state(&self, pid: i64) -> Option<(State, Sending)> {
        let pid = u32::try_from(pid).ok()?;
        let mut table = lock(&self.table);
        let bytes = table.size(pid);
        let state = table.take(pid)?;
        table.sending(bytes);
        Some((state, Sending { table: Arc::clone(&self.table), bytes }))
    }

    /// Looks after all started programs; never returns.
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

/// Program's ends of its pipes.
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
