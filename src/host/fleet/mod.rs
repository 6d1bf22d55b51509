//! All known VMs of this host. One task owns them. Other tasks ask it through [`Handle`]s, backends and
//! sessions report to it, and it sends events to all who watch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use prost_types::Timestamp;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::backends::{Change, Vm};
use super::changed::Changed;
use super::contact::Contact;
use super::for_guests::{Cloud, Volumes};
use super::half::Half;
use super::intake::Heard;
use super::lines::{Log, line};
use super::metrics::Tally;
use super::place;
use super::report::{self, Report, Reports};
use super::session::{REFUSED_WAIT, Session};
use super::trust::Trust;
use super::weight;
use crate::supervise::Scope;
use crate::wire::proto::v1::{
    self, CallbackState, PowerState, SessionState, VirtualMachineEvent, event, virtual_machine_event::Kind,
};

mod entry;
mod handle;
mod remote;

use entry::{Entry, Running, now};
pub use handle::{Handle, Identity, Known, Machine, Reach, Stopped, Watched};
use handle::{Names, Request};
pub use remote::{Reaches, Remote};

/// Events that a watcher may lag behind before it loses some.
const WATCH_BACKLOG: usize = 1024;
/// Messages that wait for the fleet. A session that finds the channel full waits.
const INBOX: usize = 256;

/// Task that owns the VMs of this host.
pub struct Fleet {
    half: Arc<Half>,
    volumes: Option<Arc<dyn Volumes>>,
    cloud: Option<Arc<dyn Cloud>>,
    trust: Option<Arc<Trust>>,
    vms: BTreeMap<String, Entry>,
    names: BTreeMap<u64, String>,
    /// Names of VMs by UUID.
    uuids: Names,
    next_session: u64,
    changes: mpsc::Receiver<Change>,
    requests: mpsc::Receiver<Request>,
    reports: (Reports, mpsc::Receiver<(u64, Report)>),
    events: broadcast::Sender<Arc<VirtualMachineEvent>>,
    log: Arc<Log>,
    /// Collects the names of changed VMs, if anybody follows them.
    changed: Option<Arc<Changed>>,
    /// True once the backend has reported all VMs. No request is answered before that.
    synced: bool,
}

impl Fleet {
    /// Creates a fleet. Once it runs, it learns of VMs through the returned sender, and answers the returned handle.
    pub fn new(half: Arc<Half>) -> (Self, mpsc::Sender<Change>, Handle) {
        let (changes, changes_inbox) = mpsc::channel(INBOX);
        let (handle, requests) = Handle::new(true);
        let fleet = Self {
            half,
            volumes: None,
            cloud: None,
            trust: None,
            vms: BTreeMap::new(),
            names: BTreeMap::new(),
            uuids: Names::default(),
            next_session: 1,
            changes: changes_inbox,
            requests,
            reports: mpsc::channel(INBOX),
            events: broadcast::Sender::new(WATCH_BACKLOG),
            log: Arc::clone(&handle.log),
            changed: None,
            synced: false,
        };
        (fleet, changes, handle)
    }

    /// Lets the guests of this fleet request volumes.
    #[must_use]
    pub fn with_volumes(self, volumes: Arc<dyn Volumes>) -> Self {
        Self { volumes: Some(volumes), ..self }
    }

    /// Lets the guests of this fleet send requests about their clusters.
    #[must_use]
    pub fn with_cloud(self, cloud: Arc<dyn Cloud>) -> Self {
        Self { cloud: Some(cloud), ..self }
    }

    /// Lets the guests of this fleet have keys.
    #[must_use]
    pub fn with_trust(self, trust: Arc<Trust>) -> Self {
        Self { trust: Some(trust), ..self }
    }

    /// Lets this fleet report which VMs have changed.
    #[must_use]
    pub fn with_changed(self, changed: Arc<Changed>) -> Self {
        Self { changed: Some(changed), ..self }
    }

    fn contact(&self, vm: &Arc<Vm>, topology: watch::Receiver<place::Told>) -> Contact {
        let (vm, half) = (Arc::clone(vm), Arc::clone(&self.half));
        let contact = Contact::new(vm, half, self.volumes.clone(), topology, self.trust.clone());
        contact.with_cloud(self.cloud.clone())
    }

