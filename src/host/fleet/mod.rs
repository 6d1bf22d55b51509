//! All VMs of this host, as far as they are known. One task owns them; [`Handle`]s ask it, backends and
//! sessions tell it, and everybody who watches hears from it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prost_types::Timestamp;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::backends::{Change, Vm};
use super::contact::Contact;
use super::half::Half;
use super::lines::line;
use super::session::{Machine, REFUSED_WAIT, Report, Reports, Session};
use super::state::fold;
use super::topology;
use super::volumes::Keeper;
use crate::supervise::Scope;
use crate::wire::proto::v1::{
    self, CallbackState, PowerState, SessionState, VirtualMachineEvent, event, virtual_machine_event::Kind,
};

mod entry;
mod handle;

use entry::{Entry, Running, now};
use handle::Request;
pub use handle::{Handle, Reach, Stopped, Tally, Watched};

/// Events that a watcher may be behind before it loses some.
const WATCH_BACKLOG: usize = 1024;
/// Messages that wait for the fleet. A session that finds it full waits.
const INBOX: usize = 256;

/// The task that owns what is known.
pub struct Fleet {
    half: Arc<Half>,
    volumes: Option<Keeper>,
    vms: BTreeMap<String, Entry>,
    names: BTreeMap<u64, String>,
    next_session: u64,
    changes: mpsc::Receiver<Change>,
    requests: mpsc::Receiver<Request>,
    reports: (Reports, mpsc::Receiver<(u64, Report)>),
    events: broadcast::Sender<Arc<VirtualMachineEvent>>,
    /// Nobody is answered before the first list.
    listed: bool,
}

