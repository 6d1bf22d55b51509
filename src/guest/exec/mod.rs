//! Programs that a host half runs for people, with their inputs and outputs as streams, or on a terminal.
//!
//! ```text
//! start ──▶ runs ──ended, outputs read──▶ ended ──reported, or after 10 minutes──▶ forgotten
//!             │ no client for too long: SIGHUP; time limit reached, or on request: SIGTERM
//!             └─────────────── 10 s later ──▶ SIGKILL for all of its processes
//! ```
//!
//! Bytes are numbered, and bytes that were not acknowledged are kept ([`ring`]), so that a client that was cut off
//! can continue where it was. A program whose outputs nobody reads blocks on a full pipe. [`Programs::care`] is
//! the one task that looks after all of them. (Programs that QGA clients start are looked after by
//! [`processes`](super::processes); both kinds are started by [`spawn`].)

mod login;
mod members;
mod pipes;
mod program;
pub mod ring;
pub mod state;
mod task;
mod what;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::net::unix::pipe;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::sys::cgroup::Cgroup;
use crate::sys::process_end;
use crate::sys::refused::Refused;
use crate::sys::root::Root;
use crate::sys::spawn::{self, Start};
use crate::sys::spawn_manner::{Manner, give_terminal};
use crate::sys::user_identity::{self, Account};
use crate::sys::{blocking, error_chain};
use members::Members;
use pipes::{Sink, Source, Terminal};
use program::{About, Attendance};
use state::State;

pub use program::{Attached, Program, Standing};
pub use task::{Error, MAX_ARGUMENTS, OnEnd, Task};
use task::{check, command_line, failed};
use what::What;

/// Bytes of each output that are kept, unless the settings say otherwise.
pub const RING: usize = 256 << 10;
/// Maximum number of programs that may run at the same time: of all callers, and of one.
const MAX_RUNNING: usize = 128;
const MAX_OF_ONE: usize = 64;
/// Maximum number of known programs. More than may run, because it includes those that have ended.
const MAX_KNOWN: usize = 192;
/// Maximum number of output bytes that may be kept of all programs. Less than the maximum number of programs times
/// the size of their rings.
const MAX_KEPT: usize = 128 << 20;
/// Time for which the outputs of a program are still read after it has ended.
const PATIENCE: Duration = Duration::from_secs(10);

/// Future that looks after one program; returns the key to remove from the table, or `None` if the program did not
/// start.
type Caring = Pin<Box<dyn Future<Output = Option<Key>> + Send>>;
/// Owner, and an identifier that the owner has chosen.
type Key = (String, String);
type Table = BTreeMap<Key, (u64, Arc<Program>)>;

/// Program that is being started; until this is dropped it counts as if it were in the table.
struct Starting<'p> {
    programs: &'p Programs,
    key: Key,
    /// Maximum number of bytes kept of each of its outputs.
    ring: usize,
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.programs.starting().remove(&self.key);
        self.programs.settled.send_replace(());
    }
}

/// Programs that were started, by all callers.
pub struct Programs {
    /// Programs by owner and identifier, each with a sequence number for their order.
    table: Mutex<Table>,
    /// Programs that are being started, with the bytes that may be kept of each.
    starting: Mutex<BTreeMap<Key, usize>>,
    /// Notifies of each start that has succeeded or failed.
    settled: watch::Sender<()>,
    places: Arc<Semaphore>,
    ring: AtomicUsize,
    begun: mpsc::UnboundedSender<Caring>,
    waiting: tokio::sync::Mutex<mpsc::UnboundedReceiver<Caring>>,
}

impl Default for Programs {
    fn default() -> Self {
        let (begun, waiting) = mpsc::unbounded_channel();
        let places = Arc::new(Semaphore::new(MAX_RUNNING));
        let (table, starting) = (Mutex::default(), Mutex::default());
        let settled = watch::Sender::new(());
        Self { table, starting, settled, places, ring: RING.into(), begun, waiting: waiting.into() }
    }
}

impl fmt::Debug for Programs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Programs").finish_non_exhaustive()
    }
}

/// Returns the account of the user with this name, or of root if the name is empty.
///
/// # Errors
/// If the guest has no such user, or the lookup fails.
pub async fn account(user: &str) -> Result<Account, Error> {
    let name = if user.is_empty() { "root".to_owned() } else { user.to_owned() };
    let asked = name.clone();
    match blocking::run(move || user_identity::find(&asked)).await {
        Ok(Some(account)) => Ok(account),
        Ok(None) => Err(Error::UnknownUser(name)),
        Err(source) => Err(Error::User { user: name, source }),
    }
}

