//! Between the guests of a node and the controller of its cluster, which alone may plug volumes into VMs, and knows all VMs of a
//! guest cluster.
//!
//! ```text
//!  guest ──call about volumes or its cluster──▶ session ──▶ Relay ──Ask──▶ controller
//!        ──receipt of a freeze──▶ receipts ──where it is on this node's clock──▶ Relay ──AttachReceipt──▶ controller
//!  agent ◀──release, find── session ◀── attend ◀── (the node's stream)
//!                                       link ──finds the controller by its Lease, joins, connects again
//! ```
//!
//! Calls go on as the bytes that they are. Nothing is decided here: whose volume it is and where the VM runs, the controller
//! asks of the API.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, TryAcquireError, watch};
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;

use super::backends::Vm;
use super::backends::kubevirt::node::{Instance, Roster};
use super::for_guests::{Answering, Asking, Checks, Cloud, Volumes};
use crate::transport::{callback, http2};
use crate::wire::proto::v1::controller_client::ControllerClient;
use crate::wire::proto::v1::{AskRequest, HealthCheckResult, RunningVirtualMachine};

mod attend;
mod checks;
mod link;
mod receipts;
mod window;

use checks::Polls;
pub use link::{Link, Site};
pub use receipts::attach;

/// Bytes of a call; a session takes no larger ones.
const MAX_REQUEST: usize = 64 * 1024;
/// How long a call waits for the controller: another leader takes over in this time.
const MEETING: Duration = Duration::from_secs(20);
/// The same of a call about the cluster, which has to be answered sooner, and is made again.
const MEETING_OF_CLUSTERS: Duration = Duration::from_secs(5);
/// Long polls that may be under way at a time, of the 256 calls that the controller takes from a node.
const POLLS: usize = 128;
/// How long an answer may take before it is looked whether the controller is still the one that leads.
const SLOW: Duration = Duration::from_secs(5);

/// The way to the controller, if there is one.
type Way = Option<ControllerClient<http2::Client>>;

/// Hands the calls of guests on to the controller.
#[derive(Debug, Clone)]
pub struct Relay {
    way: watch::Receiver<Way>,
    roster: Arc<Roster>,
    /// Somebody has waited for long.
    doubt: Arc<Notify>,
    asking: Waiting,
    /// Places for long polls.
    polls: Arc<Semaphore>,
    /// What agents check.
    checks: Polls,
}

/// How many wait for an answer of the controller; clones share it.
#[derive(Debug, Clone)]
struct Waiting(watch::Sender<usize>);

impl Default for Waiting {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Waiting {
    /// One more waits, until what this returns is dropped.
    fn one(&self) -> One {
        self.0.send_modify(|count| *count += 1);
        One(self.clone())
    }

    /// Returns when nobody waits.
    async fn nobody(&self) {
        // It fails only when nobody has the other end, which is here.
        drop(self.0.subscribe().wait_for(|count| *count == 0).await);
    }
}

struct One(Waiting);

impl Drop for One {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

impl Relay {
    /// Hands a call on. One that `is_long` waits for news as it should, and keeps nobody from what is done when nobody waits.
    async fn ask(
        self,
        vm: Arc<Vm>,
        call: Request<Body>,
        meeting: Duration,
        is_long: bool,
    ) -> Result<Bytes, Status> {
        let (head, body) = call.into_parts();
        let message = callback::request_message(body, MAX_REQUEST).await?;
        let Instance { namespace, name, uid, .. } = self
            .roster
            .get(&vm.name)
            .ok_or_else(|| Status::unavailable("this VM has just left its node; repeat the call"))?;
        let request = AskRequest {
            vm: Some(RunningVirtualMachine { namespace, name, uid }),
            method: head.uri.path().to_owned(),
            request: message.into(),
        };
        let _one = (!is_long).then(|| self.asking.one());
        let mut controller = self.meet(meeting).await?;
        let mut asking = std::pin::pin!(controller.ask(request));
        loop {
            match tokio::time::timeout(SLOW, &mut asking).await {
                Err(_) if is_long => {}
                Err(_) => self.doubt.notify_one(),
                Ok(Ok(answer)) => return Ok(answer.into_inner().answer.into()),
                Ok(Err(status)) if std::error::Error::source(&status).is_some() => {
                    let words = "the connection to guestlet's controller broke, and the outcome of the call \
                                 is not known; repeat it";
                    return Err(Status::unavailable(words));
                }
                Ok(Err(status)) => return Err(Status::new(status.code(), status.message())),
            }
        }
    }

    /// A place for a long poll; other calls need none.
    fn place(&self, is_long: bool) -> Result<Option<SemaphorePermit<'_>>, TryAcquireError> {
        is_long.then(|| self.polls.try_acquire()).transpose()
    }

    /// The controller, as soon as there is one.
    async fn meet(&self, meeting: Duration) -> Result<ControllerClient<http2::Client>, Status> {
        let (mut way, end) = (self.way.clone(), Instant::now() + meeting);
        // The link has ended with the program.
        drop(tokio::time::timeout_at(end, way.wait_for(Option::is_some)).await);
        // Why, the node's log and its doctor say: guests need not know how things are in the host cluster.
        let none = || Status::unavailable("guestlet's controller cannot be reached now; repeat the call");
        way.borrow().clone().ok_or_else(none)
    }
}

#[tonic::async_trait]
impl Volumes for Relay {
    fn answer(&self, guest: Asking, call: Request<Body>) -> Answering {
        let asked = self.clone().ask(guest.vm, call, MEETING, false);
        Box::pin(async move { answer(asked.await) })
    }

    /// Nothing but the settings bounds it: `KubeVirt` makes room.
    async fn most(&self, vm: &Vm) -> u32 {
        vm.max_volumes
    }
}

#[tonic::async_trait]
impl Cloud for Relay {
    fn answer(&self, guest: Asking, call: Request<Body>) -> Answering {
        let method = call.uri().path().rsplit('/').next().unwrap_or_default();
        let is_long = method.starts_with("Watch");
        let relay = self.clone();
        Box::pin(async move {
            let Ok(_place) = relay.place(is_long) else {
                let words =
                    "too many calls of this host's VMs are waiting for changes; repeat this one later";
                return Status::resource_exhausted(words).into_http();
            };
            answer(relay.clone().ask(guest.vm, call, MEETING_OF_CLUSTERS, is_long).await)
        })
    }

    async fn checks(&self, vm: &Vm) -> Option<watch::Receiver<Arc<Checks>>> {
        self.checks.of(self, vm)
    }

    /// The agent reports the same by itself.
    async fn checked(&self, _: &Vm, _: u64, _: Vec<HealthCheckResult>) {}
}

fn answer(asked: Result<Bytes, Status>) -> http::Response<Body> {
    match asked {
        Ok(message) => callback::response(&message),
        Err(status) => status.into_http(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_when_each_has_an_answer() {
        let waiting = Waiting::default();
        waiting.nobody().await;
        let all = [waiting.one(), waiting.one()];
        let second = Duration::from_secs(1);
        assert!(tokio::time::timeout(second, waiting.nobody()).await.is_err());
        let [first, last] = all;
        drop(first);
        assert!(tokio::time::timeout(second, waiting.nobody()).await.is_err());
        drop(last);
        waiting.nobody().await;
    }
}
