//! What a session is told of its VM, and tells the fleet.

use std::pin::Pin;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::conversation::Channel;
use super::intake::Heard;
use super::place::Outcome;
use crate::events::state::Excess;
use crate::trust::Fingerprint;
use crate::trust::key::PublicKey;
use crate::wire::proto::v1::{self, CallbackState, PowerState};

/// What the backend and the fleet say of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// The hypervisor's view.
    pub power: PowerState,
    /// Resets seen; another number means that whatever ran is gone.
    pub resets: u64,
    /// The state of the guest is larger than allowed, found during the conversation of this number.
    pub excess: Option<(u64, Excess)>,
}

/// What happened to a session.
#[derive(Debug)]
pub enum Report {
    /// The conversation is open.
    Opened {
        /// What the guest says of itself, cleaned.
        info: Box<v1::GuestInfo>,
        /// Since the session before was lost, the VM was started, or the first dial.
        after: Duration,
        /// For calls of others on this conversation.
        channel: Box<Channel>,
        /// The key that the guest has proved, if it has one.
        key: Option<Fingerprint>,
    },
    /// The guest sent an event.
    Heard(Heard),
    /// The open conversation ended.
    Closed(String),
    /// Where the callback of the open conversation stands, and why.
    Callback(CallbackState, String),
    /// What the guest made of where it runs.
    Topology(Outcome),
    /// It is dialled again soon; why there was no conversation so far.
    Connecting(String),
    /// It is not dialled, because the VM has no vsock.
    NoVsock {
        /// Why.
        reason: String,
        /// What to do about it.
        remedy: String,
        /// Nobody has asked for it.
        is_meant: bool,
    },
    /// It is dialled again late, and why.
    Refused(String),
    /// It is not dialled, because the VM is off.
    Gone,
    /// Its task has panicked.
    Failed,
    /// It may begin anew after it failed.
    Renewable,
}

impl Report {
    /// Whether it says only that the guest is there.
    pub fn is_heartbeat(&self) -> bool {
        let Self::Heard(heard) = self else { return false };
        matches!(heard.event.kind, Some(v1::event::Kind::Heartbeat(_)))
    }
}

/// Where reports of all sessions go, each with the number of its session.
pub type Reports = mpsc::Sender<(u64, Report)>;

/// A report on its way. Boxed: it takes no time, and whatever sends one lives for long.
type Sending<'t> = Pin<Box<dyn Future<Output = ()> + Send + 't>>;

/// Sends reports of one session.
#[derive(Debug, Clone)]
pub struct Teller {
    session: u64,
    reports: Reports,
}

impl Teller {
    /// Sends a report, waiting for the fleet.
    pub fn send(&self, report: Report) -> Sending<'_> {
        // Without a fleet the process is ending, and so is this task.
        Box::pin(self.reports.send((self.session, report)).map(drop))
    }
}

/// Sends reports of one session, and remembers whether the conversation is open.
#[derive(Debug)]
pub struct Notes {
    teller: Teller,
    lost_at: Instant,
    opened_at: Option<Instant>,
}

impl Notes {
    /// Those of the session of this number, which begins now.
    pub fn new(session: u64, reports: Reports, now: Instant) -> Self {
        Self { teller: Teller { session, reports }, lost_at: now, opened_at: None }
    }

    /// The VM was started.
    pub fn starts(&mut self, now: Instant) {
        self.lost_at = now;
    }

    /// Sends a report, waiting for the fleet.
    pub fn send(&self, report: Report) -> Sending<'_> {
        self.teller.send(report)
    }

    /// For another part of the conversation.
    pub fn teller(&self) -> Teller {
        self.teller.clone()
    }

    /// The conversation is open.
    pub async fn opened(&mut self, info: v1::GuestInfo, channel: Channel, key: Option<PublicKey>) {
        let now = Instant::now();
        self.opened_at = Some(now);
        let (info, channel) = (Box::new(info), Box::new(channel));
        let key = key.map(|key| key.fingerprint());
        self.send(Report::Opened { info, after: now - self.lost_at, channel, key }).await;
    }

    /// Whether the conversation is open.
    pub fn is_open(&self) -> bool {
        self.opened_at.is_some()
    }

    /// The conversation ended, if there was one. Returns how long it was open.
    pub async fn closed(&mut self, reason: &str) -> Option<Duration> {
        let now = Instant::now();
        let lasted = now - self.opened_at.take()?;
        self.lost_at = now;
        self.send(Report::Closed(reason.to_owned())).await;
        Some(lasted)
    }
}
