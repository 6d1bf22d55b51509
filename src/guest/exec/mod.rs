//! Programs that a host half runs for people, with their inputs and outputs as streams, or on a terminal.
//!
//! ```text
//! start ──▶ runs ──ended, outputs read──▶ ended ──told, or after 10 minutes──▶ gone
//!             │ nobody attached for too long: SIGHUP; too long altogether, or asked for: SIGTERM
//!             └─────────────── 10 s later ──▶ SIGKILL for all of it
//! ```
//!
//! Bytes have numbers, and what was not acknowledged is kept ([`ring`]), so that whoever is cut off can go on where it was. A
//! program whose outputs nobody takes waits in a full pipe. [`Programs::care`] is the one task that looks after all of them.
//! (What QGA clients start is looked after by [`processes`](super::processes); both are started by [`spawn`].)

mod members;
mod pipes;
mod program;
pub mod ring;
pub mod state;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::net::unix::pipe;
use tokio::sync::{Semaphore, mpsc};

use crate::sys::cgroup::Cgroup;
use crate::sys::refused::Refused;
use crate::sys::root::Root;
use crate::sys::spawn::{self, Start};
use crate::sys::spawn_manner::{self, Manner, Step, give_terminal};
use crate::sys::terminal::Size;
use crate::sys::user_identity::{self, Account};
use crate::sys::{blocking, error_chain};
use members::Members;
use pipes::{Sink, Source, Terminal};
use program::{About, Attendance};
use state::{Away, State};

pub use program::{Attached, Program, Standing};

/// Bytes of each output that are kept, unless the settings say otherwise.
pub const RING: usize = 256 << 10;
/// Programs that may run at the same time, of all callers and of one.
const MAX_RUNNING: usize = 128;
const MAX_OF_ONE: usize = 64;
/// Those of which anything is known, which are more: some have ended.
const MAX_KNOWN: usize = 192;
/// Bytes of arguments and variables.
pub const MAX_ARGUMENTS: usize = 256 << 10;
/// Characters of a command line that are told.
const MAX_COMMAND: usize = 1024;
/// How long the outputs of a program are waited for after its end.
const PATIENCE: Duration = Duration::from_secs(10);
/// Where programs are looked for.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// As many run as may.
    #[error("{MAX_RUNNING} programs run in this guest, and no more may")]
    TooMany,
    /// As many are known of this caller as may be.
    #[error(
        "{MAX_OF_ONE} programs of this caller run, or have ended unseen, and no more may; guestctl ps lists them"
    )]
    TooManyOfOne,
    /// There is one of this identifier.
    #[error("there is a program {0} already")]
    Exists(String),
    /// Not an identifier.
    #[error("the identifier {0:?} is not 8 to 32 of 0-9 and a-f")]
    Identifier(String),
    /// Nothing to run.
    #[error("no program is named")]
    Nothing,
    /// More than [`MAX_ARGUMENTS`].
    #[error("the arguments and variables have {0} bytes; at most {MAX_ARGUMENTS} are allowed")]
    TooLong(usize),
    /// What no program can be given.
    #[error("{0} has a NUL byte")]
    Nul(&'static str),
    /// Not a variable.
    #[error("{0:?} is not the name of a variable")]
    Variable(String),
    /// Not a terminal.
    #[error("{0:?} is not a kind of terminal")]
    TerminalKind(String),
    /// The name service does not know it.
    #[error("this guest has no user {0:?}")]
    UnknownUser(String),
    /// The name service does not answer.
    #[error("cannot look up the user {user:?}")]
    User {
        /// As it was given.
        user: String,
        /// The reason.
        source: io::Error,
    },
    /// The directory cannot be entered.
    #[error("cannot start in {}", .directory.display())]
    Directory {
        /// As it was given.
        directory: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The program cannot be executed.
    #[error("cannot run {program}")]
    Program {
        /// As it was given.
        program: String,
        /// The reason.
        source: io::Error,
    },
    /// Anything else.
    #[error("cannot start a program")]
    System(#[source] io::Error),
}

/// What to run.
pub struct Task {
    /// Chosen by whoever starts it.
    pub id: String,
    /// Whose it is: nobody else can use it.
    pub owner: String,
    /// The program and its arguments.
    pub command: Vec<OsString>,
    /// Variables besides the usual ones.
    pub environment: Vec<(OsString, OsString)>,
    /// Where it starts; else at home.
    pub directory: Option<PathBuf>,
    /// The kind of the terminal and its size, if it has one.
    pub terminal: Option<(String, Size)>,
    /// It reads what is sent.
    pub has_input: bool,
    /// For how long it may run.
    pub limit: Option<Duration>,
    /// What becomes of it without a client.
    pub away: Away,
    /// Is told how it ended.
    pub on_end: Option<OnEnd>,
}

/// Is told how a program ended.
pub type OnEnd = Box<dyn FnOnce(&state::Ended) + Send>;

type Caring = Pin<Box<dyn Future<Output = (String, String)> + Send>>;
/// An owner, and an identifier of its choice.
type Key = (String, String);
type Table = BTreeMap<Key, (u64, Arc<Program>)>;

/// A program that is being started counts as one that is there.
struct Starting<'p> {
    programs: &'p Programs,
    key: Key,
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.programs.starting().remove(&self.key);
    }
}

