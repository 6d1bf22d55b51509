//! Handle by which other tasks send requests to the fleet.

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

/// Interval at which `meet` asks again whether a guest can be called, if no event arrives.
const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// Request to the fleet, with the channel for its answer.
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

/// Way to identify a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// VM with this name.
    Name(String),
    /// VM with this UUID, in lower case.
    Uuid(String),
    /// VM of a cluster that a node identifier means, which is its UUID or its name.
    Node {
        /// Cluster that the VM must belong to.
        cluster: String,
        /// Node identifier: the UUID or the name of the VM.
        node: String,
    },
}

/// Index of the names of VMs by their UUIDs.
#[derive(Debug, Default)]
pub(super) struct Names(pub(super) BTreeMap<String, String>);

impl Names {
    /// Adds a VM.
    pub(super) fn add(&mut self, vm: &Vm) {
        self.0.insert(vm.ids.lasting.clone(), vm.name.clone());
    }

    /// Removes a VM, unless another one has its UUID already.
    pub(super) fn remove(&mut self, vm: &Vm) {
        if self.0.get(&vm.ids.lasting) == Some(&vm.name) {
            self.0.remove(&vm.ids.lasting);
        }
    }
}

impl Identity {
    /// Finds the VM among these, which are keyed by name. Each step is a look-up rather than a search, since guests
    /// cause it as often as they may call.
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

/// VM with the state that operations on it need. It is cheap to return, whatever its guest has reported.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Identity and settings, as the backend knows them.
    pub vm: Arc<Vm>,
    /// Power state as the hypervisor reports it.
    pub power: PowerState,
}

/// Snapshot of all that is known of a VM, shared with the fleet.
#[derive(Debug, Clone)]
pub struct Known {
    /// Identity and settings, as the backend knows them.
    pub vm: Arc<Vm>,
    /// Public description, without the guest's state.
    pub view: Arc<v1::VirtualMachine>,
    /// Guest's state, folded from its events; `None` before the first session.
    pub state: Option<Arc<v1::GuestState>>,
    /// Time since which its session has been in the state of the view, by the monotonic clock.
    pub since: Instant,
}

impl Known {
    /// Builds the public message, with or without the guest's state.
    pub fn told(self, with_state: bool) -> v1::VirtualMachine {
        let state = self.state.filter(|_| with_state).map(Arc::unwrap_or_clone);
        v1::VirtualMachine { state: state.map(Box::new), ..Arc::unwrap_or_clone(self.view) }
    }
}

/// Way to call a guest, or the reason why that is impossible.
#[derive(Debug, Clone)]
pub enum Reach {
    /// The guest can be called through its session.
    Session {
        /// Client for calls.
        agent: Agent,
        /// Capabilities that its agent has reported.
        capabilities: Arc<[String]>,
    },
    /// The VM is paused: a call would wait until it runs again.
    Paused,
    /// The guest has no session now.
    NoSession,
    /// It is unknown whether there is a session, since the program that would have it cannot be reached.
    Untold,
}

/// Past events, and a receiver for those that follow.
#[derive(Debug)]
pub struct Watched {
    /// Past events, in the order in which they happened.
    pub past: Vec<Arc<VirtualMachineEvent>>,
    /// Later events. None is missing in between.
    pub coming: broadcast::Receiver<Arc<VirtualMachineEvent>>,
}

/// Error if the fleet's task has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("guestlet-host is stopping")]
pub struct Stopped;

/// Sends requests to the fleet.
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
    /// Creates a handle, and the receiver of its requests.
    pub(super) fn new(has_sessions: bool) -> (Self, mpsc::Receiver<Request>) {
        let (requests, inbox) = mpsc::channel(INBOX);
        (Self { requests, log: Arc::default(), has_sessions }, inbox)
    }

    /// Reports whether this program has the sessions itself. If not, a VM without a session here may have one
    /// elsewhere.
    pub fn has_sessions(&self) -> bool {
        self.has_sessions
    }

    /// Returns the log of guests' actions, which limits how much each guest can cause.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Returns all that is known of all VMs, ordered by name. For people only, since it walks over all VMs.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn list(&self) -> Result<Vec<Known>, Stopped> {
        self.ask(Request::List).await
    }

    /// Returns all VMs, ordered by name. Not for calls of guests, which must not walk over all VMs.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn machines(&self) -> Result<Vec<Machine>, Stopped> {
        self.ask(Request::Machines).await
    }

    /// Finds one VM, if it exists. The cost does not depend on the number of VMs.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn find(&self, identity: Identity) -> Result<Option<Machine>, Stopped> {
        self.ask(|reply| Request::Find(identity, reply)).await
    }

    /// Returns all that is known of one VM, or `None` if it is unknown.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn get(&self, name: String) -> Result<Option<Known>, Stopped> {
        self.ask(|reply| Request::Get(name, reply)).await
    }

    /// Subscribes to the events of all VMs from now on, and returns those since `since` that are remembered. Returns
    /// `None` if `name` is given and unknown. Only past events are filtered by `name`.
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

    /// Returns how the guest of this name can be called, or `None` if it is unknown. Calls fail when the session ends.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn caller(&self, name: String) -> Result<Option<Reach>, Stopped> {
        self.ask(|reply| Request::Caller(name, reply)).await
    }

    /// Waits until the guest can be called, but at most for `patience`. Returns how it can be called then, or why it
    /// cannot.
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
            // No events arrive of a session that another program has, so the wait is bounded.
            drop(tokio::time::timeout_at(end.min(Instant::now() + LOOK_AGAIN), coming.recv()).await);
        }
    }

    /// Returns the resource limits of the guest of this name, or `None` if it is unknown.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn limits(&self, name: String) -> Result<Option<Arc<Limits>>, Stopped> {
        self.ask(|reply| Request::Limits(name, reply)).await
    }

    /// Returns how to reach the agent of a VM beside its session, or `None` if this program has no session with it.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn contact(&self, name: String) -> Result<Option<Box<Contact>>, Stopped> {
        self.ask(|reply| Request::Contact(name, reply)).await
    }

    /// Counts the VMs and sessions by their state.
    ///
    /// # Errors
    /// When the fleet has ended.
    pub async fn tally(&self) -> Result<Tally, Stopped> {
        self.ask(Request::Tally).await
    }

    /// Sends an event to all who watch. It is added to the history of the VM with this name, if that is known. The
    /// name may be empty, for events that concern no VM.
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
