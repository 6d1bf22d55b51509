//! How others ask the fleet.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prost_types::Timestamp;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::Instant;

use super::super::backends::Vm;
use super::super::calls::Agent;
use super::super::contact::Contact;
use super::super::limits::Limits;
use super::super::lines::Log;
use super::super::metrics::Tally;
use super::INBOX;
use crate::wire::proto::v1::{self, PowerState, VirtualMachineEvent, virtual_machine_event};

/// When it is looked again whether a guest can be called, if nothing is heard of it.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// What can be asked; every answer goes to its sender.
pub(super) enum Request {
    List(oneshot::Sender<Vec<Known>>),
    Machines(oneshot::Sender<Vec<Machine>>),
    Get(String, oneshot::Sender<Option<Known>>),
    Find(Identity, oneshot::Sender<Option<Machine>>),
    Watch(Option<String>, Option<Timestamp>, oneshot::Sender<Option<Watched>>),
    Caller(String, oneshot::Sender<Option<Reach>>),
    Limits(String, oneshot::Sender<Option<Arc<Limits>>>),
    Contact(String, oneshot::Sender<Option<Box<Contact>>>),
    Tally(oneshot::Sender<Tally>),
    Note(String, Box<virtual_machine_event::Kind>),
}

/// Which VM is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The one of this name.
    Name(String),
    /// The one with this UUID, in lower case.
    Uuid(String),
    /// The one of a cluster that a node's identifier means: its UUID, or its name.
    Node {
        /// Of the VM.
        cluster: String,
        /// The identifier.
        node: String,
    },
}

/// The names of VMs by their UUIDs.
#[derive(Debug, Default)]
pub(super) struct Names(pub(super) BTreeMap<String, String>);

impl Names {
    /// There is this VM.
    pub(super) fn add(&mut self, vm: &Vm) {
        self.0.insert(vm.ids.lasting.clone(), vm.name.clone());
    }

    /// This VM is not there any more; another one may have its UUID already.
    pub(super) fn remove(&mut self, vm: &Vm) {
        if self.0.get(&vm.ids.lasting) == Some(&vm.name) {
            self.0.remove(&vm.ids.lasting);
        }
    }
}

impl Identity {
    /// The VM that is meant of these, which are by name. Every step of it is a look-up: guests cause it as often as they may
    /// call.
    pub(super) fn find<'a, T>(
        &self,
        vms: &'a BTreeMap<String, T>,
        names: &Names,
        vm: impl Fn(&T) -> &Vm,
    ) -> Option<&'a T> {
        let by_uuid = |uuid: &str| vms.get(names.0.get(uuid)?);
        match self {
            Self::Name(name) => vms.get(name),
            Self::Uuid(uuid) => by_uuid(uuid),
            Self::Node { cluster, node } => {
                let ours = |one: &&T| vm(one).cluster == *cluster;
                let uuid = by_uuid(&node.to_ascii_lowercase()).filter(ours);
                uuid.or_else(|| vms.get(node).filter(ours))
            }
        }
    }
}

/// A VM, as those need it who do something to it. It costs nothing to be given one, whatever its guest has said.
#[derive(Debug, Clone)]
pub struct Machine {
    /// As its backend names it.
    pub vm: Arc<Vm>,
    /// The hypervisor's view.
    pub power: PowerState,
}

/// All that is known of a VM, shared with the fleet: as it was when it was asked for.
#[derive(Debug, Clone)]
pub struct Known {
    /// As its backend names it.
    pub vm: Arc<Vm>,
    /// Without its state.
    pub view: Arc<v1::VirtualMachine>,
    /// What its events have made of it.
    pub state: Option<Arc<v1::GuestState>>,
    /// Since when its session is as the view says, by the monotonic clock.
    pub since: Instant,
}

impl Known {
    /// As it is told, with or without its state.
    pub fn told(self, with_state: bool) -> v1::VirtualMachine {
        let state = self.state.filter(|_| with_state).map(Arc::unwrap_or_clone);
        v1::VirtualMachine { state: state.map(Box::new), ..Arc::unwrap_or_clone(self.view) }
    }
}

/// Whether a guest can be called.
#[derive(Debug, Clone)]
pub enum Reach {
    /// Through this.
    Session {
        /// For calls.
        agent: Agent,
        /// What its agent says that it can.
        capabilities: Arc<[String]>,
    },
    /// The VM is paused: a call would wait until it runs again.
    Paused,
    /// There is no session now.
    NoSession,
    /// It cannot be told whether there is one: whoever would have it cannot be asked.
    Untold,
}

