//! Runs the pair of commands of an application that is held by commands.

use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use super::Commands;
use crate::guest::freeze::error::last_words;
use crate::guest::freeze::marker::Told;
use crate::sys::process_group::{Ended, Group};
use crate::sys::spawn_manner::Identity;
use crate::sys::user_identity;

impl From<&Commands> for Told {
    fn from(commands: &Commands) -> Self {
        let Commands { name, user, thaw, .. } = commands;
        Self { name: name.clone(), user: user.clone(), thaw: thaw.clone() }
    }
}

/// Starts a command as the given user; `ended` is called on another thread when it has ended.
///
/// # Errors
/// A description of the problem, if it cannot be started.
pub fn start(
    command: &[String],
    user: &str,
    ended: impl FnOnce(Ended) + Send + 'static,
) -> Result<Group, String> {
    let (program, arguments) = command.split_first().ok_or("it has no command")?;
    let failed = |error: std::io::Error| format!("{program} cannot be run as {user}: {error}");
    let account = user_identity::find(user).map_err(failed)?;
    let identity: Identity = account.ok_or_else(|| format!("there is no user {user}"))?.identity;
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    Group::start(Path::new(program), &arguments, Some(&identity), ended).map_err(failed)
}

/// Returns whether a command that has ended was successful.
///
/// # Errors
/// A description of the failure.
pub fn verdict(command: &[String], ended: &Ended) -> Result<(), String> {
    let program = command.first().map(String::as_str).unwrap_or_default();
    match &ended.status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{program} failed ({status}){}", last_words(&ended.tail))),
        Err(error) => Err(format!("{program} failed: {error}")),
    }
}

/// Runs the command that notifies an application of the end of a freeze.
///
/// # Errors
/// A description of the failure, also if it takes too long.
pub fn tell_thaw(told: &Told, longest: Duration) -> Result<(), String> {
    let (send, ended) = channel();
    let command = &told.thaw;
    let group = start(command, &told.user, move |end| drop(send.send(end)))?;
    let Ok(end) = ended.recv_timeout(longest) else {
        group.kill();
        let program = command.first().map(String::as_str).unwrap_or_default();
        return Err(format!("{program} did not end within {} s and was killed", longest.as_secs()));
    };
    verdict(command, &end)
}
