//! Thaws in place of an agent that has ended while file systems are frozen. Used by `guestlet thaw`, which the
//! service manager runs when the agent has ended, and by the guardian, a process that the agent starts for each
//! freeze.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::guest::freeze::applications::commands::tell_thaw as tell_application;
use crate::guest::freeze::end::{End, Spoiled};
use crate::guest::freeze::error::Error;
use crate::guest::freeze::marker::{Found, Freeze, Marker, Told};
use crate::guest::freeze::receipts::{self, tray};
use crate::guest::freeze::targets::{Target, Thaws, open, open_marked, selected};
use crate::receipt::judge::judge;
use crate::receipt::{Caller, Receipt};
use crate::sys::error_chain;
use crate::sys::process_group::Group;

/// Time limit for the thaws; after that they are left to the next process that tries.
const LONGEST: Duration = Duration::from_secs(30);
/// Least time that a hook has for a thaw, even if others have used up all the time.
const LEAST: Duration = Duration::from_secs(2);

/// Selects the markers that are acted on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Only a marker whose agent has ended.
    Gone,
    /// The marker of the agent with this process ID, which has ended or hangs. The next run of the agent may have
    /// taken the freeze over by now; it has a guardian of its own.
    Of(u32),
}

/// Result of the recovery.
#[derive(Debug, Default)]
pub struct Recovered {
    /// File systems that were frozen and have been thawed.
    pub thawed: Vec<String>,
    /// Descriptions of the steps that failed.
    pub problems: Vec<String>,
}

/// Thaws what the marker in `folder` records as frozen, runs its hooks, and records the given `end` for the next
/// client that requests a thaw. Returns none if there is no such marker.
///
/// # Errors
/// If the list of mounts cannot be read.
pub fn recover(
    guest: &Guest,
    folder: &Path,
    whose: Whose,
    hook_deadline: Duration,
    end: End,
) -> Result<Option<Recovered>, Error> {
    let marker = Marker::new(folder, &guest.root);
    let found = marker.find();
    let (hooks, applications) = match &found {
        Found::Nothing => return Ok(None),
        Found::Freeze(freeze) if !counts(&marker, freeze, whose) => return Ok(None),
        Found::Freeze(freeze) => (freeze.hooks.clone(), freeze.applications.clone()),
        Found::Unknown => (Vec::new(), Vec::new()),
    };
    let (targets, problems) = marked(guest, &found)?;
    let mut done = Recovered { thawed: Vec::new(), problems };
    let mut thaws = Thaws::begin(&guest.effects, &targets);
    thaws.finish_again(&guest.effects, &targets, LONGEST);
    let name = |device| {
        let target = targets.iter().find(|target| target.device == device);
        target.map(|target| target.mount_point.clone()).unwrap_or_default()
    };
    for (device, result) in &thaws.ended {
        match result {
            Ok(0) => {}
            Ok(_) => done.thawed.push(name(*device)),
            Err(error) => done.problems.push(format!("cannot thaw {}: {error}", name(*device))),
        }
    }
    done.problems.extend(thaws.left.iter().map(|device| format!("{} is still thawing", name(*device))));
    let thawed = receipts::now();
    // No client waits for the hooks, so each has its full time.
    let all = hook_deadline * u32::try_from(hooks.len()).unwrap_or(u32::MAX);
    done.problems.extend(tell_applications(&applications, hook_deadline));
    done.problems.extend(tell_thaws(&hooks, hook_deadline, all, |_| {}));
    // Meanwhile the next run of the agent may have written a marker of its own, which only it may change.
    if marker.find() == found {
        let holder = found.holder().to_owned();
        let mut receipt = left_receipt(guest, &found);
        receipt.times.thawed = Some(thawed);
        end.word().clone_into(&mut receipt.end.how);
        let words = [words(end).to_owned()].into_iter().chain(done.problems.iter().cloned());
        receipt.end.problem = words.collect::<Vec<_>>().join("; ");
        judge(&mut receipt);
        if let Err(error) = tray::put(folder, &receipt) {
            tracing::warn!("the receipt {} is lost: {}: {error}", receipt.id, folder.display());
        }
        let reason = self::words(end).to_owned();
        marker.spoil(&Spoiled { end, holder, reason, told: false, receipt: receipt.id });
        if done.problems.is_empty() {
            marker.remove();
        }
    }
    Ok(Some(done))
}

