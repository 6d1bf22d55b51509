//! All VMs of this host, as far as they are known. One task owns them; [`Handle`]s ask it, backends and
//! sessions tell it, and everybody who watches hears from it.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use prost_types::Timestamp;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::backends::{Change, Vm};
use super::session::{Machine, REFUSED_WAIT, Report, Reports, Session};
use crate::supervise::Scope;
use crate::transport::dial::Dial;
use crate::wire::proto::v1::{
    self, PowerState, SessionState, VirtualMachineEvent, virtual_machine_event::Kind,
};

/// Events that a watcher may be behind before it loses some.
const WATCH_BACKLOG: usize = 1024;
/// Messages that wait for the fleet. A session that finds it full waits.
const INBOX: usize = 256;

/// The task that owns what is known.
pub struct Fleet {
    vms: BTreeMap<String, Entry>,
    names: BTreeMap<u64, String>,
    next_session: u64,
    changes: mpsc::Receiver<Change>,
    requests: mpsc::Receiver<Request>,
    reports: (Reports, mpsc::Receiver<(u64, Report)>),
    events: broadcast::Sender<VirtualMachineEvent>,
    /// Nobody is answered before the first list.
    listed: bool,
}

/// One VM, and its session, which ends when this is dropped.
struct Entry {
    vm: Vm,
    view: v1::VirtualMachine,
    session: u64,
    machine: watch::Sender<Machine>,
    scope: Scope,
}

enum Request {
    List(oneshot::Sender<Vec<v1::VirtualMachine>>),
    Get(String, oneshot::Sender<Option<v1::VirtualMachine>>),
    Watch(Option<String>, oneshot::Sender<Option<broadcast::Receiver<VirtualMachineEvent>>>),
    Tally(oneshot::Sender<Tally>),
}

/// How many there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tally {
    /// VMs.
    pub vms: usize,
    /// Open sessions.
    pub connected: usize,
}

/// The fleet's task has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guestlet-host is stopping")]
pub struct Stopped;

/// Asks the fleet.
#[derive(Debug, Clone)]
pub struct Handle(mpsc::Sender<Request>);

impl std::fmt::Debug for Request {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Request")
    }
}

impl Handle {
    /// All VMs, in the order of their names.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn list(&self) -> Result<Vec<v1::VirtualMachine>, Stopped> {
        self.ask(Request::List).await
    }

    /// One VM, if it is known.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn get(&self, name: String) -> Result<Option<v1::VirtualMachine>, Stopped> {
        self.ask(|reply| Request::Get(name, reply)).await
    }

    /// Events of all VMs from now on; none if `name` is given and unknown. The events are not filtered.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn watch(
        &self,
        name: Option<String>,
    ) -> Result<Option<broadcast::Receiver<VirtualMachineEvent>>, Stopped> {
        self.ask(|reply| Request::Watch(name, reply)).await
    }

    /// How many VMs and sessions there are.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn tally(&self) -> Result<Tally, Stopped> {
        self.ask(Request::Tally).await
    }

    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Result<T, Stopped> {
        let (reply, answer) = oneshot::channel();
        self.0.send(request(reply)).await.map_err(|_| Stopped)?;
        answer.await.map_err(|_| Stopped)
    }
}

impl Fleet {
    /// A fleet that learns of VMs through the returned sender and answers the returned handle, once it runs.
    pub fn new() -> (Self, mpsc::Sender<Change>, Handle) {
        let (changes, changes_inbox) = mpsc::channel(INBOX);
        let (requests, requests_inbox) = mpsc::channel(INBOX);
        let fleet = Self {
            vms: BTreeMap::new(),
            names: BTreeMap::new(),
            next_session: 1,
            changes: changes_inbox,
            requests: requests_inbox,
            reports: mpsc::channel(INBOX),
            events: broadcast::Sender::new(WATCH_BACKLOG),
            listed: false,
        };
        (fleet, changes, Handle(requests))
    }

