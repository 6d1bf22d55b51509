//! The one place where failures become QGA error classes.

use crate::guest::{
    accounts, block_devices, clock, files, freeze, passwords, power, processes, processors, ssh_keys,
    suspend, users,
};
use crate::sys::error_chain;
use crate::wire::qga::Malformed;

/// Characters of a description.
const MAX_DESCRIPTION: usize = 512;
/// Characters of a client's own words in it.
const MAX_QUOTED: usize = 64;

/// The classes that clients tell apart (QAPI `QapiErrorClass`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum Class {
    /// Anything but the others.
    GenericError,
    /// No such command, or it is switched off.
    CommandNotFound,
}

/// An error as the client sees it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Error {
    /// What programs look at.
    pub class: Class,
    /// What people read; may change between versions.
    pub desc: String,
}

impl Error {
    /// An error of the common class. A description that is long, because a client's own words are in it, is
    /// cut.
    pub fn generic(description: impl Into<String>) -> Self {
        let mut desc = description.into();
        if let Some((end, _)) = desc.char_indices().nth(MAX_DESCRIPTION) {
            desc.truncate(end);
            desc.push('…');
            desc.shrink_to_fit();
        }
        Self { class: Class::GenericError, desc }
    }

    /// An argument, quoted, and what is wrong with it.
    pub fn argument(name: &str, problem: &str) -> Self {
        Self::generic(format!("invalid arguments: {name} {problem}"))
    }

    /// An argument that the command does not have, in qemu-ga's own words: its unit test compares them.
    pub fn unexpected(name: &str) -> Self {
        let mut known: String = name.chars().take(MAX_QUOTED).flat_map(char::escape_debug).collect();
        if name.chars().nth(MAX_QUOTED).is_some() {
            known.push('…');
        }
        Self::generic(format!("Parameter '{known}' is unexpected"))
    }

    /// There is no such command.
    pub fn unknown(command: &str) -> Self {
        Self { class: Class::CommandNotFound, desc: format!("The command {} is not known", quoted(command)) }
    }

    /// The command may not be called while file systems are frozen; `held` says by whom.
    pub fn frozen(command: &str, held: &str) -> Self {
        Self {
            class: Class::CommandNotFound,
            desc: format!("Command {command} has been disabled: file systems are frozen; {held}"),
        }
    }

    /// The command is switched off, or nobody lets QGA clients call it; `why` says which.
    pub fn disabled(command: &str, why: &str) -> Self {
        Self { class: Class::CommandNotFound, desc: format!("Command {command} has been disabled: {why}") }
    }
}

/// A client's own words, quoted, so far that a person recognises them.
pub fn quoted(words: &str) -> String {
    match words.char_indices().nth(MAX_QUOTED) {
        Some((end, _)) => format!("{:?}…", &words[..end]),
        None => format!("{words:?}"),
    }
}

impl From<Malformed> for Error {
    fn from(error: Malformed) -> Self {
        Self::generic(error.to_string())
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::generic(error_chain::words(&error))
    }
}

impl From<files::Error> for Error {
    fn from(error: files::Error) -> Self {
        match error {
            files::Error::UnknownHandle => Self::argument("\"handle\"", "is that of no open file"),
            error => Self::generic(error_chain::words(&error)),
        }
    }
}

impl From<ssh_keys::Error> for Error {
    fn from(error: ssh_keys::Error) -> Self {
        match error {
            ssh_keys::Error::Account(accounts::Error::Name) => user_name(),
            ssh_keys::Error::NoKey(place) => {
                Self::argument(&format!("\"keys[{place}]\""), "must be one line, and no comment")
            }
            error => Self::generic(error_chain::words(&error)),
        }
    }
}

impl From<passwords::Error> for Error {
    fn from(error: passwords::Error) -> Self {
        match error {
            passwords::Error::Account(accounts::Error::Name) => user_name(),
            passwords::Error::Password => Self::argument(
                "\"password\"",
                "must be at most 4096 bytes without line breaks and NUL, and without ':' if it is crypted",
            ),
            error => Self::generic(error_chain::words(&error)),
        }
    }
}

fn user_name() -> Error {
    Error::argument("\"username\"", "must be a name without ':', '/', ',' and control characters")
}

/// The errors of the verbs, with those that they come from.
macro_rules! from_verbs {
    ($($error:ty),* $(,)?) => {$(
        impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::generic(error_chain::words(&error))
            }
        }
    )*};
}

from_verbs!(
    clock::Error,
    block_devices::Error,
    freeze::Error,
    power::Error,
    processes::Error,
    processors::Error,
    suspend::Error,
    users::Error
);
