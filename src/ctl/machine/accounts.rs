//! `guestctl users`, `guestctl passwd` and `guestctl keys`.

use std::io::{self, IsTerminal as _, Read as _};
use std::path::PathBuf;
use std::time::SystemTime;

use serde::Serialize;
use tokio::signal::unix::SignalKind;

use super::{SOON, answer};
use crate::ctl::Error;
use crate::ctl::client::Daemon;
use crate::ctl::json::rfc3339;
use crate::ctl::print::Printer;
use crate::ctl::signals::Signals;
use crate::ctl::words::age;
use crate::sys::blocking;
use crate::sys::terminal::Changed;
use crate::text;
use crate::wire::proto::v1::{
    AddAuthorizedKeysRequest, ListAuthorizedKeysRequest, ListUsersRequest, LoggedInUser,
    RemoveAuthorizedKeysRequest, SetPasswordRequest,
};

/// Longest password in bytes, with the end of its line. Terminals in canonical mode do not accept longer
/// lines.
const LONGEST_PASSWORD: u64 = 4097;
/// Longest file of keys in bytes, because the keys are sent in one request.
const LONGEST_KEYS: u64 = 60 * 1024;
/// Character that Ctrl-C produces.
const INTERRUPT: u8 = 3;
/// Signals that end this program while a password is typed.
const ENDING: [SignalKind; 4] =
    [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit(), SignalKind::terminate()];

/// Operation on the authorized keys of a user.
#[derive(Debug, Clone)]
pub enum Keys {
    /// Show the keys.
    List,
    /// Add keys.
    Add {
        /// File with the keys, or `-` for standard input.
        file: PathBuf,
        /// True if the keys replace all others.
        reset: bool,
    },
    /// Remove keys.
    Remove {
        /// File with the keys, or `-` for standard input.
        file: PathBuf,
    },
}

/// Logged-in user, for programs.
#[derive(Debug, Serialize)]
struct User {
    user: String,
    since: Option<String>,
}

/// Result of an operation on a user, for programs.
#[derive(Debug, Serialize)]
struct Done<'d> {
    user: &'d str,
    done: &'static str,
}

/// Shows the logged-in users.
///
/// # Errors
/// Fails if the guest cannot be reached.
pub async fn users(daemon: &Daemon, printer: &mut Printer, name: String) -> Result<(), Error> {
    let request = ListUsersRequest { name: name.clone() };
    let found = answer(daemon.accounts().list_users(request), &name, SOON).await?.users;
    let value = |one: &LoggedInUser| User { user: one.user.clone(), since: one.since.map(rfc3339) };
    let values: Vec<_> = found.iter().map(value).collect();
    let now = SystemTime::now();
    Ok(printer.value(&values, || {
        let mut rows = vec![["USER", "SINCE"].map(str::to_owned)];
        rows.extend(found.iter().map(|one| [one.user.clone(), age(one.since.as_ref(), now)]));
        text::table(&rows)
    })?)
}

/// Sets the password of a user to a typed one, or to the one on standard input.
///
/// # Errors
/// Fails if there is no password, or the guest does not set it.
pub async fn password(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    user: String,
    crypted: bool,
) -> Result<(), Error> {
    let (password, mut signals) = read_password(printer, &user).await?;
    let request = SetPasswordRequest { name: name.clone(), user: user.clone(), password, crypted };
    let mut accounts = daemon.accounts();
    let set = answer(accounts.set_password(request), &name, SOON);
    match &mut signals {
        Some(signals) => unless_ended(signals, set).await?,
        None => set.await?,
    };
    let done = Done { user: &user, done: "password set" };
    Ok(printer.value(&done, || format!("the password of {user} is set\n"))?)
}

/// Reads one line, without its end. On a terminal it is not shown, and is requested twice. From then on the
/// signals that end this program arrive only in the returned stream.
async fn read_password(
    printer: &mut Printer,
    user: &str,
) -> Result<(Vec<u8>, Option<Signals<SignalKind>>), Error> {
    if !io::stdin().is_terminal() {
        return Ok((blocking::run(line).await?, None));
    }
    // Ctrl-C would leave the terminal without echo. It ends the line instead.
    let failed = |error| Error::Read("the terminal".to_owned(), error);
    let mut signals = Signals::hear(ENDING.map(|kind| (kind, kind))).map_err(failed)?;
    let silent = Changed::silent(io::stdin(), INTERRUPT).map_err(failed)?;
    printer.note(&format!("the new password of {user}:"));
    let once = unless_ended(&mut signals, blocking::run(typed)).await?;
    printer.note("once more:");
    let again = unless_ended(&mut signals, blocking::run(typed)).await?;
    drop(silent);
    if once != again {
        return Err(Error::Unmet("the two passwords differ; nothing is changed".to_owned()));
    }
    Ok((once, Some(signals)))
}

