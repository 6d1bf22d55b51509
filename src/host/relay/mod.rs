//! Relay between the guests of a node and the controller of its cluster. Only the controller may attach volumes to
//! VMs, and only it knows all VMs of a guest cluster.
//!
//! ```text
//!  guest ──call about volumes or its cluster──▶ session ──▶ Relay ──Ask──▶ controller
//!        ──receipt of a freeze──▶ receipts ──with its window on this node's clock──▶ Relay ──AttachReceipt──▶ controller
//!  agent ◀──release, find── session ◀── attend ◀── (the node's stream)
//!                                       link ──finds the controller by its Lease, joins, reconnects
//! ```
//!
//! Calls are forwarded as bytes. No decision is made here: the controller looks up in the API to whom a volume
//! belongs and where the VM runs.

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

/// Limit on the bytes of a call. Sessions accept no larger ones.
const MAX_REQUEST: usize = 64 * 1024;
/// Time that a call waits for a connection to the controller; enough for another leader to take over.
const MEETING: Duration = Duration::from_secs(20);
/// Time that a call about the cluster waits. Such a call must be answered sooner, and is repeated.
const MEETING_OF_CLUSTERS: Duration = Duration::from_secs(5);
/// Limit on concurrent long polls, of the 256 calls that the controller accepts from a node.
const POLLS: usize = 128;
/// Time without an answer after which the node checks whether the controller is still the leader.
const SLOW: Duration = Duration::from_secs(5);

/// Client of the controller, while there is a connection.
type Way = Option<ControllerClient<http2::Client>>;

/// Relay that forwards the calls of guests to the controller.
#[derive(Debug, Clone)]
pub struct Relay {
    way: watch::Receiver<Way>,
    roster: Arc<Roster>,
    /// Notified when a call has waited for long, so that the link checks the leader.
    doubt: Arc<Notify>,
    asking: Waiting,
    /// Permits for long polls.
    polls: Arc<Semaphore>,
    /// Long polls for the health checks of agents.
    checks: Polls,
}

/// Number of calls that wait for an answer of the controller; clones share it.
#[derive(Debug, Clone)]
struct Waiting(watch::Sender<usize>);

impl Default for Waiting {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Waiting {
    /// Counts one more waiting call, until the returned guard is dropped.
    fn one(&self) -> One {
        self.0.send_modify(|count| *count += 1);
        One(self.clone())
    }

    /// Completes when no call is waiting.
    async fn nobody(&self) {
        // This fails only if the sender is dropped, and `self` is the sender.
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
    /// Forwards a call. A long poll (`is_long`) is expected to wait, so it neither counts as waiting nor raises doubt
    /// about the leader.
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

    /// Returns a permit for a long poll; other calls need none.
    fn place(&self, is_long: bool) -> Result<Option<SemaphorePermit<'_>>, TryAcquireError> {
        is_long.then(|| self.polls.try_acquire()).transpose()
    }

    /// Waits for a connection to the controller.
    async fn meet(&self, meeting: Duration) -> Result<ControllerClient<http2::Client>, Status> {
        let (mut way, end) = (self.way.clone(), Instant::now() + meeting);
        // An error means that the link has ended, and the program with it.
        drop(tokio::time::timeout_at(end, way.wait_for(Option::is_some)).await);
        // The log of the node and its doctor show the cause. Guests must not learn details of the host cluster.
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

    /// Returns the limit of the settings. There is no other, because `KubeVirt` makes room for volumes as needed.
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

    /// Ignores the results, because the agent also reports them to the controller itself.
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