    /// Runs until `shutdown`; then every session's connection is closed.
    pub async fn run(mut self, shutdown: CancellationToken) {
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(change) = self.changes.recv() => self.change(change),
                Some((session, report)) = self.reports.1.recv() => self.report(session, report),
                Some(request) = self.requests.recv(), if self.listed => self.answer(request),
            }
        }
    }

    fn answer(&self, request: Request) {
        match request {
            Request::List(reply) => {
                drop(reply.send(self.vms.values().map(|entry| entry.view.clone()).collect()));
            }
            Request::Get(name, reply) => {
                drop(reply.send(self.vms.get(&name).map(|entry| entry.view.clone())));
            }
            Request::Watch(name, reply) => {
                let known = name.is_none_or(|name| self.vms.contains_key(&name));
                drop(reply.send(known.then(|| self.events.subscribe())));
            }
            Request::Tally(reply) => {
                let connected = |entry: &&Entry| entry.view.session() == SessionState::Connected;
                let connected = self.vms.values().filter(connected).count();
                reply.send(Tally { vms: self.vms.len(), connected }).ok();
            }
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Listed(vms) => self.list(vms),
            Change::Power { name, power } => {
                let Some(entry) = self.vms.get_mut(&name) else { return };
                if entry.view.power() == power {
                    return;
                }
                tracing::info!(vm = name, ?power, "power");
                entry.view.set_power(power);
                entry.machine.send_modify(|machine| machine.power = power);
                self.tell(name, Kind::PowerChanged(v1::PowerChanged { power: power.into() }));
            }
            Change::Reset { name } => {
                let Some(entry) = self.vms.get_mut(&name) else { return };
                tracing::info!(vm = name, "the guest was reset");
                entry.machine.send_modify(|machine| machine.resets += 1);
                self.tell(name, Kind::GuestReset(v1::GuestReset {}));
            }
        }
    }

    /// Takes the set of VMs for what there is: the session of one that is the same goes on.
    fn list(&mut self, vms: Vec<Vm>) {
        self.listed = true;
        let mut before = std::mem::take(&mut self.vms);
        for vm in vms {
            let same = before.remove(&vm.name).filter(|entry| entry.vm == vm);
            let entry = same.unwrap_or_else(|| self.enter(vm));
            self.vms.insert(entry.vm.name.clone(), entry);
        }
        for (name, entry) in before {
            tracing::info!(vm = name, "no longer listed");
            drop(entry);
        }
        self.names = self.vms.iter().map(|(name, entry)| (entry.session, name.clone())).collect();
    }

    fn enter(&mut self, vm: Vm) -> Entry {
        let known = Machine { power: PowerState::Unspecified, resets: 0 };
        let (session, machine, scope) = self.begin(&vm.uuid, vm.target.dialer(), known);
        let view = v1::VirtualMachine {
            name: vm.name.clone(),
            uuid: vm.uuid.clone(),
            cluster: vm.cluster.clone(),
            session: SessionState::Connecting.into(),
            dial: vm.target.to_string(),
            since: Some(now()),
            ..v1::VirtualMachine::default()
        };
        Entry { vm, view, session, machine, scope }
    }

    /// Starts a session. A guest that makes it panic, by whatever fault of ours, costs only itself.
    fn begin(
        &mut self,
        uuid: &str,
        dialer: Box<dyn Dial>,
        known: Machine,
    ) -> (u64, watch::Sender<Machine>, Scope) {
        let session = self.next_session;
        self.next_session += 1;
        let (machine, heard) = watch::channel(known);
        let (scope, reports) = (Scope::new(), self.reports.0.clone());
        scope.children().spawn(Session::new(session, uuid.to_owned(), dialer, heard, reports.clone()).run());
        let watched = machine.clone();
        scope.children().spawn(async move {
            watched.closed().await;
            drop(reports.send((session, Report::Failed)).await);
            tokio::time::sleep(REFUSED_WAIT).await;
            drop(reports.send((session, Report::Renewable)).await);
        });
        (session, machine, scope)
    }

    fn renew(&mut self, name: &str) {
        let Some(mut entry) = self.vms.remove(name) else { return };
        let known = *entry.machine.borrow();
        self.names.remove(&entry.session);
        (entry.session, entry.machine, entry.scope) =
            self.begin(&entry.vm.uuid, entry.vm.target.dialer(), known);
        entry.state(SessionState::Connecting, String::new());
        self.names.insert(entry.session, name.to_owned());
        self.vms.insert(name.to_owned(), entry);
    }

    fn report(&mut self, session: u64, report: Report) {
        // What a session said just before its VM was dropped is of no interest.
        let Some(name) = self.names.get(&session).cloned() else { return };
        let Some(entry) = self.vms.get_mut(&name) else { return };
        match report {
            Report::Opened { info, after } => {
                let kind = entry.opened(*info, after);
                self.tell(name, kind);
            }
            Report::Heard(event) => {
                entry.view.last_heard = Some(now());
                self.tell(name, Kind::GuestEvent(event));
            }
            Report::Closed(reason) => {
                tracing::info!(vm = name, reason, "session closed");
                entry.state(SessionState::Connecting, reason.clone());
                self.tell(name, Kind::SessionClosed(v1::SessionClosed { reason }));
            }
            Report::Connecting(reason) => {
                tracing::debug!(vm = name, reason, "connecting");
                entry.state(SessionState::Connecting, reason);
            }
            Report::Refused(reason) => {
                if entry.view.session() != SessionState::Refused || entry.view.reason != reason {
                    tracing::warn!(vm = name, reason, "refused");
                }
                entry.state(SessionState::Refused, reason);
            }
            Report::Failed => {
                let reason = "the session failed by a fault of guestlet-host; its log says more".to_owned();
                tracing::error!(vm = name, "the session failed");
                let open = entry.view.session() == SessionState::Connected;
                entry.state(SessionState::Refused, reason.clone());
                if open {
                    self.tell(name, Kind::SessionClosed(v1::SessionClosed { reason }));
                }
            }
            Report::Renewable => self.renew(&name),
            Report::Gone => entry.state(SessionState::Gone, "the VM is off".to_owned()),
        }
    }

    fn tell(&self, name: String, kind: Kind) {
        // An error means that nobody watches.
        drop(self.events.send(VirtualMachineEvent { time: Some(now()), name, kind: Some(kind) }));
    }
}

