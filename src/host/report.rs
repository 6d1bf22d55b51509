//! Messages between the fleet and a session: the state of the VM, and the reports of the session.

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

/// State of the VM, from the backend and the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Power state, as the hypervisor reports it.
    pub power: PowerState,
    /// Number of resets seen. If it changes, whatever ran in the guest has ended.
    pub resets: u64,
    /// Excess of the guest's state over its limits, and the number of the conversation in which it was found.
    pub excess: Option<(u64, Excess)>,
}

/// Change in the state of a session.
#[derive(Debug)]
pub enum Report {
    /// The conversation is open.
    Opened {
        /// Information that the guest gives about itself, cleaned.
        info: Box<v1::GuestInfo>,
        /// Time since the previous session was lost, the VM was started, or the first dial.
        after: Duration,
        /// Channel for calls of others over this conversation.
        channel: Box<Channel>,
        /// Key that the guest has proved, if it has one.
        key: Option<Fingerprint>,
    },
    /// The guest sent an event.
    Heard(Heard),
    /// The open conversation ended.
    Closed(String),
    /// State of the callback of the open conversation, and the reason for it.
    Callback(CallbackState, String),
    /// Result of sending the topology to the guest.
    Topology(Outcome),
    /// The guest will be dialled again soon; with the reason why there is no conversation.
    Connecting(String),
    /// The guest is not dialled, because its VM has no vsock.
    NoVsock {
        /// Reason, for messages.
        reason: String,
        /// Remedy, for messages.
        remedy: String,
        /// True if the VM's owner wants it so, and nothing is wrong.
        is_meant: bool,
    },
    /// The guest will be dialled again late; with the reason for the refusal.
    Refused(String),
    /// The guest is not dialled, because its VM is off.
    Gone,
    /// The task of the session has panicked.
    Failed,
    /// The wait after a panic is over, and the session may be started anew.
    Renewable,
}

impl Report {
    /// Returns whether the report is a heartbeat, which says only that the guest is alive.
    pub fn is_heartbeat(&self) -> bool {
        let Self::Heard(heard) = self else { return false };
        matches!(heard.event.kind, Some(v1::event::Kind::Heartbeat(_)))
    }
}

/// Channel for the reports of all sessions, each with the number of its session.
pub type Reports = mpsc::Sender<(u64, Report)>;

/// Future that sends a report. It is boxed because it is short-lived and its sender is long-lived.
type Sending<'t> = Pin<Box<dyn Future<Output = ()> + Send + 't>>;

/// Sender of the reports of one session.
#[derive(Debug, Clone)]
pub struct Teller {
    session: u64,
    reports: Reports,
}

impl Teller {
    /// Sends a report; waits while the fleet's inbox is full.
    pub fn send(&self, report: Report) -> Sending<'_> {
        // An error means that the fleet has ended, and with it this process.
        Box::pin(self.reports.send((self.session, report)).map(drop))
    }
}

/// Sender of the reports of one session that also records whether the conversation is open.
#[derive(Debug)]
pub struct Notes {
    teller: Teller,
    lost_at: Instant,
    opened_at: Option<Instant>,
}

impl Notes {
    /// Creates the notes of the session with this number, which begins now.
    pub fn new(session: u64, reports: Reports, now: Instant) -> Self {
        Self { teller: Teller { session, reports }, lost_at: now, opened_at: None }
    }

    /// Records that the VM was started.
    pub fn starts(&mut self, now: Instant) {
        self.lost_at = now;
    }

    /// Sends a report; waits while the fleet's inbox is full.
    pub fn send(&self, report: Report) -> Sending<'_> {
        self.teller.send(report)
    }

    /// Returns a sender for another part of the conversation.
    pub fn teller(&self) -> Teller {
        self.teller.clone()
    }

    /// Records and reports that the conversation is open.
    pub async fn opened(&mut self, info: v1::GuestInfo, channel: Channel, key: Option<PublicKey>) {
        let now = Instant::now();
        self.opened_at = Some(now);
        let (info, channel) = (Box::new(info), Box::new(channel));
        let key = key.map(|key| key.fingerprint());
        self.send(Report::Opened { info, after: now - self.lost_at, channel, key }).await;
    }

    /// Returns whether the conversation is open.
    pub fn is_open(&self) -> bool {
        self.opened_at.is_some()
    }

    /// Records and reports that the conversation has ended, if it was open. Returns how long it was open.
    pub async fn closed(&mut self, reason: &str) -> Option<Duration> {
        let now = Instant::now();
        let lasted = now - self.opened_at.take()?;
        self.lost_at = now;
        self.send(Report::Closed(reason.to_owned())).await;
        Some(lasted)
    }
}
