//! VMs whose agents other programs dial: all VMs of a host cluster, while this program has no session with any of
//! them. One task owns them, and answers the same [`Handle`]s as a [`Fleet`](super::Fleet) does. The reports of
//! guests are known only to the programs with the sessions.
//!
//! ```text
//!  backend ──Change──▶ Remote ◀──Request── Handle ◀── volumes, api
//!                        └──which run, on which node──▶ Reaches ──▶ whoever has the session
//! ```

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use tokio::sync::{broadcast, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::entry::now;
use super::handle::{Handle, Known, Machine, Names, Reach, Request, Watched};
use super::{INBOX, WATCH_BACKLOG};
use crate::host::backends::{Change, Run, Vm};
use crate::host::lines::Log;
use crate::host::metrics::Tally;
use crate::labels::Labels;
use crate::wire::proto::v1::{
    self, PowerState, SessionState, VirtualMachineEvent, virtual_machine_event::Kind,
};

/// Access to guests whose sessions belong to other programs.
pub trait Reaches: Debug + Send + Sync {
    /// Returns how the guest of this VM can be called while this instance of it runs on this node. Called for each
    /// call to a guest, so it must be fast.
    fn reach(&self, vm: &str, node: &str, instance: &str) -> Reach;
}

/// Task that owns the VMs of a host cluster.
pub struct Remote {
    reaches: Arc<dyn Reaches>,
    vms: BTreeMap<String, Entry>,
    names: Names,
    changes: mpsc::Receiver<Change>,
    requests: mpsc::Receiver<Request>,
    events: broadcast::Sender<Arc<VirtualMachineEvent>>,
    log: Arc<Log>,
    /// True once the backend has reported all VMs. No request is answered before that.
    synced: bool,
}

/// State of one VM. There may be many VMs, so its description is built only when it is requested.
struct Entry {
    vm: Arc<Vm>,
    power: PowerState,
    problem: String,
    run: Option<Run>,
    labels: Arc<Labels>,
}

impl Entry {
    fn known(&self) -> Known {
        let is_off = self.power == PowerState::Off;
        let session = if is_off { SessionState::Gone } else { SessionState::Elsewhere };
        let view = v1::VirtualMachine {
            name: self.vm.name.clone(),
            uuid: self.vm.ids.lasting.clone(),
            cluster: self.vm.cluster.clone(),
            dial: self.vm.dial.to_string(),
            power: self.power.into(),
            power_problem: self.problem.clone(),
            session: session.into(),
            labels: Labels::clone(&self.labels),
            reason: if is_off { "the VM is off".to_owned() } else { String::new() },
            ..v1::VirtualMachine::default()
        };
        Known { vm: Arc::clone(&self.vm), view: Arc::new(view), state: None, since: Instant::now() }
    }

    fn machine(&self) -> Machine {
        Machine { vm: Arc::clone(&self.vm), power: self.power }
    }

    fn reach(&self, reaches: &dyn Reaches) -> Reach {
        match (self.power, &self.run) {
            (PowerState::Paused, _) => Reach::Paused,
            (PowerState::Off, _) => Reach::NoSession,
            // It runs, but its node is not known yet.
            (_, None) => Reach::Untold,
            (_, Some(run)) => reaches.reach(&self.vm.name, &run.node, &run.instance),
        }
    }
}

impl Remote {
    /// Creates the task. Once it runs, it learns of VMs through the returned sender, and answers the returned handle.
    pub fn new(reaches: Arc<dyn Reaches>) -> (Self, mpsc::Sender<Change>, Handle) {
        let (changes, inbox) = mpsc::channel(INBOX);
        let (handle, requests) = Handle::new(false);
        let remote = Self {
            reaches,
            vms: BTreeMap::new(),
            names: Names::default(),
            changes: inbox,
            requests,
            events: broadcast::Sender::new(WATCH_BACKLOG),
            log: Arc::clone(&handle.log),
            synced: false,
        };
        (remote, changes, handle)
    }

    /// Serves requests and changes until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some(change) = self.changes.recv() => self.change(change),
                Some(request) = self.requests.recv(), if self.synced => self.answer(request),
            }
        }
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Present(vm) => self.present(vm),
            Change::Removed { name } => self.remove(&name),
            Change::Synced => self.synced = true,
            Change::Power { name, power, problem } => {
                let Some(entry) = self.vms.get_mut(&name) else { return };
                entry.problem = problem;
                if std::mem::replace(&mut entry.power, power) != power {
                    tracing::debug!(vm = name, ?power, "power");
                    self.tell(name, Kind::PowerChanged(v1::PowerChanged { power: power.into() }));
                }
            }
            Change::Run { name, run } => {
                if let Some(entry) = self.vms.get_mut(&name) {
                    entry.run = run;
                }
            }
            Change::Labels { name, labels } => {
                if let Some(entry) = self.vms.get_mut(&name) {
                    entry.labels = labels;
                }
            }
            // Only the program with the session needs these.
            Change::Topology { .. }
            | Change::IoErrors { .. }
            | Change::Reset { .. }
            | Change::Suspended { .. } => {}
        }
    }

    fn present(&mut self, vm: Arc<Vm>) {
        let before = self.take(&vm.name);
        self.names.add(&vm);
        let before = before.filter(|entry| entry.vm.ids.lasting == vm.ids.lasting);
        let (power, problem, run, labels) =
            before.map(|entry| (entry.power, entry.problem, entry.run, entry.labels)).unwrap_or_default();
        self.vms.insert(vm.name.clone(), Entry { vm, power, problem, run, labels });
    }

    fn remove(&mut self, name: &str) {
        if self.take(name).is_some() {
            tracing::debug!(vm = name, "no longer listed");
            self.log.forget(name);
        }
    }

    /// Removes a VM and its index entry, and returns it.
    fn take(&mut self, name: &str) -> Option<Entry> {
        let entry = self.vms.remove(name)?;
        self.names.remove(&entry.vm);
        Some(entry)
    }

    fn answer(&self, request: Request) {
        // The receiver of a reply may have been dropped, so errors of sending are ignored.
        match request {
            Request::List(reply) => drop(reply.send(self.vms.values().map(Entry::known).collect())),
            Request::Machines(reply) => drop(reply.send(self.vms.values().map(Entry::machine).collect())),
            Request::Get(name, reply) => drop(reply.send(self.vms.get(&name).map(Entry::known))),
            Request::Find(identity, reply) => {
                let found = identity.find(&self.vms, &self.names, |entry| &entry.vm);
                drop(reply.send(found.map(Entry::machine)));
            }
            Request::Watch(name, _, reply) => {
                let is_known = name.is_none_or(|name| self.vms.contains_key(&name));
                // Past events are not kept, since there may be very many VMs.
                let watched = || Watched { past: Vec::new(), coming: self.events.subscribe() };
                drop(reply.send(is_known.then(watched)));
            }
            Request::Caller(name, reply) => {
                drop(reply.send(self.vms.get(&name).map(|entry| entry.reach(&*self.reaches))));
            }
            Request::Limits(name, reply) => {
                drop(reply.send(self.vms.get(&name).map(|entry| Arc::clone(&entry.vm.limits))));
            }
            // Only the program with the session reaches the agent beside it.
            Request::Contact(_, reply) => drop(reply.send(None)),
            Request::Tally(reply) => {
                let gone = self.vms.values().filter(|entry| entry.power == PowerState::Off).count();
                reply.send(Tally { vms: self.vms.len(), gone, ..Tally::default() }).ok();
            }
            Request::Note(name, kind) => self.tell(name, *kind),
        }
    }

    fn tell(&self, name: String, kind: Kind) {
        let event = VirtualMachineEvent { time: Some(now()), name, kind: Some(kind) };
        // Sending fails only if nobody watches.
        drop(self.events.send(Arc::new(event)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures_util::FutureExt as _;
    use tokio::sync::oneshot;

    use super::super::Identity;
    use super::*;
    use crate::host::backends::Ids;

    /// Remembers the guests that were asked for.
    #[derive(Debug, Default)]
    struct Asked(Mutex<Vec<String>>);

    impl Reaches for Asked {
        fn reach(&self, vm: &str, node: &str, instance: &str) -> Reach {
            self.0.lock().unwrap().push(format!("{vm} {node} {instance}"));
            Reach::NoSession
        }
    }

    fn vm(name: &str, lasting: &str, cluster: &str) -> Change {
        let ids = Ids { lasting: lasting.into(), ..Ids::default() };
        Change::Present(Vm { ids, cluster: cluster.into(), ..Vm::at(name, "/nowhere") }.into())
    }

    fn power(name: &str, power: PowerState) -> Change {
        Change::Power { name: name.into(), power, problem: String::new() }
    }

    fn run(name: &str, node: &str) -> Change {
        let run = Run { node: node.into(), instance: format!("run-of-{name}") };
        Change::Run { name: name.into(), run: Some(run) }
    }

    /// Creates a fleet with one VM that runs on n1, and one that is off.
    fn begun() -> (Remote, Arc<Asked>) {
        let asked = Arc::new(Asked::default());
        let mut remote = Remote::new(Arc::clone(&asked) as Arc<dyn Reaches>).0;
        let told = [
            vm("ns/a", "u-a", "ns/x"),
            power("ns/a", PowerState::Running),
            run("ns/a", "n1"),
            vm("ns/b", "u-b", "ns/y"),
            power("ns/b", PowerState::Off),
        ];
        for change in told {
            remote.change(change);
        }
        (remote, asked)
    }

    fn ask<T>(remote: &Remote, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> T {
        let (reply, mut answer) = oneshot::channel();
        remote.answer(request(reply));
        answer.try_recv().ok().unwrap()
    }

    fn found(remote: &Remote, identity: Identity) -> Option<String> {
        ask(remote, |reply| Request::Find(identity, reply)).map(|found| found.vm.name.clone())
    }

    fn caller(remote: &Remote, vm: &str) -> Option<Reach> {
        ask(remote, |reply| Request::Caller(vm.into(), reply))
    }

    #[test]
    fn what_is_told_of_vms_says_who_has_their_sessions() {
        let (remote, _) = begun();
        let all: Vec<_> = ask(&remote, Request::List).into_iter().map(|known| known.told(true)).collect();
        let told = |vm: &v1::VirtualMachine| (vm.name.clone(), vm.uuid.clone(), vm.cluster.clone());
        let texts = |a: &str, b: &str, c: &str| (a.to_owned(), b.to_owned(), c.to_owned());
        assert_eq!(told(&all[0]), texts("ns/a", "u-a", "ns/x"));
        assert_eq!(told(&all[1]), texts("ns/b", "u-b", "ns/y"));
        assert_eq!((all[0].power(), all[0].session()), (PowerState::Running, SessionState::Elsewhere));
        assert_eq!((all[1].power(), all[1].session()), (PowerState::Off, SessionState::Gone));
        let tally = ask(&remote, Request::Tally);
        assert_eq!(tally, Tally { vms: 2, gone: 1, ..Tally::default() });
    }

    #[test]
    fn a_vm_is_found_by_whatever_it_is_known_by_as_long_as_it_is() {
        let (mut remote, _) = begun();
        let node = |cluster: &str, node: &str| Identity::Node { cluster: cluster.into(), node: node.into() };
        let a = || Some("ns/a".to_owned());
        assert_eq!(found(&remote, Identity::Name("ns/a".into())), a());
        assert_eq!(found(&remote, Identity::Uuid("u-a".into())), a());
        assert_eq!(found(&remote, node("ns/x", "U-A")), a());
        assert_eq!(found(&remote, node("ns/y", "u-a")), None);
        // It is created anew. Then another VM gets its identifier before its removal is reported.
        remote.change(vm("ns/a", "u-c", "ns/x"));
        assert_eq!(found(&remote, Identity::Uuid("u-a".into())), None);
        remote.change(vm("ns/d", "u-c", "ns/x"));
        remote.change(Change::Removed { name: "ns/a".into() });
        assert_eq!(found(&remote, Identity::Uuid("u-c".into())).as_deref(), Some("ns/d"));
        assert_eq!(found(&remote, Identity::Name("ns/a".into())), None);
    }

    #[test]
    fn whoever_has_the_session_is_asked_where_the_vm_runs_now() {
        let (mut remote, asked) = begun();
        assert!(caller(&remote, "ns/c").is_none());
        assert!(matches!(caller(&remote, "ns/b"), Some(Reach::NoSession)), "it is off");
        caller(&remote, "ns/a");
        remote.change(run("ns/a", "n2"));
        caller(&remote, "ns/a");
        remote.change(power("ns/a", PowerState::Paused));
        assert!(matches!(caller(&remote, "ns/a"), Some(Reach::Paused)));
        // Another attribute of the VM has changed, and it still runs in the same place.
        remote.change(power("ns/a", PowerState::Running));
        remote.change(vm("ns/a", "u-a", "ns/z"));
        caller(&remote, "ns/a");
        // After a VM is created anew, nothing is known of its run yet.
        remote.change(vm("ns/a", "u-c", "ns/z"));
        assert!(matches!(caller(&remote, "ns/a"), Some(Reach::Untold)));
        let expected = ["ns/a n1 run-of-ns/a", "ns/a n2 run-of-ns/a", "ns/a n2 run-of-ns/a"];
        assert_eq!(*asked.0.lock().unwrap(), expected);
    }

    #[test]
    fn labels_are_of_one_vm_and_not_of_its_name() {
        let (mut remote, _) = begun();
        let labels = |remote: &Remote| {
            let known = ask(remote, |reply| Request::Get("ns/a".into(), reply));
            known.unwrap().view.labels.clone()
        };
        let tier = Labels::from([("tier".to_owned(), "db".to_owned())]);
        remote.change(Change::Labels { name: "ns/a".into(), labels: tier.clone().into() });
        remote.change(vm("ns/a", "u-a", "ns/z"));
        assert_eq!(labels(&remote), tier);
        remote.change(vm("ns/a", "u-c", "ns/z"));
        assert_eq!(labels(&remote), Labels::new());
    }

    #[test]
    fn watchers_hear_of_power_and_of_notes() {
        let (mut remote, _) = begun();
        let watch = |name: Option<&str>| {
            ask(&remote, |reply| Request::Watch(name.map(str::to_owned), Some(now()), reply))
        };
        assert!(watch(Some("ns/c")).is_none());
        let Watched { past, mut coming } = watch(Some("ns/a")).unwrap();
        assert_eq!(past, []);
        remote.change(power("ns/a", PowerState::Running));
        remote.change(power("ns/a", PowerState::Off));
        let note = Kind::GuestReset(v1::GuestReset {});
        remote.answer(Request::Note("ns/nobody".into(), Box::new(note.clone())));
        let mut heard = || coming.try_recv().map(|event| (event.name.clone(), event.kind.clone().unwrap()));
        let off = v1::PowerChanged { power: PowerState::Off.into() };
        assert_eq!(heard(), Ok(("ns/a".to_owned(), Kind::PowerChanged(off))), "and nothing before");
        assert_eq!(heard(), Ok(("ns/nobody".to_owned(), note)));
        assert!(heard().is_err());
    }

    #[tokio::test]
    async fn nobody_is_answered_before_all_were_told() {
        let (remote, changes, handle) = Remote::new(Arc::new(Asked::default()));
        let shutdown = CancellationToken::new();
        let mut running = Box::pin(remote.run(shutdown.clone()));
        changes.send(vm("ns/a", "u-a", "")).await.unwrap();
        let mut asking = Box::pin(handle.tally());
        for _ in 0..10 {
            assert!((&mut asking).now_or_never().is_none() && (&mut running).now_or_never().is_none());
        }
        changes.send(Change::Synced).await.unwrap();
        tokio::select! {
            () = running => panic!("it has ended"),
            tally = asking => assert_eq!(tally.unwrap().vms, 1),
        }
        shutdown.cancel();
    }
}