/// Returns the receipt of a freeze as recorded in its marker.
fn left_receipt(guest: &Guest, found: &Found) -> Receipt {
    if let Found::Freeze(Freeze { receipt: Some(receipt), .. }) = found {
        return Receipt::clone(receipt);
    }
    receipts::begin(&guest.root, Caller { name: found.holder().to_owned(), over: String::new() })
}

/// Thaws what the marker of the agent with the process ID `process` records as frozen, and changes nothing else,
/// as the agent has not quite ended.
///
/// # Errors
/// If the list of mounts cannot be read.
pub fn thaw_left(guest: &Guest, folder: &Path, process: u32) -> Result<(), Error> {
    let marker = Marker::new(folder, &guest.root);
    let found = marker.find();
    if !matches!(&found, Found::Freeze(freeze) if counts(&marker, freeze, Whose::Of(process))) {
        return Ok(());
    }
    let (targets, _) = marked(guest, &found)?;
    Thaws::begin(&guest.effects, &targets).finish_again(&guest.effects, &targets, LONGEST);
    Ok(())
}

fn counts(marker: &Marker, freeze: &Freeze, whose: Whose) -> bool {
    match whose {
        Whose::Gone => !marker.is_alive(freeze),
        Whose::Of(process) => freeze.process.0 == process,
    }
}

fn words(end: End) -> &'static str {
    match end {
        End::Hang => "the agent hung, and its guardian ended the freeze",
        _ => "the agent crashed, and the freeze ended with it",
    }
}

/// Opens the file systems that a marker records as frozen or about to be. Also returns descriptions of those that
/// could not be opened.
///
/// # Errors
/// If the list of mounts cannot be read.
pub fn marked(guest: &Guest, found: &Found) -> Result<(Vec<Arc<Target>>, Vec<String>), Error> {
    match found {
        Found::Nothing => Ok((Vec::new(), Vec::new())),
        Found::Freeze(freeze) => open_marked(&guest.root, &*guest.effects, &freeze.file_systems),
        Found::Unknown => {
            let mut targets = Vec::new();
            let mut problems = Vec::new();
            for file_system in selected(&guest.root, None)? {
                match open(&guest.root, &*guest.effects, std::slice::from_ref(&file_system)) {
                    Ok(opened) => targets.extend(opened),
                    Err(error) => problems.push(error_chain::words(&error)),
                }
            }
            Ok((targets, problems))
        }
    }
}

/// Runs all hooks with `thaw`, in reverse order, within the time limits for each and for all together; a hook for
/// which no time is left is still run, for a short time. Returns what failed. `begin` is called before each.
pub fn tell_thaws(
    hooks: &[PathBuf],
    each: Duration,
    all: Duration,
    mut begin: impl FnMut(&Path),
) -> Vec<String> {
    let until = Instant::now() + all;
    let mut problems = Vec::new();
    for hook in hooks.iter().rev() {
        begin(hook);
        let left = until.saturating_duration_since(Instant::now());
        problems.extend(tell_thaw(hook, each.min(left).max(LEAST)).err());
    }
    problems
}

/// Runs the commands that notify applications of the end of a freeze, within a time limit for each. Returns what
/// failed.
pub fn tell_applications(applications: &[Told], each: Duration) -> Vec<String> {
    let tell = |told: &Told| Some(format!("{}: {}", told.name, tell_application(told, each).err()?));
    applications.iter().rev().filter_map(tell).collect()
}

/// Runs a hook with `thaw`.
///
/// # Errors
/// A description of the failure.
fn tell_thaw(hook: &Path, deadline: Duration) -> Result<(), String> {
    let (send, ended) = channel();
    let group = Group::start(hook, &["thaw"], None, move |end| drop(send.send(end)))
        .map_err(|error| format!("the hook {} cannot be run: {error}", hook.display()))?;
    let Ok(end) = ended.recv_timeout(deadline) else {
        group.kill();
        return Err(format!("the hook {} did not end within {} s", hook.display(), deadline.as_secs()));
    };
    match end.status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("the hook {} failed ({status}): {}", hook.display(), end.tail)),
        Err(error) => Err(format!("the hook {} failed: {error}", hook.display())),
    }
}
