//! State of one VM.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prost_types::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;

use super::super::backends::Vm;
use super::super::calls::Agent;
use super::super::contact::Speech;
use super::super::conversation::Channel;
use super::super::history::History;
use super::super::lines::line;
use super::super::place::{Outcome, Told, Topology};
use super::super::report;
use super::handle::{Known, Machine, Reach};
use crate::events::state::Kept;
use crate::pace::Lines;
use crate::supervise::Scope;
use crate::trust::Fingerprint;
use crate::wire::proto::v1::{self, CallbackState, PowerState, SessionState, virtual_machine_event::Kind};

/// Resets that follow within this time count as one: QEMU reports each reset twice, about 50 ms apart.
const ONE_RESET: Duration = Duration::from_secs(1);

/// State of one VM, and its session, which ends when this is dropped.
pub(super) struct Entry {
    pub vm: Arc<Vm>,
    /// Public description, without the guest's state; shared with those who have asked for it.
    pub view: Arc<v1::VirtualMachine>,
    /// Guest's state, folded from its events; shared likewise.
    pub kept: Kept,
    pub history: History,
    /// Channel for the calls of others while the session is open.
    pub channel: Option<Box<Channel>>,
    /// Capabilities that its agent has reported.
    capabilities: Arc<[String]>,
    pub running: Running,
    /// Place where it runs, which its sessions report to its guest.
    pub topology: watch::Sender<Told>,
    /// Limits how much is logged about it.
    pub lines: Lines,
    /// Time since which its session has been in the state of the view.
    since: Instant,
    /// Time of the last reset that was reported.
    last_reset: Option<Instant>,
    /// True if the guest has been silent since that reset.
    silent_since_reset: bool,
}

/// Task of a session, which ends when this is dropped.
pub(super) struct Running {
    pub session: u64,
    pub machine: watch::Sender<report::Machine>,
    pub _scope: Scope,
}

impl Entry {
    pub fn new(vm: Arc<Vm>, running: Running, topology: watch::Sender<Told>) -> Self {
        let view = v1::VirtualMachine {
            name: vm.name.clone(),
            uuid: vm.ids.lasting.clone(),
            session: SessionState::Connecting.into(),
            since: Some(now()),
            ..v1::VirtualMachine::default()
        };
        let mut entry = Self {
            vm,
            view: Arc::new(view),
            kept: Kept::default(),
            history: History::default(),
            channel: None,
            capabilities: Arc::default(),
            running,
            topology,
            lines: Lines::default(),
            silent_since_reset: false,
            since: Instant::now(),
            last_reset: None,
        };
        entry.describe();
        entry
    }

    /// Returns the public description for a change. Copies it first if an earlier reader still holds it.
    pub fn view(&mut self) -> &mut v1::VirtualMachine {
        Arc::make_mut(&mut self.view)
    }

    /// Returns all that is known of the VM, without copying it.
    pub fn known(&self) -> Known {
        let (vm, view) = (Arc::clone(&self.vm), Arc::clone(&self.view));
        Known { vm, view, state: self.kept.state.clone(), since: self.since }
    }

    /// Returns the VM and its power state, without anything that its guest has reported.
    pub fn machine(&self) -> Machine {
        Machine { vm: Arc::clone(&self.vm), power: self.view.power() }
    }

    /// Returns how its guest can be called, or why it cannot.
    pub fn reach(&self) -> Reach {
        if self.view.power() == PowerState::Paused {
            return Reach::Paused;
        }
        let Some(channel) = self.channel.clone() else { return Reach::NoSession };
        Reach::Session { agent: Agent::new(channel), capabilities: Arc::clone(&self.capabilities) }
    }

    /// Updates those parts of the description that may change while the VM stays the same.
    pub fn describe(&mut self) {
        let view = Arc::make_mut(&mut self.view);
        self.vm.cluster.clone_into(&mut view.cluster);
        view.dial = self.vm.dial.to_string();
        view.tells_suspension = self.vm.tells_suspension;
    }