/// The programs that were started.
pub struct Programs {
    /// By owner and identifier, with a number that grows.
    table: Mutex<Table>,
    starting: Mutex<BTreeSet<Key>>,
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
        Self { table, starting, places, ring: RING.into(), begun, waiting: waiting.into() }
    }
}

impl fmt::Debug for Programs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Programs").finish_non_exhaustive()
    }
}

/// The user of this name, or root if it is empty.
///
/// # Errors
/// If the guest has none.
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
    /// So many bytes of each output are kept of programs that are started from now on.
    pub fn keep(&self, ring: usize) {
        self.ring.store(ring, Ordering::Relaxed);
    }

    /// Starts a program as a user, and attaches whoever has asked for it; `may`, if there is something to ask, is asked about
    /// the path that the program has when every link is followed.
    ///
    /// # Errors
    /// If `may` or the system refuses, something is wrong with the task, or too much runs.
    pub async fn start<E>(
        &self,
        root: &Root,
        account: Account,
        task: Task,
        may: Option<impl Fn(&Path) -> Result<(), E> + Send + 'static>,
    ) -> Result<Attached, E>
    where
        E: From<Error> + Send + 'static,
    {
        check(&task)?;
        let key = (task.owner.clone(), task.id.clone());
        let _starting = self.make_room(&key)?;
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| Error::TooMany)?;
        let Ends { streams, terminal, outputs, input } =
            Ends::make(&task, &account).map_err(Error::System)?;
        let home = if account.home.is_dir() { account.home.clone() } else { PathBuf::from("/") };
        let directory = task.directory.clone().unwrap_or(home);
        let command_line = command_line(&task.command);
        let environment = environment(&account, &task);
        let mut command = task.command.into_iter();
        let program = command.next().unwrap_or_default();
        let name = program.to_string_lossy().into_owned();
        let (group, procs) = Cgroup::make(root, &task.id)
            .inspect_err(|error| tracing::debug!("no control group for a program: {error}"))
            .ok()
            .unzip();
        let manner = Manner::new(account.identity, directory.clone(), terminal.is_some()).in_cgroup(procs);
        let arguments = command.collect();
        let start =
            Start { program, arguments, environment: Some(environment), streams, manner: Some(manner) };
        let may = may.map(|may| move |path: &Path| may(path).map_err(Refused::Caller));
        let child = spawn::start(root.clone(), start, may).await.map_err(|refused| match refused {
            Refused::Caller(error) => error,
            Refused::System(source) => failed(source, name, directory).into(),
        })?;
        let Some(process_id) = child.id() else {
            return Err(Error::System(io::Error::other("it has no process id")).into());
        };
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
        let state = State::new(self.ring.load(Ordering::Relaxed), task.away, now);
        let members = Members::new(root.clone(), process_id, group);
        let program = Arc::new(Program::new(about, terminal, members, state));
        let attached = program.attach([Some(0), Some(0)]);
        let mut table = self.table();
        let number = table.values().map(|(number, _)| number + 1).max().unwrap_or(0);
        table.insert(key.clone(), (number, Arc::clone(&program)));
        drop(table);
        let limit = task.limit.and_then(|limit| now.checked_add(limit));
        let on_end = task.on_end;
        let attendance =
            Attendance { program, child, outputs, input, limit, patience: PATIENCE, place, on_end };
        // The receiver is a part of this very struct.
        let _ = self.begun.send(Box::pin(async move {
            attendance.run().await;
            key
        }));
        Ok(attached)
    }

    /// A place in the table for one more, which is taken until the program is in it.
    fn make_room(&self, key: &Key) -> Result<Starting<'_>, Error> {
        let (table, mut starting) = (self.table(), self.starting());
        if table.contains_key(key) || starting.contains(key) {
            return Err(Error::Exists(key.1.clone()));
        }
        if table.keys().chain(starting.iter()).filter(|(owner, _)| *owner == key.0).count() >= MAX_OF_ONE {
            return Err(Error::TooManyOfOne);
        }
        if table.len() >= MAX_KNOWN {
            let ended = table.values().filter(|(_, program)| program.standing().ended.is_some());
            if let Some((_, oldest)) = ended.min_by_key(|(number, _)| *number) {
                oldest.forget();
            }
        }
        starting.insert(key.clone());
        Ok(Starting { programs: self, key: key.clone() })
    }

    /// The program of this owner and identifier.
    pub fn find(&self, owner: &str, id: &str) -> Option<Arc<Program>> {
        self.table().get(&(owner.to_owned(), id.to_owned())).map(|(_, program)| Arc::clone(program))
    }

    /// What is known of an owner's programs, or of all, the oldest first.
    pub fn list(&self, owner: Option<&str>) -> Vec<Standing> {
        let table = self.table();
        let own =
            table.values().filter(|(_, program)| owner.is_none_or(|owner| program.about.owner == owner));
        let mut found: Vec<_> = own.collect();
        found.sort_by_key(|(number, _)| *number);
        found.into_iter().map(|(_, program)| program.standing()).collect()
    }

    /// Looks after what was started, for ever.
    pub async fn care(&self) {
        let mut waiting = self.waiting.lock().await;
        let mut running = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some(begun) = waiting.recv() => running.push(begun),
                Some(gone) = running.next(), if !running.is_empty() => drop(self.table().remove(&gone)),
            }
        }
    }

    /// Ends what an earlier run of the agent has left running: nobody has its pipes.
    pub fn end_left_over(root: &Root) {
        for group in Cgroup::left_over(root) {
            let processes = group.processes().len();
            if processes > 0 {
                tracing::warn!(
                    "an earlier run of the agent has left {processes} processes of a program, which are ended"
                );
                group.kill();
            }
        }
    }

    /// Ends what runs, at once: without this process nobody has its pipes.
    pub fn end_all(&self) {
        let programs: Vec<_> = self.table().values().map(|(_, program)| Arc::clone(program)).collect();
        for program in programs {
            let _ = program.signal(nix::sys::signal::Signal::SIGKILL);
        }
    }

    /// Where both are locked, the table is first.
    fn starting(&self) -> MutexGuard<'_, BTreeSet<Key>> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Nothing that is done under the lock leaves it half changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn check(task: &Task) -> Result<(), Error> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if !(8..=32).contains(&task.id.len()) || !task.id.bytes().all(is_digit) {
        return Err(Error::Identifier(task.id.clone()));
    }
    if task.command.first().is_none_or(|program| program.is_empty()) {
        return Err(Error::Nothing);
    }
    let variables = task.environment.iter().map(|(name, value)| name.len() + value.len() + 2);
    let length = task.command.iter().map(|word| word.len() + 1).chain(variables).sum();
    if length > MAX_ARGUMENTS {
        return Err(Error::TooLong(length));
    }
    let has_nul = |word: &std::ffi::OsStr| word.as_bytes().contains(&0);
    if task.command.iter().any(|word| has_nul(word)) {
        return Err(Error::Nul("an argument"));
    }
    if task.directory.as_ref().is_some_and(|directory| has_nul(directory.as_os_str())) {
        return Err(Error::Nul("the directory"));
    }
    for (name, value) in &task.environment {
        if name.is_empty() || name.as_bytes().contains(&b'=') {
            return Err(Error::Variable(name.to_string_lossy().into_owned()));
        }
        if has_nul(name) || has_nul(value) {
            return Err(Error::Nul("a variable"));
        }
    }
    if let Some((kind, _)) = &task.terminal {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.' | b'_');
        if kind.len() > 64 || !kind.bytes().all(plain) {
            return Err(Error::TerminalKind(kind.clone()));
        }
    }
    Ok(())
}

