//! Mounts by rule: a disk that a rule means is mounted when it appears, whenever that is, and unmounted when it is told
//! to go or the rule is gone.
//!
//! - [`rule`] is what a rule says; [`find`] tells which disk it means, and why no other; [`plan`] decides what is to be
//!   done. All of that is pure.
//! - [`engine`] is the one task that has it done, again with every change of rules or disks; [`apply`] does it, by the
//!   verbs of [`volumes`](crate::guest::volumes).
//!   What it does to a disk it does to one that is [held](crate::guest::volumes::held); `give` sets owners and permissions.
//! - [`made`] remembers what rules have mounted: nothing else is ever unmounted.
//!
//! To add a key to rules: a field in [`rule::How`] or [`rule::Matcher`], its check there, and what it does in [`apply`]
//! or [`find`].

pub mod apply;
pub mod engine;
pub mod find;
mod give;
pub mod made;
mod patience;
pub mod plan;
pub mod rule;
#[cfg(test)]
mod tests;
mod view;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{mpsc, oneshot, watch};

pub use apply::Error;

use crate::guest::Guest;
use crate::guest::disk_rules::made::Place;
use crate::guest::disk_rules::rule::Rule;
use crate::guest::disks::identity::KnownDisk;

/// The rules in force.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// They; absent as long as there have been none that are right.
    pub list: Option<Arc<[Rule]>>,
    /// Why newer ones are not in force.
    pub problem: Option<String>,
    /// Counts up each time that they are read.
    pub read: u64,
}

/// What people are told of rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Told {
    /// What became of each rule, then of what was mounted by rules that are no more.
    pub rules: Vec<Standing>,
    /// Why newer rules are not in force.
    pub problem: Option<String>,
}

/// What became of a rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// File and line; empty if there is no such rule any more.
    pub origin: String,
    /// Which disk it means, in words.
    pub wanted: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// In one word: `mounted`, `working`, `waiting`, `failed`, `no-disk`, `ambiguous` or `unmounted`.
    pub state: &'static str,
    /// The disk, such as `vdb`.
    pub disk: Option<String>,
    /// Such as `/dev/vdb1`.
    pub file: Option<String>,
    /// More of it, in words.
    pub reason: String,
    /// The disks that it does not mean, by name, and why.
    pub others: Vec<(String, String)>,
}

/// Where the engine is asked, and says how things are.
#[derive(Debug)]
pub struct Desk {
    requests: mpsc::UnboundedSender<Request>,
    /// Until an engine takes it.
    inbox: Mutex<Option<mpsc::UnboundedReceiver<Request>>>,
    told: watch::Sender<Arc<Told>>,
}

/// What the engine is asked for.
#[derive(Debug)]
enum Request {
    Release { disk: Place, answer: oneshot::Sender<Result<(), Error>> },
    Keep { disk: Place },
}

impl Default for Desk {
    fn default() -> Self {
        let (requests, inbox) = mpsc::unbounded_channel();
        Self { requests, inbox: Mutex::new(Some(inbox)), told: watch::Sender::default() }
    }
}

impl Desk {
    /// How things are.
    pub fn told(&self) -> Arc<Told> {
        Arc::clone(&self.told.borrow())
    }

    /// How things are, again with every change.
    pub fn changes(&self) -> watch::Receiver<Arc<Told>> {
        self.told.subscribe()
    }

    fn take_inbox(&self) -> Option<mpsc::UnboundedReceiver<Request>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether an engine runs, or has run.
    fn is_served(&self) -> bool {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

/// Unmounts what rules have mounted of `disk` and its partitions, and nothing else. Until the disk is gone, or is to be
/// [kept](keep), no rule mounts it again. May be repeated. If it fails, or nobody waits for the answer any more, it is as
/// if nothing had been asked: what could be unmounted is mounted again.
///
/// # Errors
/// If somebody uses what is mounted, with who does.
pub async fn release(guest: &Guest, disk: &KnownDisk) -> Result<(), Error> {
    if !guest.disk_rules.is_served() {
        return Ok(());
    }
    let (answer, told) = oneshot::channel();
    let request = Request::Release { disk: disk.into(), answer };
    guest.disk_rules.requests.send(request).map_err(|_| Error::Ending)?;
    told.await.map_err(|_| Error::Ending)?
}

/// Takes back that a disk was [released](release): it stays, and rules may mount it.
pub fn keep(guest: &Guest, disk: &KnownDisk) {
    // If there is no engine any more, no rule does.
    let _ = guest.disk_rules.requests.send(Request::Keep { disk: disk.into() });
}