impl Programs {
    /// Sets how many bytes of each output are kept of programs that start from now on.
    pub fn keep(&self, ring: usize) {
        self.ring.store(ring, Ordering::Relaxed);
    }

    /// Starts a program as a user, and attaches the caller to it. `may`, if given, decides whether the program may be
    /// run; it gets the path of the program with every link resolved. A start continues if its caller no longer waits
    /// for it: the program then has no client.
    ///
    /// # Errors
    /// If `may` or the system refuses, the task is invalid, or a limit is reached.
    pub async fn start<E>(
        self: &Arc<Self>,
        root: &Root,
        account: Account,
        task: Task,
        may: Option<impl Fn(&Path) -> Result<(), E> + Send + 'static>,
    ) -> Result<Attached, E>
    where
        E: From<Error> + Send + 'static,
    {
        let (programs, root) = (Arc::clone(self), root.clone());
        let key = (task.owner.clone(), task.id.clone());
        let (reply, started) = oneshot::channel();
        let whole = async move {
            let started = programs.start_whole(&root, account, task, may).await;
            drop(programs);
            match started {
                Ok((attached, attendance)) => {
                    drop(reply.send(Ok(attached)));
                    attendance.run().await;
                    Some(key)
                }
                Err(error) => {
                    drop(reply.send(Err(error)));
                    None
                }
            }
        };
        // Cannot fail: the receiver is a field of the same struct.
        let _ = self.begun.send(Box::pin(whole));
        started.await.unwrap_or_else(|_| Err(Error::System(io::ErrorKind::Interrupted.into()).into()))
    }

