//! Conversion of all failures to QGA error classes, in this one place.

use crate::guest::{
    accounts, block_devices, clock, files, freeze, passwords, power, processes, processors, ssh_keys,
    suspend, users,
};
use crate::sys::error_chain;
use crate::wire::qga::Malformed;

/// Maximum number of characters of a description.
const MAX_DESCRIPTION: usize = 512;
/// Maximum number of characters of a client's own text in it.
const MAX_QUOTED: usize = 64;

/// Error classes of the protocol (QAPI `QapiErrorClass`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum Class {
    /// Any error without a class of its own.
    GenericError,
    /// The command does not exist, or is disabled.
    CommandNotFound,
}

/// Error as the client sees it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Error {
    /// Class of the error, for programs.
    pub class: Class,
    /// Description for people; may change between versions.
    pub desc: String,
}

impl Error {
    /// Creates an error of the common class. A long description is cut, because it may contain text from the client.
    pub fn generic(description: impl Into<String>) -> Self {
        let mut desc = description.into();
        if let Some((end, _)) = desc.char_indices().nth(MAX_DESCRIPTION) {
            desc.truncate(end);
            desc.push('…');
            desc.shrink_to_fit();
        }
        Self { class: Class::GenericError, desc }
    }

    /// Creates the error for an invalid argument; `name` is already quoted.
    pub fn argument(name: &str, problem: &str) -> Self {
        Self::generic(format!("invalid arguments: {name} {problem}"))
    }

    /// Creates the error for an argument that the command does not have, with qemu-ga's own text: its unit test
    /// compares it.
    pub fn unexpected(name: &str) -> Self {
        let mut known: String = name.chars().take(MAX_QUOTED).flat_map(char::escape_debug).collect();
        if name.chars().nth(MAX_QUOTED).is_some() {
            known.push('…');
        }
        Self::generic(format!("Parameter '{known}' is unexpected"))
    }

    /// Returns the error for a command that does not exist.
    pub fn unknown(command: &str) -> Self {
        Self { class: Class::CommandNotFound, desc: format!("The command {} is not known", quoted(command)) }
    }

    /// Creates the error for a command that may not be called while file systems are frozen; `held` says by whom they
    /// are.
    pub fn frozen(command: &str, held: &str) -> Self {
        Self {
            class: Class::CommandNotFound,
            desc: format!("Command {command} has been disabled: file systems are frozen; {held}"),
        }
    }

    /// Creates the error for a command that is disabled, or that no rule lets QGA clients call; `why` says which.
    pub fn disabled(command: &str, why: &str) -> Self {
        Self { class: Class::CommandNotFound, desc: format!("Command {command} has been disabled: {why}") }
    }
}

/// Quotes text from a client, cut to a length that a person still recognizes.
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
            files::Error::UnknownHandle => Self::argument("\"handle\"", "belongs to no open file"),
            error => Self::generic(error_chain::words(&error)),
        }
    }
}

impl From<ssh_keys::Error> for Error {
    fn from(error: ssh_keys::Error) -> Self {
        match error {
            ssh_keys::Error::Account(accounts::Error::Name) => user_name(),
            ssh_keys::Error::NoKey(place) => {
                Self::argument(&format!("\"keys[{place}]\""), "must be one line, and not a comment")
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

/// Converts the errors of the verbs, with their sources.
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