impl Entry {
    fn state(&mut self, session: SessionState, reason: String) {
        if self.view.session() != session {
            self.view.set_session(session);
            self.view.since = Some(now());
        }
        self.view.reason = reason;
    }

    fn opened(&mut self, info: v1::GuestInfo, after: Duration) -> Kind {
        let before = self.view.guest.as_ref();
        let rebooted = before.is_some_and(|before| before.boot_id != info.boot_id);
        tracing::info!(
            vm = self.vm.name,
            host_name = info.host_name,
            after_ms = after.as_millis(),
            rebooted,
            "session opened"
        );
        self.state(SessionState::Connected, String::new());
        self.view.sessions += 1;
        self.view.last_heard = self.view.since;
        self.view.guest = Some(info.clone());
        Kind::SessionOpened(v1::SessionOpened {
            guest: Some(info),
            after_milliseconds: u64::try_from(after.as_millis()).unwrap_or(u64::MAX),
            rebooted,
        })
    }
}

fn now() -> Timestamp {
    SystemTime::now().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::dial::Target;

    fn vm(name: &str, socket: &str) -> Vm {
        Vm {
            name: name.into(),
            uuid: String::new(),
            cluster: String::new(),
            target: Target::Unix { path: socket.into() },
        }
    }

    fn sessions(fleet: &Fleet) -> Vec<(&str, u64)> {
        fleet.vms.iter().map(|(name, entry)| (name.as_str(), entry.session)).collect()
    }

    #[tokio::test]
    async fn a_new_list_keeps_what_is_the_same_and_ends_the_rest() {
        let (mut fleet, _changes, _handle) = Fleet::new();
        fleet.list(vec![vm("b", "/nowhere/b"), vm("a", "/nowhere/a"), vm("c", "/nowhere/c")]);
        assert_eq!(sessions(&fleet), [("a", 2), ("b", 1), ("c", 3)]);
        fleet.list(vec![vm("a", "/nowhere/a"), vm("b", "/nowhere/other")]);
        assert_eq!(sessions(&fleet), [("a", 2), ("b", 4)]);
        fleet.report(1, Report::Refused("from the session that has ended".into()));
        assert_eq!(fleet.vms["b"].view.session(), SessionState::Connecting);
        fleet.report(4, Report::Refused("from the one that lives".into()));
        assert_eq!(fleet.vms["b"].view.session(), SessionState::Refused);
    }

    #[tokio::test]
    async fn a_boot_id_that_changed_is_a_reboot_and_the_first_is_not() {
        let (mut fleet, _changes, _handle) = Fleet::new();
        fleet.list(vec![vm("a", "/nowhere/a")]);
        let mut events = fleet.events.subscribe();
        for (boot_id, expected) in [("one", false), ("one", false), ("two", true)] {
            let info = Box::new(v1::GuestInfo { boot_id: boot_id.into(), ..v1::GuestInfo::default() });
            fleet.report(1, Report::Opened { info, after: Duration::from_millis(1500) });
            let Some(Kind::SessionOpened(opened)) = events.try_recv().unwrap().kind else { panic!() };
            assert_eq!((opened.rebooted, opened.after_milliseconds), (expected, 1500));
        }
        assert_eq!(fleet.vms["a"].view.sessions, 3);
    }

    struct Faulty;

    impl Dial for Faulty {
        fn dial(&self) -> crate::transport::dial::Dialing<'_> {
            panic!("a fault that this test makes")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_that_panics_is_begun_anew_after_a_while() {
        let (mut fleet, _changes, _handle) = Fleet::new();
        fleet.list(vec![vm("a", "/nowhere/a")]);
        let known = Machine { power: PowerState::Running, resets: 3 };
        let (session, machine, scope) = fleet.begin("", Box::new(Faulty), known);
        let entry = fleet.vms.get_mut("a").unwrap();
        (entry.session, entry.machine, entry.scope) = (session, machine, scope);
        fleet.names = [(session, "a".to_owned())].into();
        let mut states = Vec::new();
        while states.len() < 2 {
            let (reporter, report) = fleet.reports.1.recv().await.unwrap();
            if reporter == session {
                fleet.report(reporter, report);
                states.push(fleet.vms["a"].view.session());
            }
        }
        assert_eq!(states, [SessionState::Refused, SessionState::Connecting]);
        let entry = &fleet.vms["a"];
        assert_eq!((entry.session, *entry.machine.borrow()), (session + 1, known));
    }

    #[tokio::test]
    async fn nobody_is_answered_before_the_first_list() {
        let (fleet, changes, handle) = Fleet::new();
        let shutdown = CancellationToken::new();
        let running = fleet.run(shutdown.clone());
        let asking = async {
            let mut early = std::pin::pin!(handle.list());
            let waited = tokio::time::timeout(Duration::from_millis(20), &mut early).await;
            assert!(waited.is_err());
            changes.send(Change::Listed(vec![vm("a", "/nowhere/a")])).await.unwrap();
            assert_eq!(early.await.unwrap().len(), 1);
            shutdown.cancel();
        };
        tokio::join!(running, asking);
        assert_eq!(handle.tally().await, Err(Stopped));
    }
}