/// Why a program could not be started.
fn failed(source: io::Error, program: String, directory: PathBuf) -> Error {
    match spawn_manner::step(&source) {
        None => Error::Program { program, source },
        Some((Step::Directory, source)) => Error::Directory { directory, source },
        Some((_, source)) => Error::System(source),
    }
}

/// All variables of a program.
fn environment(account: &Account, task: &Task) -> Vec<(OsString, OsString)> {
    let usual: [(&str, OsString); 5] = [
        ("HOME", account.home.clone().into()),
        ("LOGNAME", account.name.clone().into()),
        ("PATH", PATH.into()),
        ("SHELL", account.shell.clone().into()),
        ("USER", account.name.clone().into()),
    ];
    let kind = task.terminal.as_ref().map(|(kind, _)| kind).filter(|kind| !kind.is_empty());
    let kind = kind.map(|kind| ("TERM", OsString::from(kind)));
    let usual = usual.into_iter().chain(kind).map(|(name, value)| (name.into(), value));
    // Of those that come twice a program is given the first.
    task.environment.iter().cloned().rev().chain(usual).collect()
}

/// A command line for people.
fn command_line(command: &[OsString]) -> String {
    let words = command.iter().map(|word| {
        let word = word.to_string_lossy();
        let plain = |one: char| one.is_alphanumeric() || "-_./:=,+@%".contains(one);
        if !word.is_empty() && word.chars().all(plain) { word.into_owned() } else { format!("{word:?}") }
    });
    let mut line = String::new();
    for word in words {
        if line.chars().count() + word.chars().count() >= MAX_COMMAND {
            line.extend(word.chars().take(MAX_COMMAND.saturating_sub(line.chars().count() + 1)));
            line.push('…');
            break;
        }
        line.push_str(&word);
        line.push(' ');
    }
    line.trim_end().to_owned()
}

/// Both ends of what connects a program.
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
                tracing::debug!("a terminal stays root's: {}", error_chain::words(&error));
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