    pub fn state(&mut self, session: SessionState, reason: String) {
        let view = Arc::make_mut(&mut self.view);
        if view.session() != session {
            view.set_session(session);
            view.since = Some(now());
            self.since = Instant::now();
        }
        if session != SessionState::Connected {
            if let Some(standing) = &mut view.topology {
                standing.problem.clear();
            }
            view.set_callback(CallbackState::Unspecified);
            view.callback_reason.clear();
            self.channel = None;
        }
        view.reason = reason;
        view.remedy.clear();
        view.lacks_vsock = false;
    }

    /// Sets the place where the VM runs, and reports a change to its session.
    pub fn place(&mut self, topology: Arc<Topology>) {
        let standing = self.view().topology.get_or_insert_default();
        standing.wanted = Some(Topology::clone(&topology));
        self.topology.send_if_modified(|told| {
            let changed = told.as_ref() != Some(&topology);
            *told = Some(topology);
            changed
        });
    }

    /// Takes in the guest's answer to its place.
    pub fn placed(&mut self, outcome: Outcome) {
        let standing = Arc::make_mut(&mut self.view).topology.get_or_insert_default();
        match outcome {
            Outcome::Acknowledged(topology) => {
                standing.acknowledged = Some(Topology::clone(&topology));
                standing.since = Some(now());
                standing.problem.clear();
            }
            Outcome::Problem(problem) => {
                if standing.problem != problem {
                    tracing::debug!(vm = self.vm.name, problem, "topology");
                }
                standing.problem = problem;
            }
        }
    }

    /// Takes in a reset that the hypervisor reports. Returns whether it is a new one.
    pub fn reset(&mut self, now: Instant) -> bool {
        let again = self.last_reset.is_some_and(|last| now.saturating_duration_since(last) < ONE_RESET);
        if again || self.silent_since_reset {
            return false;
        }
        self.last_reset = Some(now);
        self.silent_since_reset = true;
        true
    }

    /// Notes that the guest shows signs of life, or that the VM has been replaced, so that the next reset counts.
    pub fn alive(&mut self) {
        self.silent_since_reset = false;
    }

    /// Returns whether the guest's session is plain or secured.
    pub fn speech(&self) -> Speech {
        if self.channel.is_some() && self.view.guest_key.is_empty() { Speech::Plain } else { Speech::Secured }
    }

    pub fn opened(
        &mut self,
        info: v1::GuestInfo,
        after: Duration,
        channel: Box<Channel>,
        key: Option<Fingerprint>,
    ) -> Kind {
        let before = self.view.guest.as_ref();
        let rebooted = before.is_some_and(|before| before.boot_id != info.boot_id);
        line!(
            self.lines,
            vm = self.vm.name,
            host_name = info.host_name,
            after_ms = after.as_millis(),
            rebooted,
            "session opened"
        );
        self.state(SessionState::Connected, String::new());
        self.channel = Some(channel);
        self.capabilities = info.capabilities.clone().into();
        let view = self.view();
        view.sessions += 1;
        view.guest_key = key.map(|key| key.to_string()).unwrap_or_default();
        view.last_heard = Some(now());
        view.guest = Some(info.clone());
        Kind::SessionOpened(v1::SessionOpened {
            guest: Some(info),
            after_milliseconds: u64::try_from(after.as_millis()).unwrap_or(u64::MAX),
            rebooted,
        })
    }

    pub fn callback(&mut self, state: CallbackState, reason: String) {
        if self.view.session() != SessionState::Connected {
            return;
        }
        if self.view.callback() != state || self.view.callback_reason != reason {
            tracing::debug!(vm = self.vm.name, ?state, reason, "callback");
        }
        let view = self.view();
        view.set_callback(state);
        view.callback_reason = reason;
    }
}

pub(super) fn now() -> Timestamp {
    SystemTime::now().into()
}
