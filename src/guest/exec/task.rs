//! Programs to run: their description, its validation, and the errors of starting them.

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

/// Maximum size of arguments and variables, in bytes.
pub const MAX_ARGUMENTS: usize = 256 << 10;
/// Maximum number of characters of a command line that are shown to people.
const MAX_COMMAND: usize = 1024;
/// Search path for programs, and their `PATH` variable.
pub(super) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Reason why no program was started.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The maximum number of programs is running.
    #[error("{MAX_RUNNING} programs run in this guest, which is the limit")]
    TooMany,
    /// The maximum number of programs of this caller is known.
    #[error(
        "{MAX_OF_ONE} programs of this caller run, or have ended unseen, which is the limit; guestctl ps lists them"
    )]
    TooManyOfOne,
    /// The maximum number of programs is known, and none of this caller's can be forgotten.
    #[error(
        "{MAX_KNOWN} programs are known in this guest, which is the limit; those that have ended are forgotten once guestctl \
         attach has shown their end, or after 10 minutes"
    )]
    TooManyKnown,
    /// The memory reserved for the outputs of programs is exhausted.
    #[error(
        "cannot reserve {wanted} bytes for the output of another program: the programs in this guest have \
         {kept} of at most {MAX_KEPT}; end some (guestctl ps lists them), or lower exec.ring-bytes in \
         guestlet's settings"
    )]
    TooMuchKept {
        /// Bytes that may be kept of this program.
        wanted: usize,
        /// Bytes that may be kept of all other programs.
        kept: usize,
    },
    /// The caller already has a program with this identifier.
    #[error("a program {0} already exists")]
    Exists(String),
    /// The identifier is malformed.
    #[error("the identifier {0:?} must be 8 to 32 hexadecimal digits in lower case")]
    Identifier(String),
    /// The task has no command, or an empty name of a program.
    #[error("no program is given")]
    Nothing,
    /// The arguments and variables are longer than [`MAX_ARGUMENTS`].
    #[error("the arguments and variables have {0} bytes; at most {MAX_ARGUMENTS} are allowed")]
    TooLong(usize),
    /// An argument, variable or path contains a NUL byte, which execve(2) cannot pass.
    #[error("{0} has a NUL byte")]
    Nul(&'static str),
    /// The name of a variable is empty or contains `=`, or a shell would not take it (with `--login`).
    #[error("{0:?} is not the name of a variable")]
    Variable(String),
    /// The terminal type is not a name of terminfo(5).
    #[error("{0:?} is not a terminal type")]
    TerminalKind(String),
    /// The name service does not know the user.
    #[error("this guest has no user {0:?}")]
    UnknownUser(String),
    /// The name service does not answer.
    #[error("cannot look up the user {user:?}")]
    User {
        /// Name of the user, as given.
        user: String,
        /// Error of the lookup.
        source: io::Error,
    },
    /// The directory cannot be entered.
    #[error("cannot start in {}", .directory.display())]
    Directory {
        /// Path of the directory, as given.
        directory: PathBuf,
        /// Error of the change of directory.
        source: io::Error,
    },
    /// The program cannot be executed.
    #[error("cannot run {program}")]
    Program {
        /// Name or path of the program, as given.
        program: String,
        /// Error of the search or of execve(2).
        source: io::Error,
    },
    /// The program's name begins with `-`, so that the login shell would take it for an option.
    #[error("the name of the program {0:?} begins with \"-\", which --login does not support; give its path")]
    LoginProgram(String),
    /// The task gives variables or a directory, but a login shell without a command sets both itself.
    #[error("variables and a directory need a command; a login shell alone has those of its profile")]
    LoginShell,
    /// The guest lacks runuser(1), which opens the session of a login.
    #[error(
        "this guest has no runuser, which --login needs: install util-linux (on Alpine Linux: runuser) in the guest"
    )]
    NoRunuser,
    /// Any other error of the system.
    #[error("cannot start a program")]
    System(#[source] io::Error),
}

/// Program to run, and how to run it.
pub struct Task {
    /// Identifier chosen by the client: 8 to 32 lower-case hexadecimal digits.
    pub id: String,
    /// Caller that owns the program: no other caller can use it.
    pub owner: String,
    /// Program and its arguments.
    pub command: Vec<OsString>,
    /// Environment variables besides the usual ones.
    pub environment: Vec<(OsString, OsString)>,
    /// Working directory; the user's home directory if `None`.
    pub directory: Option<PathBuf>,
    /// Type and size of the terminal, if the program runs on one.
    pub terminal: Option<(String, Size)>,
    /// True if clients can write to the program's input.
    pub has_input: bool,
    /// Maximum running time.
    pub limit: Option<Duration>,
    /// Policy while no client is attached.
    pub away: Away,
    /// Callback that receives the end of the program.
    pub on_end: Option<OnEnd>,
    /// True if PAM opens a session for the user. Without a command, the login shell runs in that session.
    pub is_login: bool,
}

/// Callback that receives the end of a program.
pub type OnEnd = Box<dyn FnOnce(&Ended) + Send>;

/// Checks that the task can be run.
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

/// Errors of execve(2), and of the search before it, that concern the program itself.
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

/// Converts an error of starting a program: names the program or the directory where one of them is the cause.
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

/// Returns all environment variables of a program.
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
    // Of duplicate names the program gets the first. Reversing lets the client's last one win, and all win over the
    // usual ones.
    task.environment.iter().cloned().rev().chain(usual).collect()
}

/// Formats a command line for people.
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