    /// Runs until `shutdown`. Then the connections of all sessions are closed.
    pub async fn run(mut self, shutdown: CancellationToken) {
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(change) = self.changes.recv() => {
                    self.changed(change.name());
                    self.change(change);
                }
                Some((session, report)) = self.reports.1.recv() => {
                    // Each guest sends a heartbeat every few seconds, which is not a change.
                    if !report.is_heartbeat() {
                        self.changed(self.names.get(&session).map(String::as_str));
                    }
                    self.report(session, report);
                }
                Some(request) = self.requests.recv(), if self.synced => self.answer(request),
            }
        }
    }

    /// Reports that a VM has changed. This may come before the change itself: the receiver asks this task, which
    /// answers only afterwards.
    fn changed(&self, name: Option<&str>) {
        if let (Some(changed), Some(name)) = (&self.changed, name) {
            changed.add(name);
        }
    }

    fn answer(&mut self, request: Request) {
        // The receiver of a reply may have been dropped, so errors of sending are ignored.
        match request {
            Request::List(reply) => drop(reply.send(self.vms.values().map(Entry::known).collect())),
            Request::Machines(reply) => drop(reply.send(self.vms.values().map(Entry::machine).collect())),
            Request::Get(name, reply) => drop(reply.send(self.vms.get(&name).map(Entry::known))),
            Request::Find(identity, reply) => drop(reply.send(self.find(&identity).map(Entry::machine))),
            Request::Watch(name, since, reply) => {
                drop(reply.send(self.watch(name.as_ref(), since.as_ref())));
            }
            Request::Caller(name, reply) => {
                drop(reply.send(self.vms.get(&name).map(Entry::reach)));
            }
            Request::Limits(name, reply) => {
                drop(reply.send(self.vms.get(&name).map(|entry| Arc::clone(&entry.vm.limits))));
            }
            Request::Contact(name, reply) => {
                let entry = self.vms.get(&name).filter(|entry| entry.channel.is_some());
                let contact = entry.map(|entry| {
                    self.contact(&entry.vm, entry.topology.subscribe()).speaking(entry.speech())
                });
                drop(reply.send(contact.map(Box::new)));
            }
            Request::Tally(reply) => {
                reply.send(self.tally()).ok();
            }
            Request::Note(name, kind) if self.vms.contains_key(&name) => self.tell(&name, *kind),
            Request::Note(name, kind) => {
                let event = VirtualMachineEvent { time: Some(now()), name, kind: Some(*kind) };
                // Sending fails only if nobody watches.
                drop(self.events.send(Arc::new(event)));
            }
        }
    }

    fn find(&self, identity: &Identity) -> Option<&Entry> {
        identity.find(&self.vms, &self.uuids, |entry| &entry.vm)
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
            // The sort is stable: events of one VM stay in order unless the clock went back between them.
            past.sort_by_key(|event| event.time.map(|time| (time.seconds, time.nanos)));
        }
        Some(Watched { past, coming: self.events.subscribe() })
    }

    fn tally(&self) -> Tally {
        let mut tally = Tally { vms: self.vms.len(), ..Tally::default() };
        for entry in self.vms.values() {
            match entry.view.session() {
                SessionState::Unspecified | SessionState::Connecting | SessionState::Elsewhere => {
                    tally.connecting += 1;
                }
                SessionState::Connected => tally.connected += 1,
                SessionState::Refused => tally.refused += 1,
                SessionState::Gone => tally.gone += 1,
                SessionState::NoVsock => tally.no_vsock += 1,
            }
            tally.stopped += usize::from(entry.view.io_errors.iter().any(|error| error.stopped));
            tally.callbacks += usize::from(entry.view.callback() == CallbackState::Open);
        }
        tally
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Present(vm) => self.present(vm),
            Change::Removed { name } => self.remove(&name),
            Change::Synced => self.synced = true,
            Change::Power { name, power, problem } => {
                let Some(entry) = self.vms.get_mut(&name) else { return };
                entry.view().power_problem = problem;
                if entry.view.power() == power {
                    return;
                }
                line!(entry.lines, vm = name, ?power, "power");
                if power == PowerState::Off {
                    entry.alive();
                    entry.view().io_errors.clear();
                }
                entry.view().set_power(power);
                entry.running.machine.send_modify(|machine| machine.power = power);
                self.tell(&name, Kind::PowerChanged(v1::PowerChanged { power: power.into() }));
            }
            Change::Topology { name, topology } => {
                if let Some(entry) = self.vms.get_mut(&name) {
                    entry.place(topology);
                }
            }
            Change::Labels { name, labels } => {
                if let Some(entry) = self.vms.get_mut(&name) {
                    entry.view().labels = Arc::unwrap_or_clone(labels);
                }
            }
            Change::IoErrors { name, errors } => self.io_errors(&name, errors),
            // This program dials the agent itself.
            Change::Run { .. } => {}
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
            Change::Suspended { name, to_disk } => {
                let Some(entry) = self.vms.get_mut(&name) else { return };
                line!(entry.lines, vm = name, to_disk, "the guest has suspended itself");
                self.tell(&name, Kind::GuestSuspended(v1::GuestSuspended { to_disk }));
            }
        }
    }

    /// Replaces the I/O errors of a VM, and reports and counts those that are new.
    fn io_errors(&mut self, name: &str, errors: Vec<v1::IoError>) {
        let Some(entry) = self.vms.get_mut(name) else { return };
        let before = std::mem::replace(&mut entry.view().io_errors, errors.clone());
        for error in errors {
            let known = before.iter().find(|known| known.disk == error.disk).map_or(0, |known| known.count);
            let more = error.count.saturating_sub(known);
            if more > 0 {
                self.half.metrics.io_errors.add(error.no_space, more);
                self.tell(name, Kind::IoError(error));
            }
        }
    }

    /// Adds or updates a VM. If it is still the same VM, its session continues.
    fn present(&mut self, vm: Arc<Vm>) {
        let name = vm.name.clone();
        if self.vms.get(&name).is_some_and(|entry| entry.vm == vm) {
            return;
        }
        let entry = match self.take(&name) {
            Some(entry) if entry.vm.ids.lasting == vm.ids.lasting => self.alter(entry, vm),
            _ => self.enter(vm),
        };
        self.names.insert(entry.running.session, name.clone());
        self.uuids.add(&entry.vm);
        self.vms.insert(name, entry);
    }

    fn remove(&mut self, name: &str) {
        let Some(mut entry) = self.take(name) else { return };
        tracing::info!(vm = name, "no longer listed");
        self.log.forget(name);
        self.close(&mut entry, "it was removed from the settings");
    }

    /// Removes a VM and its index entries, and returns it.
    fn take(&mut self, name: &str) -> Option<Entry> {
        let entry = self.vms.remove(name)?;
        self.names.remove(&entry.running.session);
        self.uuids.remove(&entry.vm);
        Some(entry)
    }

    fn enter(&mut self, vm: Arc<Vm>) -> Entry {
        let known = report::Machine { power: PowerState::Unspecified, resets: 0, excess: None };
        let (topology, told) = place::channel();
        let running = self.begin(self.contact(&vm, told), known);
        Entry::new(vm, running, topology)
    }

    /// Applies new settings to a VM that is otherwise the same, which restarts its session.
    fn alter(&mut self, mut entry: Entry, vm: Arc<Vm>) -> Entry {
        tracing::info!(vm = vm.name, "its settings changed");
        self.close(&mut entry, "the settings changed");
        entry.vm = vm;
        entry.describe();
        self.begin_again(&mut entry);
        entry
    }

    /// Reports that the session has ended, if there is one.
    fn close(&self, entry: &mut Entry, reason: &str) {
        if entry.view.session() == SessionState::Connected {
            entry.state(SessionState::Connecting, reason.to_owned());
            note(&self.events, entry, Kind::SessionClosed(v1::SessionClosed { reason: reason.to_owned() }));
        }
    }

    /// Starts a session. If a guest makes it panic, by whatever fault of this program, only that guest is affected.
    fn begin(&mut self, contact: Contact, known: report::Machine) -> Running {
        let session = self.next_session;
        self.next_session += 1;
        let (machine, heard) = watch::channel(known);
        let (scope, reports) = (Scope::new(), self.reports.0.clone());
        let talking = Session::new(session, contact, heard, reports.clone()).run();
        scope.children().spawn_or(talking, move || async move {
            drop(reports.send((session, Report::Failed)).await);
            tokio::time::sleep(REFUSED_WAIT).await;
            drop(reports.send((session, Report::Renewable)).await);
        });
        Running { session, machine, _scope: scope }
    }

    fn begin_again(&mut self, entry: &mut Entry) {
        let known = report::Machine { excess: None, ..*entry.running.machine.borrow() };
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
        // Reports that a session sent just before its VM was removed are ignored.
        let Some(name) = self.names.get(&session).cloned() else { return };
        let Some(entry) = self.vms.get_mut(&name) else { return };
        if matches!(report, Report::Opened { .. } | Report::Heard(_) | Report::Refused(_)) {
            entry.alive();
        }
        match report {
            Report::Opened { info, after, channel, key } => {
                self.half.metrics.sessions.fetch_add(1, Ordering::Relaxed);
                let kind = entry.opened(*info, after, channel, key);
                self.tell(&name, kind);
            }
            Report::Heard(heard) => self.heard(&name, heard),
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
            Report::NoVsock { reason, remedy, is_meant } => {
                tracing::debug!(vm = name, reason, "no vsock");
                entry.state(SessionState::NoVsock, reason);
                let view = entry.view();
                (view.remedy, view.lacks_vsock) = (remedy, !is_meant);
            }
            Report::Refused(reason) => {
                self.half.metrics.refusals.fetch_add(1, Ordering::Relaxed);
                if entry.view.session() != SessionState::Refused || entry.view.reason != reason {
                    tracing::warn!(vm = name, reason, "refused");
                }
                entry.state(SessionState::Refused, reason);
            }
            Report::Failed => {
                let reason =
                    "the session failed because of an error in guestlet-host; see its log".to_owned();
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

    fn heard(&mut self, name: &str, mut heard: Heard) {
        let event = heard.event.as_mut();
        let Some(entry) = self.vms.get_mut(name) else { return };
        let metrics = &self.half.metrics;
        metrics.events.fetch_add(1, Ordering::Relaxed);
        entry.view().last_heard = Some(now());
        if let Some(event::Kind::AgentReady(ready)) = &event.kind {
            let missed = &mut entry.view().missed_events;
            *missed = missed.saturating_add(ready.missed);
            metrics.missed_events.fetch_add(ready.missed, Ordering::Relaxed);
        }
        let (known, before) = (entry.kept.state.is_some(), last_ended(entry));
        let folded = entry.kept.fold(event, &*entry.vm.limits);
        let cut = Some(entry.kept.cut).filter(|cut| *cut != v1::StateCut::default());
        if entry.view.state_cut != cut {
            entry.view().state_cut = cut;
        }
        if let Err(excess) = folded {
            let conversation = entry.view.sessions;
            entry.running.machine.send_modify(|machine| machine.excess = Some((conversation, excess)));
            return;
        }
        // The end is seen in an event or, if that was lost, in the state. Freezes that ended before the first session are
        // not counted.
        if let Some(freeze) = entry.kept.state.as_ref().and_then(|state| state.freeze.as_ref())
            && known
            && freeze.ended.is_some()
            && freeze.ended != before
        {
            metrics.freezes.ended(&freeze.end);
            metrics.receipts.add(&freeze.level);
        }
        weight::slim(event);
        self.tell(name, Kind::GuestEvent(std::mem::take(event)));
    }

    fn tell(&mut self, name: &str, kind: Kind) {
        if let Some(entry) = self.vms.get_mut(name) {
            note(&self.events, entry, kind);
        }
    }
}

/// Returns when the last freeze of a guest ended.
fn last_ended(entry: &Entry) -> Option<Timestamp> {
    entry.kept.state.as_ref()?.freeze.as_ref()?.ended
}

/// Adds an event to the VM's history, and sends it to all who watch. Heartbeats are only sent.
fn note(events: &broadcast::Sender<Arc<VirtualMachineEvent>>, entry: &mut Entry, kind: Kind) {
    let passing = matches!(&kind, Kind::GuestEvent(v1::Event { kind: Some(event::Kind::Heartbeat(_)), .. }));
    let name = entry.vm.name.clone();
    let event = Arc::new(VirtualMachineEvent { time: Some(now()), name, kind: Some(kind) });
    if !passing {
        entry.history.push(Arc::clone(&event), &entry.vm.limits);
    }
    // Sending fails only if nobody watches.
    drop(events.send(event));
}

#[cfg(test)]
mod tests;
