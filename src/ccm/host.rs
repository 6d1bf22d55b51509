//! The way to the host half: calls of `guestlet.v1.Cloud` on the socket of this node's agent. One connection, made when it is needed
//! and again after it broke.
//!
//! ```text
//!  none ──a call──▶ dial ──▶ connected ──it breaks, or a call is not answered──▶ none
//! ```

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::UnixStream;
use tonic::{Code, Response, Status};

use crate::supervise::Scope;
use crate::sys::error_chain;
use crate::transport::http2;
use crate::wire::proto::v1;
use crate::wire::proto::v1::cloud_client::CloudClient;
use crate::wire::proto::v1::load_balancer::State;

/// How long a call may take. The agent gives one up later.
const DEADLINE: Duration = Duration::from_secs(30);
/// How long the agent may take to accept a connection.
const DIAL_DEADLINE: Duration = Duration::from_secs(5);
/// Bytes of one answer.
const MAX_ANSWER: usize = 4 << 20;
/// For how long a long poll waits.
pub const WAIT_SECONDS: u32 = 20;

type Client = CloudClient<http2::Client>;

/// Calls the host half; clones share the connection.
#[derive(Clone)]
pub struct Host(Arc<Shared>);

struct Shared {
    socket: PathBuf,
    connected: Mutex<Option<Connected>>,
    tasks: Scope,
}

#[derive(Clone)]
struct Connected {
    client: Client,
    number: u64,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Host").field(&self.0.socket).finish()
    }
}

/// Whether the same call may succeed later without anything being changed: what is not so is somebody's to change.
pub fn is_passing(status: &Status) -> bool {
    !matches!(
        status.code(),
        Code::InvalidArgument | Code::FailedPrecondition | Code::PermissionDenied | Code::Unimplemented
    )
}

impl Host {
    /// The one that the agent at this socket reaches.
    pub fn new(socket: PathBuf) -> Self {
        Self(Arc::new(Shared { socket, connected: Mutex::default(), tasks: Scope::new() }))
    }

    fn connected(&self) -> MutexGuard<'_, Option<Connected>> {
        // Nothing that is done under the lock leaves it half changed.
        self.0.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn client(&self) -> Result<Connected, Status> {
        if let Some(connected) = self.connected().clone() {
            return Ok(connected);
        }
        let socket = self.0.socket.display();
        let away = |why: String| {
            Status::unavailable(format!("the agent of this node cannot be reached at {socket}: {why}"))
        };
        let dialled = tokio::time::timeout(DIAL_DEADLINE, UnixStream::connect(&self.0.socket)).await;
        let stream = dialled
            .map_err(|_| away("it does not answer".to_owned()))?
            .map_err(|error| away(error.to_string()))?;
        let (client, mut connection) =
            http2::connect(stream).await.map_err(|error| away(error_chain::words(&error)))?;
        let client = CloudClient::with_origin(client, http::Uri::from_static(http2::ORIGIN))
            .max_decoding_message_size(MAX_ANSWER);
        let connected = {
            let mut slot = self.connected();
            let number = slot.as_ref().map_or(0, |before| before.number) + 1;
            slot.insert(Connected { client, number: number + fastrand::u64(..1 << 32) }).clone()
        };
        let (shared, number) = (Arc::downgrade(&self.0), connected.number);
        self.0.tasks.children().spawn(async move {
            drop(connection.ended().await);
            if let Some(shared) = shared.upgrade() {
                Self(shared).lose(number);
            }
        });
        Ok(connected)
    }

    /// Makes the next call on another connection than this.
    fn lose(&self, number: u64) {
        self.connected().take_if(|connected| connected.number == number);
    }

    async fn call<T>(
        &self,
        make: impl AsyncFnOnce(&mut Client) -> Result<Response<T>, Status>,
    ) -> Result<T, Status> {
        let Connected { mut client, number } = self.client().await?;
        match tokio::time::timeout(DEADLINE, make(&mut client)).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            // What breaks below a call is told as a status without a code of its own.
            Ok(Err(status)) if matches!(status.code(), Code::Unknown | Code::Internal | Code::Cancelled) => {
                self.lose(number);
                Err(Status::unavailable(format!("the call was not answered: {}", status.message())))
            }
            Ok(Err(status)) => Err(status),
            Err(_) => {
                self.lose(number);
                let seconds = DEADLINE.as_secs();
                Err(Status::unavailable(format!("the host half did not answer within {seconds} s")))
            }
        }
    }

    /// What has changed of the VMs since a position, as soon as anything has.
    ///
    /// # Errors
    /// As the host half answers, or `UNAVAILABLE` if it cannot be asked. So are those of all calls.
    pub async fn watch_instances(&self, position: &str) -> Result<v1::WatchInstancesResponse, Status> {
        let request = v1::WatchInstancesRequest { bounds: Some(bounds(position)) };
        self.call(async |client| client.watch_instances(request).await).await
    }

    /// What has changed of the load balancers since a position, as soon as anything has.
    ///
    /// # Errors
    /// As [`Host::watch_instances`].
    pub async fn watch_load_balancers(
        &self,
        position: &str,
    ) -> Result<v1::WatchLoadBalancersResponse, Status> {
        let request = v1::WatchLoadBalancersRequest { bounds: Some(bounds(position)) };
        self.call(async |client| client.watch_load_balancers(request).await).await
    }

    /// Whether there is a VM.
    ///
    /// # Errors
    /// As [`Host::watch_instances`].
    pub async fn instance(&self, vm_uid: String) -> Result<v1::GetInstanceResponse, Status> {
        self.call(async |client| client.get_instance(v1::GetInstanceRequest { vm_uid }).await).await
    }

    /// All load balancers, as they are now.
    ///
    /// # Errors
    /// As [`Host::watch_instances`].
    pub async fn load_balancers(&self) -> Result<Vec<v1::LoadBalancer>, Status> {
        let listed =
            self.call(async |client| client.list_load_balancers(v1::ListLoadBalancersRequest {}).await);
        Ok(listed.await?.load_balancers)
    }

    /// Has the host half take over what a Service wants; what it has then.
    ///
    /// # Errors
    /// As [`Host::watch_instances`].
    pub async fn ensure(&self, request: v1::EnsureLoadBalancerRequest) -> Result<v1::LoadBalancer, Status> {
        let of = request.service.clone().unwrap_or_default();
        let answer = self.call(async |client| client.ensure_load_balancer(request).await).await?;
        let is_its = |balancer: &v1::LoadBalancer| {
            is_sensible(balancer) && balancer.service.as_ref().is_some_and(|service| service.uid == of.uid)
        };
        let found = answer.load_balancer.filter(is_its);
        found.ok_or_else(|| Status::unavailable("the host half answered about another Service"))
    }

    /// Gives back what a Service has; whether nothing is left of it.
    ///
    /// # Errors
    /// As [`Host::watch_instances`].
    pub async fn release(&self, service: v1::ServiceReference) -> Result<bool, Status> {
        let request = v1::ReleaseLoadBalancerRequest { service: Some(service) };
        Ok(self.call(async |client| client.release_load_balancer(request).await).await?.released)
    }
}

/// Whether it is said how a load balancer is.
pub fn is_sensible(balancer: &v1::LoadBalancer) -> bool {
    State::try_from(balancer.state).is_ok_and(|state| state != State::Unspecified)
}

fn bounds(position: &str) -> v1::WatchBounds {
    v1::WatchBounds { position: position.to_owned(), wait_seconds: WAIT_SECONDS }
}
