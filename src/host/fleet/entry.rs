//! What is known of one VM.

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

/// QEMU tells one reset twice, some 50 ms apart.
const ONE_RESET: Duration = Duration::from_secs(1);

/// One VM, and its session, which ends when this is dropped.
pub(super) struct Entry {
    pub vm: Arc<Vm>,
    /// What is told of it, without its state; shared with those who were told.
    pub view: Arc<v1::VirtualMachine>,
    /// What its events have made of it; shared likewise.
    pub kept: Kept,
    pub history: History,
    /// For calls of others while the conversation is open.
    pub channel: Option<Box<Channel>>,
    /// What its agent said that it can.
    capabilities: Arc<[String]>,
    pub running: Running,
    /// Where it runs, as its sessions tell its guest.
    pub topology: watch::Sender<Told>,
    /// What may be logged of it.
    pub lines: Lines,
    /// Since when its session is as the view says.
    since: Instant,
    /// When a reset was last told.
    last_reset: Option<Instant>,
    /// Nothing was heard of the guest since.
    silent_since_reset: bool,
}

/// A session's task, which ends when this is dropped.
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

    /// To change what is told of it: a copy, if somebody still reads what was told before.
    pub fn view(&mut self) -> &mut v1::VirtualMachine {
        Arc::make_mut(&mut self.view)
    }

    /// What is known, shared.
    pub fn known(&self) -> Known {
        let (vm, view) = (Arc::clone(&self.vm), Arc::clone(&self.view));
        Known { vm, view, state: self.kept.state.clone(), since: self.since }
    }

    /// Nothing that its guest has said.
    pub fn machine(&self) -> Machine {
        Machine { vm: Arc::clone(&self.vm), power: self.view.power() }
    }

    /// Whether its guest can be called.
    pub fn reach(&self) -> Reach {
        if self.view.power() == PowerState::Paused {
            return Reach::Paused;
        }
        let Some(channel) = self.channel.clone() else { return Reach::NoSession };
        Reach::Session { agent: Agent::new(channel), capabilities: Arc::clone(&self.capabilities) }
    }

    /// Says of the VM what may change while it stays the same one.
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

    /// The VM runs there.
    pub fn place(&mut self, topology: Arc<Topology>) {
        let standing = self.view().topology.get_or_insert_default();
        standing.wanted = Some(Topology::clone(&topology));
        self.topology.send_if_modified(|told| {
            let changed = told.as_ref() != Some(&topology);
            *told = Some(topology);
            changed
        });
    }

    /// What the guest made of that.
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

    /// The hypervisor tells a reset; whether it is another than the one before.
    pub fn reset(&mut self, now: Instant) -> bool {
        let again = self.last_reset.is_some_and(|last| now.saturating_duration_since(last) < ONE_RESET);
        if again || self.silent_since_reset {
            return false;
        }
        self.last_reset = Some(now);
        self.silent_since_reset = true;
        true
    }

    /// There is a guest, good or bad, or the VM is another one: a reset from now on means something.
    pub fn alive(&mut self) {
        self.silent_since_reset = false;
    }

    /// What the guest speaks in its session.
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