/// Events of the past, and those from then on.
#[derive(Debug)]
pub struct Watched {
    /// In the order in which they happened.
    pub past: Vec<Arc<VirtualMachineEvent>>,
    /// None is missing in between.
    pub coming: broadcast::Receiver<Arc<VirtualMachineEvent>>,
}

/// The fleet's task has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guestlet-host is stopping")]
pub struct Stopped;

/// Asks the fleet.
#[derive(Debug, Clone)]
pub struct Handle {
    requests: mpsc::Sender<Request>,
    pub(super) log: Arc<Log>,
    has_sessions: bool,
}

impl std::fmt::Debug for Request {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Request")
    }
}

impl Handle {
    /// One, and where its requests come.
    pub(super) fn new(has_sessions: bool) -> (Self, mpsc::Receiver<Request>) {
        let (requests, inbox) = mpsc::channel(INBOX);
        (Self { requests, log: Arc::default(), has_sessions }, inbox)
    }

    /// Whether sessions are this program's own: else a VM without one may have one elsewhere.
    pub fn has_sessions(&self) -> bool {
        self.has_sessions
    }

    /// What may be logged of what guests do.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// What is known of all VMs, in the order of their names. For people: it walks over all of them.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn list(&self) -> Result<Vec<Known>, Stopped> {
        self.ask(Request::List).await
    }

    /// All VMs, in the order of their names. Not for the call of a guest, which must not walk over all of them.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn machines(&self) -> Result<Vec<Machine>, Stopped> {
        self.ask(Request::Machines).await
    }

    /// One VM, if there is one: looked up, however many there are.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn find(&self, identity: Identity) -> Result<Option<Machine>, Stopped> {
        self.ask(|reply| Request::Find(identity, reply)).await
    }

    /// What is known of one VM, if it is known at all.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn get(&self, name: String) -> Result<Option<Known>, Stopped> {
        self.ask(|reply| Request::Get(name, reply)).await
    }

    /// Events of all VMs from now on, and those remembered `since` then; none if `name` is given and unknown.
    /// Only those of the past are filtered by `name`.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn watch(
        &self,
        name: Option<String>,
        since: Option<Timestamp>,
    ) -> Result<Option<Watched>, Stopped> {
        self.ask(|reply| Request::Watch(name, since, reply)).await
    }

    /// Whether the guest of this name can be called; none if it is unknown. Calls fail when the session ends.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn caller(&self, name: String) -> Result<Option<Reach>, Stopped> {
        self.ask(|reply| Request::Caller(name, reply)).await
    }

    /// The same as soon as the guest can be called; what it is then, if that is not so after this time.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn meet(&self, name: &str, patience: Duration) -> Result<Option<Reach>, Stopped> {
        let end = Instant::now() + patience;
        let mut coming = self.watch(Some(name.to_owned()), None).await?.map(|watched| watched.coming);
        loop {
            let reach = self.caller(name.to_owned()).await?;
            let may_come = matches!(reach, Some(Reach::NoSession | Reach::Untold)) && Instant::now() < end;
            let Some(coming) = coming.as_mut().filter(|_| may_come) else { return Ok(reach) };
            // Of a session that another program has, nothing is heard.
            drop(tokio::time::timeout_at(end.min(Instant::now() + LOOK_AGAIN), coming.recv()).await);
        }
    }

    /// What the guest of this name may cost; none if it is unknown.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn limits(&self, name: String) -> Result<Option<Arc<Limits>>, Stopped> {
        self.ask(|reply| Request::Limits(name, reply)).await
    }

    /// How the agent of a VM is reached beside its session; none without a session that this program has.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn contact(&self, name: String) -> Result<Option<Box<Contact>>, Stopped> {
        self.ask(|reply| Request::Contact(name, reply)).await
    }

    /// How many VMs and sessions there are.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn tally(&self) -> Result<Tally, Stopped> {
        self.ask(Request::Tally).await
    }

    /// Tells everybody who watches what happened, and has it remembered with the VM of this name if that is known; it may
    /// be empty, for what concerns no VM.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn note(&self, name: String, kind: virtual_machine_event::Kind) -> Result<(), Stopped> {
        self.requests.send(Request::Note(name, Box::new(kind))).await.map_err(|_| Stopped)
    }

    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Result<T, Stopped> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(request(reply)).await.map_err(|_| Stopped)?;
        answer.await.map_err(|_| Stopped)
    }
}
