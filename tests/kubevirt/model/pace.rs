//! When the model takes a step: after a while, not before a test lets it, or never, because it fails.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// What the model does one after another. Most steps are of a claim or of a VM, by whose name a test holds them or has them
/// fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// A claim gets its volume. Failing: `ProvisioningFailed`.
    Bind,
    /// The volume of a claim grows. Failing: `VolumeResizeFailed`.
    Expand,
    /// The volume of a claim is served by NFS.
    Share,
    /// That what serves it is being taken away is said.
    Untie,
    /// It no longer is.
    Unshare,
    /// The volume of a claim that is gone is deleted.
    Erase,
    /// A VM that is to run gets its instance.
    Create,
    /// The launcher of a VM runs on a node. Failing: `FailedScheduling`.
    Launch,
    /// The domain of a VM starts.
    Boot,
    /// What a VM's spec, or a request to it, says of volumes is copied to its instance.
    Copy,
    /// The attachment pod of a VM is made.
    MakePod,
    /// The attachment pod of a VM gets its node. Failing: `FailedScheduling`.
    Schedule,
    /// The volume of a claim is attached to a node. Failing: `FailedAttachVolume`.
    Attach,
    /// The attachment pod of a VM runs. Failing: the pod fails.
    RunPod,
    /// The volume of a claim is mounted from the pod for the launcher.
    Mount,
    /// The volume of a claim is plugged into the domain. Failing: `SyncFailed`.
    Plug,
    /// The volume of a claim is unplugged from the domain. Failing: `SyncFailed`.
    Unplug,
    /// The volume of a claim is unmounted.
    Unmount,
    /// An attachment pod of a VM that is deleted is gone.
    EndPod,
    /// The volume of a claim that no pod needs is detached from a node.
    Detach,
    /// The domain of a VM that is to stop ends.
    ShutDown,
    /// The launcher of a VM that has ended is gone.
    EndLauncher,
    /// The pods at the target of a VM's migration are made.
    Target,
    /// The migration of a VM begins to copy memory.
    Migrate,
    /// The migration of a VM completes. Failing: it fails.
    HandOver,
}

/// What may be done now.
#[derive(Debug, PartialEq)]
pub enum Turn {
    Wait,
    Go,
    Fail(String),
}

/// What tests have said of steps, and since when each is due.
pub struct Pace {
    usual: Duration,
    delays: BTreeMap<Step, Duration>,
    held: BTreeSet<(Step, String)>,
    failing: BTreeMap<(Step, String), String>,
    since: BTreeMap<(Step, String), Instant>,
    reached: BTreeSet<(Step, String)>,
    /// When the next step is due that only has to wait.
    next: Option<Instant>,
}

impl Pace {
    pub fn new(usual: Duration) -> Self {
        Self {
            usual,
            delays: BTreeMap::new(),
            held: BTreeSet::new(),
            failing: BTreeMap::new(),
            since: BTreeMap::new(),
            reached: BTreeSet::new(),
            next: None,
        }
    }

    /// Whether this step of `name` may be taken. `id` tells this time from the others.
    pub fn turn(&mut self, step: Step, name: &str, id: &str) -> Turn {
        let (who, due) = ((step, name.to_owned()), (step, id.to_owned()));
        if self.held.contains(&who) || self.held.contains(&(step, String::new())) {
            self.reached.insert(who);
            self.since.entry(due).or_insert_with(Instant::now);
            return Turn::Wait;
        }
        let wait = self.delays.get(&step).copied().unwrap_or(self.usual);
        let at = *self.since.entry(due.clone()).or_insert_with(Instant::now) + wait;
        if Instant::now() < at {
            self.next = Some(self.next.map_or(at, |next| next.min(at)));
            return Turn::Wait;
        }
        if let Some(message) = self.failing.get(&who).or_else(|| self.failing.get(&(step, String::new()))) {
            return Turn::Fail(message.clone());
        }
        self.since.remove(&due);
        Turn::Go
    }

    /// When to look again, if nothing happens before.
    pub fn take_next(&mut self) -> Option<Instant> {
        self.next.take()
    }

    pub fn set_usual(&mut self, delay: Duration) {
        self.usual = delay;
    }

    pub fn set_delay(&mut self, step: Step, delay: Duration) {
        self.delays.insert(step, delay);
    }

    pub fn hold(&mut self, step: Step, name: &str) {
        self.reached.remove(&(step, name.to_owned()));
        self.held.insert((step, name.to_owned()));
    }

    pub fn release(&mut self, step: Step, name: &str) {
        self.held.remove(&(step, name.to_owned()));
    }

    pub fn has_reached(&self, step: Step, name: &str) -> bool {
        self.reached.contains(&(step, name.to_owned()))
    }

    pub fn fail(&mut self, step: Step, name: &str, message: &str) {
        self.failing.insert((step, name.to_owned()), message.to_owned());
    }

    pub fn succeed(&mut self, step: Step, name: &str) {
        self.failing.remove(&(step, name.to_owned()));
    }
}
