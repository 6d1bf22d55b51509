//! What is to be run, whether that can be, and why it is not.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;

use super::state::{Away, Ended};
use super::{MAX_KEPT, MAX_KNOWN, MAX_OF_ONE, MAX_RUNNING};
use crate::sys::spawn_manner::{self, Step};
use crate::sys::terminal::Size;
use crate::sys::user_identity::Account;

/// Bytes of arguments and variables.
pub const MAX_ARGUMENTS: usize = 256 << 10;
/// Characters of a command line that are told.
const MAX_COMMAND: usize = 1024;
/// Where programs are looked for.
pub(super) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// As many run as may.
    #[error("{MAX_RUNNING} programs run in this guest, which is the limit")]
    TooMany,
    /// As many are known of this caller as may be.
    #[error(
        "{MAX_OF_ONE} programs of this caller run, or have ended unseen, which is the limit; guestctl ps lists them"
    )]
    TooManyOfOne,
    /// As many are known as may be, and none of them can go for this caller's.
    #[error(
        "{MAX_KNOWN} programs are known in this guest, which is the limit; those that have ended are forgotten once guestctl \
         attach has shown their end, or after 10 minutes"
    )]
    TooManyKnown,
    /// What it writes might not fit into the memory for that.
    #[error(
        "{kept} bytes are reserved for what the programs in this guest write, and at most {MAX_KEPT} may be: no {wanted} are \
         left for another program; end some (guestctl ps lists them), or lower exec.ring-bytes in guestlet's settings"
    )]
    TooMuchKept {
        /// Bytes that may be kept of it.
        wanted: usize,
        /// Bytes that may be kept of all others.
        kept: usize,
    },
    /// There is one of this identifier.
    #[error("a program {0} already exists")]
    Exists(String),
    /// Not an identifier.
    #[error("the identifier {0:?} must be 8 to 32 hexadecimal digits in lower case")]
    Identifier(String),
    /// Nothing to run.
    #[error("no program is given")]
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
    #[error("{0:?} is not a terminal type")]
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
    /// What begins so is an option to a shell.
    #[error("the name of the program {0:?} begins with \"-\", which --login does not support; give its path")]
    LoginProgram(String),
    /// A login shell says itself what it has and where it starts.
    #[error("variables and a directory need a command; a login shell alone has those of its profile")]
    LoginShell,
    /// Nothing opens sessions here.
    #[error(
        "this guest has no runuser, which --login needs: install util-linux (on Alpine Linux: runuser) in the guest"
    )]
    NoRunuser,
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
    /// It runs in a session that PAM opens for its user. Without a command that has the login shell.
    pub is_login: bool,
}

/// Is told how a program ended.
pub type OnEnd = Box<dyn FnOnce(&Ended) + Send>;

/// Whether it can be run.
pub(super) fn check(task: &Task) -> Result<(), Error> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if !(8..=32).contains(&task.id.len()) || !task.id.bytes().all(is_digit) {
        return Err(Error::Identifier(task.id.clone()));
    }
    let is_login_shell = task.is_login && task.command.is_empty();
    if !is_login_shell && task.command.first().is_none_or(|program| program.is_empty()) {
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

/// What execve(2), and the search before it, says of the program itself.
const OF_PROGRAM: [Errno; 10] = [
    Errno::ENOENT,
    Errno::EACCES,
    Errno::ENOEXEC,
    Errno::ENOTDIR,
    Errno::EISDIR,
    Errno::ELOOP,
    Errno::ENAMETOOLONG,
    Errno::ETXTBSY,
    Errno::EINVAL,
    Errno::EPERM,
];

/// Why a program could not be started.
pub(super) fn failed(source: io::Error, program: String, directory: PathBuf) -> Error {
    let number = source.raw_os_error();
    let is_of_program = number.is_none_or(|number| OF_PROGRAM.contains(&Errno::from_raw(number)));
    match spawn_manner::step(&source) {
        None if is_of_program => Error::Program { program, source },
        None => Error::System(source),
        Some((Step::Directory, source)) => Error::Directory { directory, source },
        Some((_, source)) => Error::System(source),
    }
}

/// All variables of a program.
pub(super) fn environment(account: &Account, task: &Task) -> Vec<(OsString, OsString)> {
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
pub(super) fn command_line(command: &[OsString]) -> String {
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
