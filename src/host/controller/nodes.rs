//! Nodes that are connected to the controller, and the agents of their guests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tonic::{Request, Status, Streaming};

use crate::host::caller::Behalf;
use crate::host::calls::{Agent, Answer, Elsewhere};
use crate::host::disks::release::CAPABILITY;
use crate::host::fleet::{Reach, Reaches};
use crate::transport::callback::{self, Caller, Opened};
use crate::transport::http2::ORIGIN;
use crate::wire::proto::v1::guests_client::GuestsClient;
use crate::wire::proto::v1::{
    CallbackFromHost, FindDiskOfGuestRequest, FindDiskRequest, FindDiskResponse, OnBehalf,
    ReleaseDiskOfGuestRequest, ReleaseDiskRequest, ReleaseDiskResponse, RunningVirtualMachine,
};

/// Limit on the concurrent calls to one guest, of the 64 of its node.
const CALLS_OF_A_GUEST: usize = 8;
/// Bytes of one answer.
const MAX_ANSWER: usize = 64 * 1024;

/// Nodes that can be called; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Nodes(Arc<Mutex<Attending>>);

#[derive(Debug, Default)]
struct Attending {
    last: u64,
    nodes: BTreeMap<String, Node>,
}

#[derive(Debug)]
struct Node {
    number: u64,
    caller: Caller,
    /// Permits for further calls to each VM, by UID. They keep a guest that does not answer from using up all calls of
    /// the node.
    places: BTreeMap<String, Arc<Semaphore>>,
    /// Dropped when another stream of the node replaces this one, which ends this one.
    _place: oneshot::Sender<()>,
}

impl Nodes {
    fn attending(&self) -> std::sync::MutexGuard<'_, Attending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a node by its stream: takes the node's messages, and returns those to the node.
    ///
    /// # Errors
    /// If the stream does not begin according to the protocol.
    pub(super) async fn attend(
        self,
        node: String,
        answers: Streaming<CallbackFromHost>,
    ) -> Result<Opened, Status> {
        let (bounds, answers) = callback::begin(answers).await?;
        let (caller, calls) = callback::open(&bounds, answers);
        let (place, replaced) = oneshot::channel();
        let number = {
            let mut attending = self.attending();
            attending.last += 1;
            let number = attending.last;
            attending
                .nodes
                .insert(node.clone(), Node { number, caller, places: BTreeMap::new(), _place: place });
            number
        };
        tracing::info!(node, "a node has connected");
        let seat = Seat { nodes: self, node, number };
        Ok(Opened::new(calls, async move {
            // Nothing is ever sent: the channel closes when another stream replaces this one.
            drop(replaced.await);
            Status::aborted(format!("the node {} has connected again", seat.node))
        }))
    }
}

impl Reaches for Nodes {
    fn reach(&self, vm: &str, node: &str, instance: &str) -> Reach {
        let Some((namespace, name)) = vm.split_once('/') else { return Reach::Untold };
        if !self.attending().nodes.contains_key(node) {
            return Reach::Untold;
        }
        let vm = RunningVirtualMachine {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: instance.to_owned(),
        };
        let agent = OfNode { nodes: self.clone(), node: node.to_owned(), vm };
        // The node reports whether there is a session and whether the agent is capable, so both are assumed here.
        let capabilities = Arc::new([CAPABILITY.to_owned()]);
        Reach::Session { agent: Agent::elsewhere(Arc::new(agent)), capabilities }
    }
}

/// Registration of a node, which ends when this is dropped.
struct Seat {
    nodes: Nodes,
    node: String,
    number: u64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut attending = self.nodes.attending();
        if attending.nodes.get(&self.node).is_some_and(|node| node.number == self.number) {
            attending.nodes.remove(&self.node);
            tracing::info!(node = self.node, "a node has disconnected");
        }
    }
}

/// Agent that is called through its node.
#[derive(Debug)]
struct OfNode {
    nodes: Nodes,
    node: String,
    vm: RunningVirtualMachine,
}

impl OfNode {
    /// Returns a client for one call, and the permit that the call holds.
    async fn client(&self) -> Result<(GuestsClient<Caller>, OwnedSemaphorePermit), Status> {
        let (caller, places) = self.way().ok_or_else(|| self.is_gone())?;
        let place = places.acquire_owned().await.map_err(|_| self.is_gone())?;
        let client = GuestsClient::with_origin(caller, http::Uri::from_static(ORIGIN));
        Ok((client.max_decoding_message_size(MAX_ANSWER), place))
    }

    fn way(&self) -> Option<(Caller, Arc<Semaphore>)> {
        let mut attending = self.nodes.attending();
        let node = attending.nodes.get_mut(&self.node)?;
        // Remove the entries of VMs that have no call in progress.
        node.places.retain(|_, places| {
            Arc::strong_count(places) > 1 || places.available_permits() < CALLS_OF_A_GUEST
        });
        let places = node.places.entry(self.vm.uid.clone());
        let places = places.or_insert_with(|| Arc::new(Semaphore::new(CALLS_OF_A_GUEST)));
        Some((node.caller.clone(), Arc::clone(places)))
    }

    fn is_gone(&self) -> Status {
        Status::unavailable(format!("guestlet-host on the node {} cannot be asked", self.node))
    }

    /// An answer of the agent, or of its node; one without either is nobody's.
    fn told<T>(&self, answer: Answer<T>) -> Answer<T> {
        answer.map_err(|status| match std::error::Error::source(&status) {
            Some(_) => self.is_gone(),
            None => status,
        })
    }
}

fn behalf(behalf: Option<&Behalf>) -> Option<OnBehalf> {
    behalf.map(|one| OnBehalf { caller: one.caller().to_string(), audit_id: one.id().to_owned() })
}

#[tonic::async_trait]
impl Elsewhere for OfNode {
    async fn find_disk(&self, by: Option<&Behalf>, request: FindDiskRequest) -> Answer<FindDiskResponse> {
        let request =
            FindDiskOfGuestRequest { vm: Some(self.vm.clone()), behalf: behalf(by), request: Some(request) };
        let (mut client, _place) = self.client().await?;
        self.told(client.find_disk(Request::new(request)).await)
    }

    async fn release_disk(
        &self,
        by: Option<&Behalf>,
        request: ReleaseDiskRequest,
    ) -> Answer<ReleaseDiskResponse> {
        let request = ReleaseDiskOfGuestRequest {
            vm: Some(self.vm.clone()),
            behalf: behalf(by),
            request: Some(request),
        };
        let (mut client, _place) = self.client().await?;
        self.told(client.release_disk(Request::new(request)).await)
    }
}
