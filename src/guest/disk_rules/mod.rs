//! Mounts by rule: a disk that a rule matches is mounted when it appears, at boot or later, and unmounted when it
//! is released or the rule is deleted.
//!
//! - [`rule`] defines the contents of a rule; [`find`] decides which disk it matches, and why others do not;
//!   [`plan`] decides what is to be done. All of that is pure.
//! - [`engine`] is the one task that has it done, again after every change of rules or disks; [`apply`] does it,
//!   with the operations of [`volumes`](crate::guest::volumes). It changes a disk only while it is
//!   [held](crate::guest::volumes::held); `give` sets owners and permissions.
//! - [`made`] records what rules have mounted: nothing else is ever unmounted.
//!
//! To add a key to rules: add a field to [`rule::How`] or [`rule::Matcher`], its check there, and what it does in
//! [`apply`] or [`find`].

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

/// Rules in force.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// List of rules; absent until a valid one has been read.
    pub list: Option<Arc<[Rule]>>,
    /// Reason why newer rules are not in force.
    pub problem: Option<String>,
    /// Number of times that the rules have been read.
    pub read: u64,
}

/// Published state of all rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Told {
    /// State of each rule, followed by the mounts of rules that no longer exist.
    pub rules: Vec<Standing>,
    /// Reason why newer rules are not in force.
    pub problem: Option<String>,
}

/// State of one rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// File and line of the rule; empty if the rule no longer exists.
    pub origin: String,
    /// Description of the disk that the rule matches.
    pub wanted: String,
    /// Mount point that the rule names.
    pub mount_point: PathBuf,
    /// State in one word: `mounted`, `working`, `waiting`, `failed`, `no-disk`, `ambiguous` or `unmounted`.
    pub state: &'static str,
    /// Device name of the disk, such as `vdb`.
    pub disk: Option<String>,
    /// Device node, such as `/dev/vdb1`.
    pub file: Option<String>,
    /// Explanation of the state for people.
    pub reason: String,
    /// Names of the disks that do not match, each with the reason.
    pub others: Vec<(String, String)>,
}

/// Channel to the engine for requests, and its published state.
#[derive(Debug)]
pub struct Desk {
    requests: mpsc::UnboundedSender<Request>,
    /// Receiver of the requests, until the engine takes it.
    inbox: Mutex<Option<mpsc::UnboundedReceiver<Request>>>,
    told: watch::Sender<Arc<Told>>,
}

/// Request to the engine.
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
    /// Returns the latest published state.
    pub fn told(&self) -> Arc<Told> {
        Arc::clone(&self.told.borrow())
    }

    /// Returns a receiver of the published state that is notified of every change.
    pub fn changes(&self) -> watch::Receiver<Arc<Told>> {
        self.told.subscribe()
    }

    fn take_inbox(&self) -> Option<mpsc::UnboundedReceiver<Request>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns whether an engine runs or has run.
    fn is_served(&self) -> bool {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

/// Unmounts what rules have mounted of `disk` and its partitions, and nothing else. No rule mounts it again until
/// the disk has been unplugged or [kept](keep). May be repeated. If it fails, or the caller no longer waits for
/// the answer, the request is withdrawn: what was unmounted is mounted again.
///
/// # Errors
/// If a mount is in use; the error names the processes that use it.
pub async fn release(guest: &Guest, disk: &KnownDisk) -> Result<(), Error> {
    if !guest.disk_rules.is_served() {
        return Ok(());
    }
    let (answer, told) = oneshot::channel();
    let request = Request::Release { disk: disk.into(), answer };
    guest.disk_rules.requests.send(request).map_err(|_| Error::Ending)?;
    told.await.map_err(|_| Error::Ending)?
}

/// Withdraws the [release] of a disk: the disk stays, and rules may mount it.
pub fn keep(guest: &Guest, disk: &KnownDisk) {
    // Without an engine there is no release to withdraw.
    let _ = guest.disk_rules.requests.send(Request::Keep { disk: disk.into() });
}
