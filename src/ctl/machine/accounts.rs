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

/// Bytes of a password, its line's end included. Canonical terminals take no longer lines.
const LONGEST_PASSWORD: u64 = 4097;
/// Bytes of a file of keys: they are sent in one request.
const LONGEST_KEYS: u64 = 60 * 1024;
/// What Ctrl-C types.
const INTERRUPT: u8 = 3;
/// What ends this program while a password is typed.
const ENDING: [SignalKind; 4] =
    [SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit(), SignalKind::terminate()];

/// What is done about the keys of a user.
#[derive(Debug, Clone)]
pub enum Keys {
    /// They are shown.
    List,
    /// These are added.
    Add {
        /// Where they are, or `-` for standard input.
        file: PathBuf,
        /// They take the place of all others.
        reset: bool,
    },
    /// These are taken away.
    Remove {
        /// Where they are, or `-` for standard input.
        file: PathBuf,
    },
}

/// What programs read of a user.
#[derive(Debug, Serialize)]
struct User {
    user: String,
    since: Option<String>,
}

/// What programs read of what was done to a user.
#[derive(Debug, Serialize)]
struct Done<'d> {
    user: &'d str,
    done: &'static str,
}

/// Shows who is logged in.
///
/// # Errors
/// If the guest cannot be asked.
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

/// Sets the password of a user to what is typed, or what standard input has.
///
/// # Errors
/// If there is none, or the guest does not set it.
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

/// One line, without its end. From a terminal nothing of it is shown, and it is asked for twice; the signals that end this program
/// come from there then, as nothing else ends it any more.
async fn read_password(
    printer: &mut Printer,
    user: &str,
) -> Result<(Vec<u8>, Option<Signals<SignalKind>>), Error> {
    if !io::stdin().is_terminal() {
        return Ok((blocking::run(line).await?, None));
    }
    // Ctrl-C would leave a terminal that shows nothing: it ends the line instead.
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

/// What comes of `work`, unless a signal comes that ends this program: the terminal is to show again what is typed then.
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

/// What is typed up to the line's end.
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

/// A line of standard input, without its end.
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

/// Does it about the SSH keys of a user.
///
/// # Errors
/// If there are no keys to be read, or the guest does not do it.
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

/// The lines of a file, or of standard input, that are no comments.
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