/// Runs `work`, but fails when a signal arrives that ends this program. The error lets the terminal be
/// restored before the exit.
async fn unless_ended<T>(
    signals: &mut Signals<SignalKind>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    tokio::select! {
        biased;
        kind = signals.next() => {
            let number = u8::try_from(kind.as_raw_value()).unwrap_or_default();
            Err(Error::Ended(128u8.saturating_add(number)))
        }
        done = work => done,
    }
}

/// Reads what is typed up to the end of the line.
fn typed() -> Result<Vec<u8>, Error> {
    let failed = |error| Error::Read("a password from the terminal".to_owned(), error);
    let mut line = vec![0; usize::try_from(LONGEST_PASSWORD).unwrap_or_default()];
    let length = nix::unistd::read(io::stdin(), &mut line).map_err(|error| failed(error.into()))?;
    line.truncate(length);
    match line.pop() {
        Some(b'\n') if !line.is_empty() => Ok(line),
        Some(INTERRUPT) => Err(Error::Ended(130)),
        _ => Err(failed(io::Error::other("it is empty, or too long"))),
    }
}

/// Reads a line of standard input, without its end.
fn line() -> Result<Vec<u8>, Error> {
    let failed = |error| Error::Read("a password from standard input".to_owned(), error);
    let mut line = Vec::new();
    let mut input = io::stdin().lock().take(LONGEST_PASSWORD);
    io::BufRead::read_until(&mut input, b'\n', &mut line).map_err(failed)?;
    if line.last() == Some(&b'\n') {
        line.pop();
    } else if line.len() as u64 == LONGEST_PASSWORD {
        return Err(failed(io::Error::other("it is too long")));
    }
    if line.is_empty() {
        return Err(failed(io::Error::other("it is empty")));
    }
    Ok(line)
}

/// Carries out an operation on the SSH keys of a user.
///
/// # Errors
/// Fails if the keys cannot be read, or the guest refuses.
pub async fn keys(
    daemon: &Daemon,
    printer: &mut Printer,
    name: String,
    user: String,
    keys: Keys,
) -> Result<(), Error> {
    let mut client = daemon.accounts();
    let vm = name.clone();
    let done = match keys {
        Keys::List => {
            let request = ListAuthorizedKeysRequest { name: vm, user };
            let keys = answer(client.list_authorized_keys(request), &name, SOON).await?.keys;
            let lines = || keys.iter().flat_map(|key| [key.as_str(), "\n"]).collect();
            return Ok(printer.value(&keys, lines)?);
        }
        Keys::Add { file, reset } => {
            let request = AddAuthorizedKeysRequest {
                name: vm,
                user: user.clone(),
                keys: blocking::run(move || read_keys(&file)).await?,
                reset,
            };
            answer(client.add_authorized_keys(request), &name, SOON).await?;
            if reset { "keys replaced" } else { "keys added" }
        }
        Keys::Remove { file } => {
            let request = RemoveAuthorizedKeysRequest {
                name: vm,
                user: user.clone(),
                keys: blocking::run(move || read_keys(&file)).await?,
            };
            answer(client.remove_authorized_keys(request), &name, SOON).await?;
            "keys removed"
        }
    };
    Ok(printer.value(&Done { user: &user, done }, || format!("{user}: {done}\n"))?)
}

/// Reads the lines of a file, or of standard input, without comments.
fn read_keys(file: &PathBuf) -> Result<Vec<String>, Error> {
    let is_input = file.as_os_str() == "-";
    let what = if is_input { "standard input".to_owned() } else { file.display().to_string() };
    let failed = |error| Error::Read(what.clone(), error);
    let mut text = String::new();
    let read = if is_input {
        io::stdin().lock().take(LONGEST_KEYS).read_to_string(&mut text)
    } else {
        let opened = std::fs::File::open(file).map_err(failed)?;
        opened.take(LONGEST_KEYS).read_to_string(&mut text)
    };
    if read.map_err(failed)? as u64 == LONGEST_KEYS {
        return Err(failed(io::Error::other("it is too large")));
    }
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<_> = lines.map(str::to_owned).collect();
    if keys.is_empty() {
        return Err(failed(io::Error::other("it has no key")));
    }
    Ok(keys)
}