impl Fleet {
    /// A fleet that learns of VMs through the returned sender and answers the returned handle, once it runs.
    pub fn new(half: Arc<Half>) -> (Self, mpsc::Sender<Change>, Handle) {
        let (changes, changes_inbox) = mpsc::channel(INBOX);
        let (requests, requests_inbox) = mpsc::channel(INBOX);
        let fleet = Self {
            half,
            volumes: None,
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

    /// A fleet whose guests may ask for volumes.
    #[must_use]
    pub fn with_volumes(self, keeper: Keeper) -> Self {
        Self { volumes: Some(keeper), ..self }
    }

    fn contact(&self, vm: &Arc<Vm>, topology: watch::Receiver<topology::Told>) -> Contact {
        Contact::new(Arc::clone(vm), Arc::clone(&self.half), self.volumes.clone(), topology)
    }

    /// Runs until `shutdown`; then every session's connections are closed.
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

    fn answer(&mut self, request: Request) {
        // Who asked may have gone.
        match request {
            Request::List(with_state, reply) => {
                let without = |view: &v1::VirtualMachine| v1::VirtualMachine { state: None, ..view.clone() };
                let view = |entry: &Entry| if with_state { entry.view.clone() } else { without(&entry.view) };
                drop(reply.send(self.vms.values().map(view).collect()));
            }
            Request::Get(name, reply) => {
                drop(reply.send(self.vms.get(&name).map(|entry| entry.view.clone())));
            }
            Request::Watch(name, since, reply) => {
                drop(reply.send(self.watch(name.as_ref(), since.as_ref())));
            }
            Request::Caller(name, reply) => {
                let reach = |entry: &Entry| entry.caller.clone().map_or(Reach::NoSession, Reach::Session);
                drop(reply.send(self.vms.get(&name).map(reach)));
            }
            Request::Tally(reply) => {
                reply.send(self.tally()).ok();
            }
            Request::Note(name, kind) if self.vms.contains_key(&name) => self.tell(&name, *kind),
            Request::Note(name, kind) => {
                let event = VirtualMachineEvent { time: Some(now()), name, kind: Some(*kind) };
                // An error means that nobody watches.
                drop(self.events.send(Arc::new(event)));
            }
        }
    }

    fn watch(&self, name: Option<&String>, since: Option<&Timestamp>) -> Option<Watched> {
        if name.is_some_and(|name| !self.vms.contains_key(name)) {
            return None;
        }
        let mut past = Vec::new();
        if let Some(since) = since {
            let wanted = |entry: &&Entry| name.is_none_or(|name| *name == entry.vm.name);
            let histories = self.vms.values().filter(wanted).map(|entry| &entry.history);
            past.extend(histories.flat_map(|history| history.since(since)).cloned());
            // One VM's events stay in their order even where the clock went back.
            past.sort_by_key(|event| event.time.map(|time| (time.seconds, time.nanos)));
        }
        Some(Watched { past, coming: self.events.subscribe() })
    }

    fn tally(&self) -> Tally {
        let mut tally = Tally { vms: self.vms.len(), ..Tally::default() };
        for entry in self.vms.values() {
            match entry.view.session() {
                SessionState::Unspecified | SessionState::Connecting => tally.connecting += 1,
                SessionState::Connected => tally.connected += 1,
                SessionState::Refused => tally.refused += 1,
                SessionState::Gone => tally.gone += 1,
            }
            tally.callbacks += usize::from(entry.view.callback() == CallbackState::Open);
        }
        tally
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Listed(vms) => self.list(vms),
            Change::Power { name, power, problem } => {
                let Some(entry) = self.vms.get_mut(&name) else { return };
                entry.view.power_problem = problem;
                if entry.view.power() == power {
                    return;
                }
                line!(entry.lines, vm = name, ?power, "power");
                if power == PowerState::Off {
                    entry.alive();
                }
                entry.view.set_power(power);
                entry.running.machine.send_modify(|machine| machine.power = power);
                self.tell(&name, Kind::PowerChanged(v1::PowerChanged { power: power.into() }));
            }
            Change::Topology { name, topology } => {
                if let Some(entry) = self.vms.get_mut(&name) {
                    entry.place(topology);
                }
            }
            Change::Reset { name } => {
                let Some(entry) = self.vms.get_mut(&name) else { return };
                if !entry.reset(Instant::now()) {
                    tracing::debug!(vm = name, "a reset that is the one before");
                    return;
                }
                line!(entry.lines, vm = name, "the guest was reset");
                entry.running.machine.send_modify(|machine| machine.resets += 1);
                self.tell(&name, Kind::GuestReset(v1::GuestReset {}));
            }
        }
    }

    /// Takes the set of VMs for what there is: the session of one that is the same goes on.
    fn list(&mut self, vms: Vec<Vm>) {
        self.listed = true;
        let mut before = std::mem::take(&mut self.vms);
        for vm in vms {
            let name = vm.name.clone();
            let entry = match before.remove(&name) {
                Some(entry) if *entry.vm == vm => entry,
                Some(entry) if entry.vm.uuid == vm.uuid => self.alter(entry, Arc::new(vm)),
                _ => self.enter(Arc::new(vm)),
            };
            self.vms.insert(name, entry);
        }
        for (name, mut entry) in before {
            tracing::info!(vm = name, "no longer listed");
            self.close(&mut entry, "it is no longer in the settings");
        }
        self.names = self.vms.iter().map(|(name, entry)| (entry.running.session, name.clone())).collect();
    }

    fn enter(&mut self, vm: Arc<Vm>) -> Entry {
        let known = Machine { power: PowerState::Unspecified, resets: 0, excess: None };
        let (topology, told) = topology::channel();
        let running = self.begin(self.contact(&vm, told), known);
        Entry::new(vm, running, topology)
    }

    /// A VM that is the same one, and whose settings are not.
    fn alter(&mut self, mut entry: Entry, vm: Arc<Vm>) -> Entry {
        tracing::info!(vm = vm.name, "its settings changed");
        self.close(&mut entry, "the settings changed");
        entry.vm = vm;
        entry.describe();
        self.begin_again(&mut entry);
        entry
    }

    /// Tells that the conversation is over, if there is one.
    fn close(&self, entry: &mut Entry, reason: &str) {
        if entry.view.session() == SessionState::Connected {
            entry.state(SessionState::Connecting, reason.to_owned());
            note(&self.events, entry, Kind::SessionClosed(v1::SessionClosed { reason: reason.to_owned() }));
        }
    }

    /// Starts a session. A guest that makes it panic, by whatever fault of ours, costs only itself.
    fn begin(&mut self, contact: Contact, known: Machine) -> Running {
        let session = self.next_session;
        self.next_session += 1;
        let (machine, heard) = watch::channel(known);
        let (scope, reports) = (Scope::new(), self.reports.0.clone());
        scope.children().spawn(Session::new(session, contact, heard, reports.clone()).run());
        let watched = machine.clone();
        scope.children().spawn(async move {
            watched.closed().await;
            drop(reports.send((session, Report::Failed)).await);
            tokio::time::sleep(REFUSED_WAIT).await;
            drop(reports.send((session, Report::Renewable)).await);
        });
        Running { session, machine, _scope: scope }
    }

    fn begin_again(&mut self, entry: &mut Entry) {
        let known = Machine { excess: None, ..*entry.running.machine.borrow() };
        let told = entry.topology.subscribe();
        entry.running = self.begin(self.contact(&entry.vm, told), known);
        entry.state(SessionState::Connecting, String::new());
    }

    fn renew(&mut self, name: &str) {
        let Some(mut entry) = self.vms.remove(name) else { return };
        self.names.remove(&entry.running.session);
        self.begin_again(&mut entry);
        self.names.insert(entry.running.session, name.to_owned());
        self.vms.insert(name.to_owned(), entry);
    }

    fn report(&mut self, session: u64, report: Report) {
        // What a session said just before its VM was dropped is of no interest.
        let Some(name) = self.names.get(&session).cloned() else { return };
        let Some(entry) = self.vms.get_mut(&name) else { return };
        if matches!(report, Report::Opened { .. } | Report::Heard(_) | Report::Refused(_)) {
            entry.alive();
        }
        match report {
            Report::Opened { info, after, caller } => {
                self.half.metrics.sessions.fetch_add(1, Ordering::Relaxed);
                let kind = entry.opened(*info, after, caller);
                self.tell(&name, kind);
            }
            Report::Heard(event) => self.heard(&name, *event),
            Report::Callback(state, reason) => entry.callback(state, reason),
            Report::Topology(outcome) => entry.placed(outcome),
            Report::Closed(reason) => {
                line!(entry.lines, vm = name, reason, "session closed");
                entry.state(SessionState::Connecting, reason.clone());
                self.tell(&name, Kind::SessionClosed(v1::SessionClosed { reason }));
            }
            Report::Connecting(reason) => {
                tracing::debug!(vm = name, reason, "connecting");
                entry.state(SessionState::Connecting, reason);
            }
            Report::Refused(reason) => {
                self.half.metrics.refusals.fetch_add(1, Ordering::Relaxed);
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
                    self.tell(&name, Kind::SessionClosed(v1::SessionClosed { reason }));
                }
            }
            Report::Renewable => self.renew(&name),
            Report::Gone => entry.state(SessionState::Gone, "the VM is off".to_owned()),
        }
    }

