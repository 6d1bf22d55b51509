//! What is done in place of an agent that is gone while file systems are frozen: by `guestlet thaw`, which the service
//! manager runs when the agent has ended, and by the guardian, a process that the agent starts for each freeze.

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

/// How long a thaw may take before the next one who can do something about it is left to try.
const LONGEST: Duration = Duration::from_secs(30);
/// How long a hook may take to be told of a thaw, even if others have taken all the time.
const LEAST: Duration = Duration::from_secs(2);

/// Whose marker counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Only one whose agent has gone.
    Gone,
    /// That of the agent with this number, which is known to be gone, or to hang. The next run of the agent may have
    /// taken the freeze over by now, and has a guardian of its own.
    Of(u32),
}

/// What was done.
#[derive(Debug, Default)]
pub struct Recovered {
    /// File systems that were frozen and are not any more.
    pub thawed: Vec<String>,
    /// What did not work.
    pub problems: Vec<String>,
}

/// Thaws what the marker in `folder` says is frozen, tells its hooks, and remembers what `end` it took for whoever asks
/// for a thaw next. Nothing, if there is no such marker.
///
/// # Errors
/// If what is mounted cannot be read.
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
    // Nobody waits for this.
    let all = hook_deadline * u32::try_from(hooks.len()).unwrap_or(u32::MAX);
    done.problems.extend(tell_applications(&applications, hook_deadline));
    done.problems.extend(tell_thaws(&hooks, hook_deadline, all, |_| {}));
    // Meanwhile the next run of the agent may have begun: what it says is frozen, and why not, is its own to tell.
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

/// The receipt of a freeze as its marker has it.
fn left_receipt(guest: &Guest, found: &Found) -> Receipt {
    if let Found::Freeze(Freeze { receipt: Some(receipt), .. }) = found {
        return Receipt::clone(receipt);
    }
    receipts::begin(&guest.root, Caller { name: found.holder().to_owned(), over: String::new() })
}

/// Thaws what the marker of the agent with the number `process` says is frozen, and leaves all else as it is: the agent
/// has not quite ended.
///
/// # Errors
/// If what is mounted cannot be read.
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

/// What a marker says is, or may be, frozen, opened; and what could not be.
///
/// # Errors
/// If what is mounted cannot be read.
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

/// Tells all hooks `thaw`, the last one first, each for so long at most, and all of them for so long together; one that has no time
/// left is told all the same. Returns what went wrong. `begin` is called before each.
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

/// Runs the commands that tell applications of the end of a freeze, each for so long at most. Returns what went wrong.
pub fn tell_applications(applications: &[Told], each: Duration) -> Vec<String> {
    let tell = |told: &Told| Some(format!("{}: {}", told.name, tell_application(told, each).err()?));
    applications.iter().rev().filter_map(tell).collect()
}

/// Runs a hook with `thaw`.
///
/// # Errors
/// With what went wrong, in words.
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