    async fn start_whole<E>(
        &self,
        root: &Root,
        account: Account,
        task: Task,
        may: Option<impl Fn(&Path) -> Result<(), E> + Send + 'static>,
    ) -> Result<(Attached, Attendance), E>
    where
        E: From<Error> + Send + 'static,
    {
        check(&task)?;
        if task.is_login {
            login::check(&task)?;
        }
        let key = (task.owner.clone(), task.id.clone());
        let starting = self.make_room(&key, program::outputs(task.terminal.is_some()))?;
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| Error::TooMany)?;
        let Ends { streams, terminal, outputs, input } =
            Ends::make(&task, &account).map_err(Error::System)?;
        let What { program, arguments, environment, identity, directory, or_root, judged } =
            What::of(root, &account, &task);
        let name = program.to_string_lossy().into_owned();
        let command_line = if task.command.is_empty() {
            account.shell.display().to_string()
        } else {
            command_line(&task.command)
        };
        let (group, procs) = Cgroup::make(root, &task.id)
            .inspect_err(|error| tracing::debug!("no control group for a program: {error}"))
            .ok()
            .unzip();
        let manner = Manner::new(identity, directory.clone(), terminal.is_some());
        let manner = manner.or_in_root(or_root).in_cgroup(procs);
        let start =
            Start { program, arguments, environment: Some(environment), streams, manner: Some(manner) };
        let is_login = task.is_login;
        let may = may.map(|may| {
            move |path: &Path| {
                // A shell that does not exist is judged by the path that it was given with.
                let judged =
                    judged.as_ref().map(|shell| shell.canonicalize().unwrap_or_else(|_| shell.clone()));
                may(judged.as_deref().unwrap_or(path)).map_err(Refused::Caller)
            }
        });
        let child = spawn::start(root.clone(), start, may).await.map_err(|refused| match refused {
            Refused::Caller(error) => error,
            Refused::System(source) => match failed(source, name, directory) {
                Error::Program { source, .. } if is_login && source.kind() == io::ErrorKind::NotFound => {
                    Error::NoRunuser.into()
                }
                error => error.into(),
            },
        })?;
        let Some(process_id) = child.id() else {
            return Err(Error::System(io::Error::other("it has no process id")).into());
        };
        // Before Linux 5.3 this is not available: the leftover processes of a login that has ended by itself are then not
        // found.
        let exit = is_login.then(|| process_end::Process::of(process_id.cast_signed())).and_then(Result::ok);
        let about = About {
            id: task.id,
            owner: task.owner,
            process_id,
            user: account.name,
            command: command_line,
            started: SystemTime::now(),
            has_input: task.has_input || terminal.is_some(),
        };
        let now = Instant::now();
        let state = State::new(starting.ring, task.away, now);
        let members = Members::new(root.clone(), process_id, group).with_login(is_login);
        let program = Arc::new(Program::new(about, terminal, members, state));
        let attached = program.attach([Some(0), Some(0)]);
        let mut table = self.table();
        let number = table.values().map(|(number, _)| number + 1).max().unwrap_or(0);
        table.insert(key.clone(), (number, Arc::clone(&program)));
        drop(table);
        let limit = task.limit.and_then(|limit| now.checked_add(limit));
        let on_end = task.on_end;
        let attendance =
            Attendance { program, child, exit, outputs, input, limit, patience: PATIENCE, place, on_end };
        Ok((attached, attendance))
    }

    /// Reserves an entry of the table for one more program with this number of outputs. To make space, the oldest
    /// programs of the same owner that have ended are forgotten; those of other owners are kept for the promised time.
    fn make_room(&self, key: &Key, outputs: usize) -> Result<Starting<'_>, Error> {
        let (table, mut starting) = (self.table(), self.starting());
        if table.contains_key(key) || starting.contains_key(key) {
            return Err(Error::Exists(key.1.clone()));
        }
        if table.keys().chain(starting.keys()).filter(|(owner, _)| *owner == key.0).count() >= MAX_OF_ONE {
            return Err(Error::TooManyOfOne);
        }
        let ring = self.ring.load(Ordering::Relaxed);
        let wanted = outputs * ring;
        // One that is in the table already is about to be removed from `starting`.
        let begun = || starting.iter().filter(|(key, _)| !table.contains_key(key));
        let kept_of_table = table.values().map(|(_, program)| program.most_kept());
        let mut kept: usize = kept_of_table.chain(begun().map(|(_, most)| *most)).sum();
        let mut known = table.len() + begun().count();
        let is_too_much = |known: usize, kept: usize| {
            let is_too_many = (known >= MAX_KNOWN).then_some(Error::TooManyKnown);
            is_too_many.or_else(|| (kept + wanted > MAX_KEPT).then_some(Error::TooMuchKept { wanted, kept }))
        };
        let own = table.iter().filter(|((owner, _), (_, program))| *owner == key.0 && program.is_spent());
        let mut own: Vec<_> = own.map(|(_, (number, program))| (*number, program)).collect();
        own.sort_by_key(|(number, _)| *number);
        let mut gone = Vec::new();
        for (_, program) in own {
            if is_too_much(known, kept).is_none() {
                break;
            }
            known -= 1;
            kept -= program.most_kept();
            gone.push(program);
        }
        if let Some(error) = is_too_much(known, kept) {
            return Err(error);
        }
        for program in gone {
            program.forget();
        }
        starting.insert(key.clone(), wanted);
        Ok(Starting { programs: self, key: key.clone(), ring })
    }

    /// Returns the program with this owner and identifier. Waits for one that is being started: its client may
    /// reconnect before the start is complete.
    pub async fn find(&self, owner: &str, id: &str) -> Option<Arc<Program>> {
        let key = (owner.to_owned(), id.to_owned());
        let mut settled = self.settled.subscribe();
        loop {
            let is_starting = self.starting().contains_key(&key);
            if !is_starting || settled.changed().await.is_err() {
                break;
            }
        }
        self.table().get(&key).map(|(_, program)| Arc::clone(program))
    }

    /// Returns the known programs of an owner, or of all owners, the oldest first.
    pub fn list(&self, owner: Option<&str>) -> Vec<Standing> {
        let table = self.table();
        let own =
            table.values().filter(|(_, program)| owner.is_none_or(|owner| program.about.owner == owner));
        let mut found: Vec<_> = own.collect();
        found.sort_by_key(|(number, _)| *number);
        found.into_iter().map(|(_, program)| program.standing()).collect()
    }

    /// Looks after all started programs; never returns.
    pub async fn care(&self) {
        let mut waiting = self.waiting.lock().await;
        let mut running = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some(begun) = waiting.recv() => running.push(begun),
                Some(gone) = running.next(), if !running.is_empty() => {
                    gone.and_then(|gone| self.table().remove(&gone));
                }
            }
        }
    }

    /// Ends the programs that an earlier run of the agent has left running: their pipes are lost.
    pub fn end_left_over(root: &Root) {
        // First the logins: their sessions can be found only through processes that may be in one of the groups.
        login::end_left_over(root);
        for group in Cgroup::left_over(root) {
            let processes = group.processes().len();
            if processes > 0 {
                tracing::warn!(
                    "ending {processes} processes of a program that an earlier run of the agent left behind"
                );
                group.kill();
            }
        }
    }

    /// Kills all running programs at once: their pipes are lost when this process ends.
    pub fn end_all(&self) {
        let programs: Vec<_> = self.table().values().map(|(_, program)| Arc::clone(program)).collect();
        for program in programs {
            let _ = program.signal(nix::sys::signal::Signal::SIGKILL);
        }
    }

    /// Locks the programs that are being started. Lock order: the table first, where both are locked.
    fn starting(&self) -> MutexGuard<'_, BTreeMap<Key, usize>> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No step under the lock can leave the table half changed, so a poisoned lock is safe to use.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Both ends of the streams that connect a program with the agent.