    fn heard(&mut self, name: &str, mut event: v1::Event) {
        let Some(entry) = self.vms.get_mut(name) else { return };
        let metrics = &self.half.metrics;
        metrics.events.fetch_add(1, Ordering::Relaxed);
        entry.view.last_heard = Some(now());
        if let Some(event::Kind::AgentReady(ready)) = &event.kind {
            entry.view.missed_events = entry.view.missed_events.saturating_add(ready.missed);
            metrics.missed_events.fetch_add(ready.missed, Ordering::Relaxed);
        }
        if let Err(excess) = fold(&mut entry.view.state, &mut event, &entry.vm.limits) {
            let conversation = entry.view.sessions;
            entry.running.machine.send_modify(|machine| machine.excess = Some((conversation, excess)));
            return;
        }
        self.tell(name, Kind::GuestEvent(event));
    }

    fn tell(&mut self, name: &str, kind: Kind) {
        if let Some(entry) = self.vms.get_mut(name) {
            note(&self.events, entry, kind);
        }
    }
}

/// Remembers what happened, and tells everybody who watches.
fn note(events: &broadcast::Sender<Arc<VirtualMachineEvent>>, entry: &mut Entry, kind: Kind) {
    let passing = matches!(&kind, Kind::GuestEvent(v1::Event { kind: Some(event::Kind::Heartbeat(_)), .. }));
    let name = entry.vm.name.clone();
    let event = Arc::new(VirtualMachineEvent { time: Some(now()), name, kind: Some(kind) });
    if !passing {
        entry.history.push(Arc::clone(&event), &entry.vm.limits);
    }
    // An error means that nobody watches.
    drop(events.send(event));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::limits::Limits;
    use crate::host::talk::Caller;
    use crate::transport::dial::{Dial, Target};
    use std::time::Duration;

    fn vm(name: &str, socket: &str) -> Vm {
        let target = Target::Unix { path: socket.into() };
        Vm {
            name: name.into(),
            uuid: String::new(),
            cluster: String::new(),
            callback: None,
            target,
            max_volumes: 0,
            limits: Arc::default(),
        }
    }

    fn half() -> Arc<Half> {
        Arc::new(Half::new("host".into()))
    }

    /// For calls that nobody makes.
    async fn caller() -> Box<Caller> {
        let (near, _far) = tokio::io::duplex(64);
        let (client, _connection) = crate::transport::http2::connect(near).await.unwrap();
        Box::new(Caller::new(client))
    }

    fn sessions(fleet: &Fleet) -> Vec<(&str, u64)> {
        fleet.vms.iter().map(|(name, entry)| (name.as_str(), entry.running.session)).collect()
    }

    #[tokio::test]
    async fn a_new_list_keeps_what_is_the_same_and_ends_the_rest() {
        let (mut fleet, _changes, _handle) = Fleet::new(half());
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
        let (mut fleet, _changes, _handle) = Fleet::new(half());
        fleet.list(vec![vm("a", "/nowhere/a")]);
        let mut events = fleet.events.subscribe();
        for (boot_id, expected) in [("one", false), ("one", false), ("two", true)] {
            let info = Box::new(v1::GuestInfo { boot_id: boot_id.into(), ..v1::GuestInfo::default() });
            let (after, caller) = (Duration::from_millis(1500), caller().await);
            fleet.report(1, Report::Opened { info, after, caller });
            let Some(Kind::SessionOpened(opened)) = events.try_recv().unwrap().kind.clone() else { panic!() };
            assert_eq!((opened.rebooted, opened.after_milliseconds), (expected, 1500));
        }
        assert_eq!(fleet.vms["a"].view.sessions, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn resets_that_are_one_are_told_once() {
        let (mut fleet, _changes, _handle) = Fleet::new(half());
        fleet.list(vec![vm("a", "/nowhere/a")]);
        let reset = || Change::Reset { name: "a".into() };
        let heard = || Report::Heard(Box::default());
        let resets = |fleet: &Fleet| fleet.vms["a"].running.machine.borrow().resets;
        fleet.change(reset());
        fleet.report(1, heard());
        tokio::time::advance(Duration::from_millis(50)).await;
        fleet.change(reset());
        assert_eq!(resets(&fleet), 1, "QEMU tells it twice");
        tokio::time::advance(Duration::from_secs(1)).await;
        fleet.change(reset());
        tokio::time::advance(Duration::from_secs(60)).await;
        fleet.change(reset());
        assert_eq!(resets(&fleet), 2, "nothing ran in between");
        fleet.report(1, heard());
        fleet.change(reset());
        assert_eq!(resets(&fleet), 3);
        let past = fleet.watch(None, Some(&Timestamp { seconds: 0, nanos: 0 })).unwrap().past;
        let told = |event: &&Arc<VirtualMachineEvent>| matches!(event.kind, Some(Kind::GuestReset(_)));
        assert_eq!(past.iter().filter(told).count(), 3);
    }

    #[tokio::test]
    async fn a_vm_that_changes_keeps_what_is_known_of_it_and_gets_a_new_session() {
        let (mut fleet, _changes, _handle) = Fleet::new(half());
        fleet.list(vec![vm("a", "/nowhere/a")]);
        let (power, problem) = (PowerState::Paused, String::new());
        fleet.change(Change::Power { name: "a".into(), power, problem });
        fleet.report(1, Report::Refused("why".into()));
        let changed = Vm { limits: Arc::new(Limits { users: 1, ..Limits::default() }), ..vm("a", "/other") };
        fleet.list(vec![changed]);
        let entry = &fleet.vms["a"];
        assert_eq!((entry.running.session, entry.view.power()), (2, PowerState::Paused));
        assert_eq!(entry.running.machine.borrow().power, PowerState::Paused);
        assert_eq!(
            (entry.view.session(), entry.view.dial.as_str()),
            (SessionState::Connecting, "unix:/other")
        );
        let since = Some(Timestamp { seconds: 0, nanos: 0 });
        let past = |name: &str| fleet.watch(Some(&name.to_owned()), since.as_ref()).unwrap().past.len();
        assert_eq!(past("a"), 1, "the change of power is remembered");
        assert!(fleet.watch(Some(&"b".to_owned()), None).is_none());
        let other = Vm { uuid: "other".into(), ..vm("a", "/other") };
        fleet.list(vec![other]);
        assert_eq!(fleet.vms["a"].view.power(), PowerState::Unspecified, "another VM of the same name");
    }

    #[tokio::test]
    async fn a_state_that_is_too_large_is_told_to_the_session() {
        let (mut fleet, _changes, _handle) = Fleet::new(half());
        let limits = Arc::new(Limits { users: 0, ..Limits::default() });
        fleet.list(vec![Vm { limits, ..vm("a", "/nowhere/a") }]);
        let session = Some(v1::UserSession::default());
        let kind = Some(event::Kind::UserLoggedIn(v1::UserLoggedIn { session }));
        fleet.report(1, Report::Heard(Box::new(v1::Event { kind, ..v1::Event::default() })));
        let excess = fleet.vms["a"].running.machine.borrow().excess;
        assert!(excess.unwrap().1.to_string().contains("more than 0 users"));
    }

    struct Faulty;

    impl Dial for Faulty {
        fn dial(&self) -> crate::transport::dial::Dialing<'_> {
            panic!("a fault that this test makes")
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_that_panics_is_begun_anew_after_a_while() {
        let (mut fleet, _changes, _handle) = Fleet::new(half());
        fleet.list(vec![vm("a", "/nowhere/a")]);
        let known = Machine { power: PowerState::Running, resets: 3, excess: None };
        let running = fleet.begin(Contact::through(Arc::new(vm("a", "")), half(), Box::new(Faulty)), known);
        let session = running.session;
        fleet.vms.get_mut("a").unwrap().running = running;
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
        assert_eq!((entry.running.session, *entry.running.machine.borrow()), (session + 1, known));
    }

    #[tokio::test]
    async fn nobody_is_answered_before_the_first_list() {
        let (fleet, changes, handle) = Fleet::new(half());
        let shutdown = CancellationToken::new();
        let running = fleet.run(shutdown.clone());
        let asking = async {
            let mut early = std::pin::pin!(handle.list(true));
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
