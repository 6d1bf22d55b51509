//! The nodes that attend, and the agents of their guests.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_stream::Stream;
use tonic::{Request, Status, Streaming};

use crate::host::caller::Behalf;
use crate::host::calls::{Agent, Answer, Elsewhere};
use crate::host::disks::release::CAPABILITY;
use crate::host::fleet::{Reach, Reaches};
use crate::transport::callback::{self, Caller, Calls};
use crate::transport::http2::ORIGIN;
use crate::wire::proto::v1::callback_from_host::Message;
use crate::wire::proto::v1::guests_client::GuestsClient;
use crate::wire::proto::v1::{
    CallbackFromGuest, CallbackFromHost, FindDiskOfGuestRequest, FindDiskRequest, FindDiskResponse, OnBehalf,
    ReleaseDiskOfGuestRequest, ReleaseDiskRequest, ReleaseDiskResponse, RunningVirtualMachine,
};

/// How long a node may take to its first message.
const BEGINNING: Duration = Duration::from_secs(5);
/// Calls of one guest that may be under way at a time, of the 64 of its node.
const CALLS_OF_A_GUEST: usize = 8;
/// Bytes of one answer.
const MAX_ANSWER: usize = 64 * 1024;

/// The nodes that can be asked.
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
    /// Of each VM that somebody is asked about, how many calls more may be under way: one whose guest does not answer must
    /// not take the node from others.
    places: BTreeMap<String, Arc<Semaphore>>,
    /// Gone when another stream of the node takes the place of this one.
    _place: oneshot::Sender<()>,
}

impl Nodes {
    fn attending(&self) -> std::sync::MutexGuard<'_, Attending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A node attends by a stream of which these are its messages; returns those for it.
    ///
    /// # Errors
    /// If it does not begin as it should.
    pub(super) async fn attend(
        self,
        node: String,
        mut answers: Streaming<CallbackFromHost>,
    ) -> Result<Attended, Status> {
        let first = tokio::time::timeout(BEGINNING, answers.message()).await;
        let first = first.map_err(|_| Status::deadline_exceeded("the first message does not come"))??;
        let Some(Message::Bounds(bounds)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("the first message has to have the bounds"));
        };
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
        tracing::info!(node, "a node attends");
        Ok(Attended { calls, replaced, seat: Seat { nodes: self, node, number }, has_ended: false })
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
        // Whether its agent can, and whether there is a session with it, the node says.
        let capabilities = Arc::new([CAPABILITY.to_owned()]);
        Reach::Session { agent: Agent::elsewhere(Arc::new(agent)), capabilities }
    }
}

/// The messages for a node; with them, it attends no more.
pub struct Attended {
    calls: Calls<Streaming<CallbackFromHost>>,
    replaced: oneshot::Receiver<()>,
    seat: Seat,
    has_ended: bool,
}

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
            tracing::info!(node = self.node, "a node attends no more");
        }
    }
}

impl Stream for Attended {
    type Item = Result<CallbackFromGuest, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        if Pin::new(&mut self.replaced).poll(context).is_ready() {
            self.has_ended = true;
            let node = &self.seat.node;
            return Poll::Ready(Some(Err(Status::aborted(format!("the node {node} attends anew")))));
        }
        let next = Pin::new(&mut self.calls).poll_next(context);
        self.has_ended = matches!(next, Poll::Ready(None | Some(Err(_))));
        next
    }
}

/// An agent that is asked through its node.
#[derive(Debug)]
struct OfNode {
    nodes: Nodes,
    node: String,
    vm: RunningVirtualMachine,
}

impl OfNode {
    /// For a call, and the place that it has.
    async fn client(&self) -> Result<(GuestsClient<Caller>, OwnedSemaphorePermit), Status> {
        let (caller, places) = self.way().ok_or_else(|| self.is_gone())?;
        let place = places.acquire_owned().await.map_err(|_| self.is_gone())?;
        let client = GuestsClient::with_origin(caller, http::Uri::from_static(ORIGIN));
        Ok((client.max_decoding_message_size(MAX_ANSWER), place))
    }

    fn way(&self) -> Option<(Caller, Arc<Semaphore>)> {
        let mut attending = self.nodes.attending();
        let node = attending.nodes.get_mut(&self.node)?;
        // Those that nobody uses.
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