struct Ends {
    streams: [Option<OwnedFd>; 3],
    terminal: Option<Terminal>,
    outputs: [Option<Source>; 2],
    input: Option<Sink>,
}

impl Ends {
    fn make(task: &Task, account: &Account) -> io::Result<Self> {
        if let Some((_, size)) = &task.terminal {
            let (terminal, end) = Terminal::open(*size)?;
            if let Err(error) = give_terminal(&end, &account.identity) {
                tracing::debug!("cannot change the owner of a terminal: {}", error_chain::words(&error));
            }
            let streams = [Some(end.try_clone()?), Some(end.try_clone()?), Some(end)];
            let outputs = [Some(Source::Terminal(terminal.clone())), None];
            let input = Some(Sink::Terminal(terminal.clone()));
            return Ok(Self { streams, terminal: Some(terminal), outputs, input });
        }
        let (output, output_end) = io::pipe()?;
        let (errors, errors_end) = io::pipe()?;
        let source = |pipe: io::PipeReader| pipe::Receiver::from_owned_fd(pipe.into()).map(Source::Pipe);
        let outputs = [Some(source(output)?), Some(source(errors)?)];
        let mut streams = [None, Some(output_end.into()), Some(errors_end.into())];
        let mut input = None;
        if task.has_input {
            let (input_end, sink) = io::pipe()?;
            streams[0] = Some(input_end.into());
            input = Some(Sink::Pipe(pipe::Sender::from_owned_fd(sink.into())?));
        }
        Ok(Self { streams, terminal: None, outputs, input })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use state::Away;

    fn task(id: &str) -> Task {
        Task {
            id: id.into(),
            owner: "host".into(),
            command: vec!["/bin/sleep".into(), "1000".into()],
            environment: Vec::new(),
            directory: Some("/".into()),
            terminal: None,
            has_input: false,
            limit: None,
            away: Away::Ends(Duration::from_secs(30)),
            on_end: None,
            is_login: false,
        }
    }

    /// After the client is back the program stays silent: the deadline for a program without a client no longer
    /// applies.
    #[tokio::test]
    async fn a_program_whose_client_is_back_in_time_goes_on() {
        let programs = Arc::new(Programs::default());
        let account = account("").await.unwrap();
        let task = Task { away: Away::Ends(Duration::from_millis(500)), ..task("0123456789") };
        let may = None::<fn(&Path) -> Result<(), Error>>;
        let test = async {
            let attached = programs.start(&Root::default(), account, task, may).await.unwrap();
            let program = Arc::clone(attached.program());
            drop(attached);
            tokio::time::sleep(Duration::from_millis(200)).await;
            let mut attached = program.attach([None, None]);
            let told = tokio::time::timeout(Duration::from_secs(1), attached.next()).await;
            assert!(told.is_err(), "{told:?}");
            drop(attached);
            tokio::time::sleep(Duration::from_millis(700)).await;
            let mut attached = program.attach([None, None]);
            let ended = attached.next().await;
            assert!(matches!(&ended, state::News::Ended(ended) if ended.status.is_ok()), "{ended:?}");
        };
        tokio::select! {
            () = programs.care() => {}
            () = test => {}
        }
    }

    /// A connection that breaks in the middle of a start.
    #[tokio::test]
    async fn a_start_that_nobody_waits_for_any_more_is_looked_after_and_found() {
        let programs = Arc::new(Programs::default());
        let Ok(account) = account("").await else { panic!("this machine has no root") };
        let root = Root::default();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let may = move |_: &Path| {
            wait.lock().unwrap().recv().unwrap();
            Ok::<(), Error>(())
        };
        let start = programs.start(&root, account, task("0123456789"), Some(may));
        let test = async {
            assert!(tokio::time::timeout(Duration::from_millis(200), start).await.is_err());
            assert!(programs.list(None).is_empty());
            let finding = programs.find("host", "0123456789");
            let (found, ()) = tokio::join!(finding, async { go.send(()).unwrap() });
            let program = found.unwrap();
            assert!(!program.standing().is_attached);
            let mut attached = program.attach([None, None]);
            program.signal(nix::sys::signal::Signal::SIGKILL).unwrap();
            assert!(matches!(attached.next().await, state::News::Ended(_)));
        };
        tokio::select! {
            () = programs.care() => {}
            () = test => {}
        }
    }
}
