//! Connection to the host half: calls of `guestlet.v1.Cloud` on the socket of this node's agent. There is one
//! connection, made when it is needed, and again after it broke.
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

/// Timeout of a call. That of the agent is longer.
const DEADLINE: Duration = Duration::from_secs(30);
/// Timeout for the agent to accept a connection.
const DIAL_DEADLINE: Duration = Duration::from_secs(5);
/// Limit of the bytes of one answer.
const MAX_ANSWER: usize = 4 << 20;
/// Duration of a long poll.
pub const WAIT_SECONDS: u32 = 20;

type Client = CloudClient<http2::Client>;

/// Client of the host half; clones share the connection.
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

/// Returns whether the same call may succeed later without any change by a person. Other errors have to be
/// fixed by somebody.
pub fn is_passing(status: &Status) -> bool {
    !matches!(
        status.code(),
        Code::InvalidArgument | Code::FailedPrecondition | Code::PermissionDenied | Code::Unimplemented
    )
}

impl Host {
    /// Creates a client that reaches the host half through the agent at this socket.
    pub fn new(socket: PathBuf) -> Self {
        Self(Arc::new(Shared { socket, connected: Mutex::default(), tasks: Scope::new() }))
    }

    fn connected(&self) -> MutexGuard<'_, Option<Connected>> {
        // No operation under the lock can leave the value half changed, so a poisoned lock is usable.
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

    /// Drops this connection, so that the next call makes another one.
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
            // A connection that breaks below a call is reported as a status without a code of its own.
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

    /// Returns what has changed of the VMs since a position, as soon as anything has changed.
    ///
    /// # Errors
    /// Fails with the status of the host half, or with `UNAVAILABLE` if it cannot be reached. The same holds for
    /// all calls.
    pub async fn watch_instances(&self, position: &str) -> Result<v1::WatchInstancesResponse, Status> {
        let request = v1::WatchInstancesRequest { bounds: Some(bounds(position)) };
        self.call(async |client| client.watch_instances(request).await).await
    }

    /// Returns what has changed of the load balancers since a position, as soon as anything has changed.
    ///
    /// # Errors
    /// The errors of [`Host::watch_instances`].
    pub async fn watch_load_balancers(
        &self,
        position: &str,
    ) -> Result<v1::WatchLoadBalancersResponse, Status> {
        let request = v1::WatchLoadBalancersRequest { bounds: Some(bounds(position)) };
        self.call(async |client| client.watch_load_balancers(request).await).await
    }

    /// Asks whether a VM exists.
    ///
    /// # Errors
    /// The errors of [`Host::watch_instances`].
    pub async fn instance(&self, vm_uid: String) -> Result<v1::GetInstanceResponse, Status> {
        self.call(async |client| client.get_instance(v1::GetInstanceRequest { vm_uid }).await).await
    }

    /// Lists all load balancers in their present state.
    ///
    /// # Errors
    /// The errors of [`Host::watch_instances`].
    pub async fn load_balancers(&self) -> Result<Vec<v1::LoadBalancer>, Status> {
        let listed =
            self.call(async |client| client.list_load_balancers(v1::ListLoadBalancersRequest {}).await);
        Ok(listed.await?.load_balancers)
    }

    /// Asks the host half to accept the request of a Service, and returns the load balancer that the Service has
    /// then.
    ///
    /// # Errors
    /// The errors of [`Host::watch_instances`].
    pub async fn ensure(&self, request: v1::EnsureLoadBalancerRequest) -> Result<v1::LoadBalancer, Status> {
        let of = request.service.clone().unwrap_or_default();
        let answer = self.call(async |client| client.ensure_load_balancer(request).await).await?;
        let is_its = |balancer: &v1::LoadBalancer| {
            is_sensible(balancer) && balancer.service.as_ref().is_some_and(|service| service.uid == of.uid)
        };
        let found = answer.load_balancer.filter(is_its);
        found.ok_or_else(|| Status::unavailable("the host half answered about another Service"))
    }

    /// Releases the load balancer of a Service; returns whether it is completely released.
    ///
    /// # Errors
    /// The errors of [`Host::watch_instances`].
    pub async fn release(&self, service: v1::ServiceReference) -> Result<bool, Status> {
        let request = v1::ReleaseLoadBalancerRequest { service: Some(service) };
        Ok(self.call(async |client| client.release_load_balancer(request).await).await?.released)
    }
}

/// Returns whether the state of a load balancer is known to this program.
pub fn is_sensible(balancer: &v1::LoadBalancer) -> bool {
    State::try_from(balancer.state).is_ok_and(|state| state != State::Unspecified)
}

fn bounds(position: &str) -> v1::WatchBounds {
    v1::WatchBounds { position: position.to_owned(), wait_seconds: WAIT_SECONDS }
}
