//! Callback of one session: the guest's calls to `guestlet.v1.Host`, to `csi.v1.Controller` for its cluster's
//! volumes, and to `guestlet.v1.Cloud` for its cluster's VMs and load balancers. They are messages on the
//! connection of the session ([`crate::transport::callback`]).
//!
//! ```text
//!  open ──▶ WhoAmI ──▶ in use        (denied by the guest's settings: none, for as long as the session lasts)
//!   ▲ │                  │
//!   │ └──refused, lost───┤
//!   └── wait (backoff) ◀─┘──too many calls, or broken again and again──▶ refused
//! ```
//!
//! The future of [`keep`] is part of that of the session: when the session ends, everything served here ends at
//! once.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tonic::body::Body;
use tonic::{Code, Status};

use super::backoff::{Backoff, LASTING};
use super::contact::Contact;
use super::conversation::{End, Loss, Refusal};
use super::for_guests::{Answering, Asking, Cloud, Volumes};
use super::half::Half;
use super::metered;
use super::rate::Allowance;
use super::report::{Report, Teller};
use super::text;
use super::unread::Unread;
use crate::transport::callback::{self, Ended};
use crate::transport::http2;
use crate::wire::proto::csi::controller_server::SERVICE_NAME as CONTROLLER;
use crate::wire::proto::v1::cloud_server::SERVICE_NAME as CLOUD;
use crate::wire::proto::v1::guest_client::GuestClient;
use crate::wire::proto::v1::host_server::{Host, HostServer};
use crate::wire::proto::v1::{
    CallbackBounds, CallbackState, PingRequest, PingResponse, WhoAmIRequest, WhoAmIResponse,
};

/// Capability that an agent reports if it has a callback.
const CAPABILITY: &str = "callback";
/// Limit on the bytes of one request; all of them are small.
const MAX_REQUEST: usize = 16 * 1024;
/// Limit on the bytes of a request about volumes.
const MAX_VOLUME_REQUEST: u32 = 64 * 1024;
/// Bytes that a message has in addition to its request: method and number.
const AROUND: usize = 1024;
/// Limit on the bytes of a ping.
const MAX_PING: usize = 4096;
/// Time for which the number of volumes that a VM can have is cached.
const COUNT_AGAIN: Duration = Duration::from_secs(1);
/// Timeout of a call, including the receipt of its request.
const CALL_DEADLINE: Duration = Duration::from_secs(30);
/// Timeout of a call about volumes, which may have to wait for a guest. Work that it has begun continues after
/// that.
const VOLUME_DEADLINE: Duration = Duration::from_secs(180);
/// Interval at which a delayed call about volumes checks whether it may proceed.
const CALL_AGAIN: Duration = Duration::from_millis(20);
/// Number of times in a row that the callback may break soon after it was opened, before the guest is refused.
const MAX_BREAKS: u32 = 8;

/// Returns whether an agent with these capabilities has a callback.
pub fn is_able(capabilities: &[String]) -> bool {
    capabilities.iter().any(|capability| capability == CAPABILITY)
}

/// Keeps the callback of an open session, if the agent is `able` to have one. `client` calls the agent. Completes
/// only when the guest is to be refused.
pub async fn keep(client: &http2::Client, contact: &Contact, able: bool, teller: &Teller) -> Refusal {
    if !able {
        let reason = "the agent is too old to make calls to this host half; upgrade it".to_owned();
        teller.send(Report::Callback(CallbackState::Unspecified, reason)).await;
        return std::future::pending().await;
    }
    let guard = Guard::new(contact);
    let mut backoff = Backoff::new(Instant::now());
    let mut breaks = 0;
    let mut reason = String::new();
    loop {
        teller.send(Report::Callback(CallbackState::Connecting, reason)).await;
        let began = Instant::now();
        reason = match serve(client, contact, &guard, teller).await {
            // The guest's settings change only with a restart of its agent, which ends the session as well.
            Err(End::Refused(Refusal::Denied(reason))) => {
                teller.send(Report::Callback(CallbackState::Unspecified, reason)).await;
                return std::future::pending().await;
            }
            Err(End::Refused(refusal)) => return refusal,
            Err(End::Lost(loss)) => text::chain(&loss),
            Ok(()) => "the guest closed it".to_owned(),
        };
        let now = Instant::now();
        if now - began >= LASTING {
            backoff.restart(now);
            breaks = 0;
        }
        breaks += 1;
        if breaks == MAX_BREAKS {
            return Refusal::Callback(reason);
        }
        tokio::time::sleep(backoff.next_patient(fastrand::f64())).await;
    }
}

/// Opens the callback once, and serves it until it ends.
async fn serve(
    client: &http2::Client,
    contact: &Contact,
    guard: &Arc<Guard>,
    teller: &Teller,
) -> Result<(), End> {
    let introduced = Arc::new(Notify::new());
    let service =
        Service { contact: contact.clone(), introduced: Arc::clone(&introduced), counted: Arc::default() };
    let service = HostServer::new(service).max_decoding_message_size(MAX_REQUEST);
    let Contact { vm, topology, half, volumes, cloud, .. } = contact.clone();
    let guest = Asking { vm, place: topology, audit: half.audit.clone() };
    let service = Guarded { service, volumes, cloud, guest, guard: Arc::clone(guard) };
    let bounds = CallbackBounds {
        host_instance_id: contact.half.host.instance_id.clone(),
        // Three budgets of the same size: calls about volumes, which may have to wait for a pool; calls about the cluster,
        // some of which wait for news; and all others.
        open_calls: contact.vm.limits.open_calls.saturating_mul(3),
        request_bytes: MAX_VOLUME_REQUEST,
    };
    let most = usize::try_from(MAX_VOLUME_REQUEST).unwrap_or(usize::MAX).saturating_add(AROUND);
    let client = Watched { client: client.clone(), unread: Arc::clone(&guard.unread) };
    let mut client = GuestClient::with_origin(client, http::Uri::from_static(http2::ORIGIN))
        .max_decoding_message_size(most);
    let mut serving = Box::pin(callback::serve(bounds, service, async |messages| {
        client.callback(messages).await.map(tonic::Response::into_inner)
    }));
    let mut known = false;
    loop {
        tokio::select! {
            biased;
            () = guard.flooded.notified() => return Err(Refusal::Calls.into()),
            () = guard.unread.too_long() => return Err(Refusal::from(metered::Excess::Unread).into()),
            ended = &mut serving => return ended.map_err(end),
            () = introduced.notified(), if !known => {
                known = true;
                teller.send(Report::Callback(CallbackState::Open, String::new())).await;
            }
        }
    }
}

/// Translates the end of a callback into that of the session.
fn end(ended: Ended) -> End {
    match ended {
        Ended::Breach(breach) => Refusal::Callback(breach.to_string()).into(),
        Ended::Status(status) => match End::from(*status) {
            // The stream of events, not the callback, decides which host half holds the guest.
            End::Refused(Refusal::Held(message)) => Loss::Call { code: Code::Aborted, message }.into(),
            end => end,
        },
    }
}

/// Client of the agent that reports answers which the agent does not read.
#[derive(Debug, Clone)]
struct Watched {
    client: http2::Client,
    unread: Arc<Unread>,
}

impl tower_service::Service<Request<Body>> for Watched {
    type Response = <http2::Client as tower_service::Service<Request<Body>>>::Response;
    type Error = http2::ClientError;
    type Future = <http2::Client as tower_service::Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), http2::ClientError>> {
        self.client.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let unread = Arc::clone(&self.unread);
        self.client.call(request.map(|body| unread.watch(body)))
    }
}

/// Implementation of `guestlet.v1.Host` for one guest.
#[derive(Debug, Clone)]
struct Service {
    contact: Contact,
    introduced: Arc<Notify>,
    /// Number of volumes that the VM can have, and when it was determined.
    counted: Arc<tokio::sync::Mutex<Option<(Instant, u32)>>>,
}

impl Service {
    /// Returns how many volumes the VM can have. The hypervisor is asked at most once per second, however often the
    /// guest calls.
    async fn most(&self) -> u32 {
        let Contact { vm, volumes, .. } = &self.contact;
        let Some(volumes) = volumes else { return vm.max_volumes };
        let mut counted = self.counted.lock().await;
        match *counted {
            Some((then, most)) if then.elapsed() < COUNT_AGAIN => most,
            _ => {
                let most = volumes.most(vm).await;
                *counted = Some((Instant::now(), most));
                most
            }
        }
    }
}

#[tonic::async_trait]
impl Host for Service {
    async fn who_am_i(
        &self,
        _: tonic::Request<WhoAmIRequest>,
    ) -> Result<tonic::Response<WhoAmIResponse>, Status> {
        let identity = self.contact.identity(self.most().await);
        self.introduced.notify_one();
        Ok(tonic::Response::new(identity))
    }

    async fn ping(
        &self,
        request: tonic::Request<PingRequest>,
    ) -> Result<tonic::Response<PingResponse>, Status> {
        let payload = request.into_inner().payload;
        if payload.len() > MAX_PING {
            let length = payload.len();
            return Err(Status::invalid_argument(format!(
                "the payload has {length} bytes; at most {MAX_PING} are allowed"
            )));
        }
        Ok(tonic::Response::new(PingResponse { payload }))
    }
}

/// Limits on the calls of one guest in a session, across all callbacks that are opened in it.
#[derive(Debug)]
struct Guard {
    allowance: Mutex<Allowance>,
    volumes: Budget,
    cluster: Budget,
    flooded: Notify,
    unread: Arc<Unread>,
    half: Arc<Half>,
}

/// Budget for calls about volumes or about the cluster. Many such calls must not cost the VM its session.
#[derive(Debug)]
struct Budget {
    /// Subject of these calls, for messages.
    subject: &'static str,
    allowance: Mutex<Allowance>,
    /// Allowance for calls that were delayed and then abandoned by the guest, or refused.
    given_up: Mutex<Allowance>,
    /// Permits for calls in progress.
    places: Arc<Semaphore>,
}

impl Budget {
    fn new(subject: &'static str, allowance: &Allowance, places: usize) -> Self {
        Self {
            subject,
            allowance: Mutex::new(allowance.clone()),
            given_up: Mutex::new(allowance.clone()),
            places: Arc::new(Semaphore::new(places)),
        }
    }
}

impl Guard {
    fn new(contact: &Contact) -> Arc<Self> {
        let per_second = f64::from(contact.vm.limits.calls_per_second);
        let allowance = Allowance::new(Instant::now(), per_second * 4.0, per_second);
        let places = usize::try_from(contact.vm.limits.open_calls).unwrap_or(Semaphore::MAX_PERMITS);
        Arc::new(Self {
            volumes: Budget::new("volumes", &allowance, places),
            cluster: Budget::new("the cluster", &allowance, places),
            allowance: Mutex::new(allowance),
            flooded: Notify::new(),
            unread: Arc::new(Unread::new(contact.vm.limits.unread)),
            half: Arc::clone(&contact.half),
        })
    }

    /// Counts one more call, and returns whether it is within the guest's allowance. If not, the callback is flooded.
    fn admit(&self) -> bool {
        self.half.metrics.callback_calls.fetch_add(1, Ordering::Relaxed);
        let admitted = take(&self.allowance);
        if !admitted {
            self.flooded.notify_one();
        }
        admitted
    }

    /// Returns a permit for one more call of a budget; without one, the guest has to repeat the call. Separate permits
    /// keep these calls from crowding out the others.
    fn enter(&self, budget: &Budget) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&budget.places).try_acquire_owned().ok();
        if place.is_none() && !take(&budget.given_up) {
            self.flooded.notify_one();
        }
        place
    }

    /// Waits until the budget allows one more call. Sidecars make many calls at once and wait for their answers, so
    /// these are delayed, and not treated as a flood, as long as the guest waits for them.
    async fn admit_in_time(&self, budget: &Budget) {
        self.half.metrics.callback_calls.fetch_add(1, Ordering::Relaxed);
        let mut waiting = Waiting { guard: self, budget, admitted: false };
        while !take(&budget.allowance) {
            tokio::time::sleep(CALL_AGAIN).await;
        }
        waiting.admitted = true;
    }
}

/// Delayed call. One that the guest abandons counts as a call that was made.
struct Waiting<'g> {
    guard: &'g Guard,
    budget: &'g Budget,
    admitted: bool,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if !self.admitted && !take(&self.budget.given_up) {
            self.guard.flooded.notify_one();
        }
    }
}

fn take(allowance: &Mutex<Allowance>) -> bool {
    allowance.lock().unwrap_or_else(PoisonError::into_inner).take(Instant::now(), 1.0)
}

/// Services for one guest, with limits on the rate and the duration of its calls.
#[derive(Debug, Clone)]
struct Guarded<S> {
    service: S,
    /// Handler of calls about volumes.
    volumes: Option<Arc<dyn Volumes>>,
    /// Handler of calls about the cluster.
    cloud: Option<Arc<dyn Cloud>>,
    guest: Asking,
    guard: Arc<Guard>,
}

impl<S: http2::Service<Body>> tower_service::Service<Request<Body>> for Guarded<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // The services that tonic generates are always ready.
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path();
        let (of_volumes, of_cloud) = (http2::is_of(path, CONTROLLER), http2::is_of(path, CLOUD));
        if let Some(volumes) = self.volumes.clone().filter(|_| of_volumes) {
            let guest = self.guest.clone();
            return self.held_back(
                |guard| &guard.volumes,
                VOLUME_DEADLINE,
                move || volumes.answer(guest, request),
            );
        }
        if let Some(cloud) = self.cloud.clone().filter(|_| of_cloud) {
            let guest = self.guest.clone();
            return self.held_back(
                |guard| &guard.cluster,
                CALL_DEADLINE,
                move || cloud.answer(guest, request),
            );
        }
        if !self.guard.admit() {
            let status = Status::resource_exhausted("too many calls");
            return Box::pin(std::future::ready(Ok(status.into_http())));
        }
        Box::pin(in_time(CALL_DEADLINE, self.service.call(request)))
    }
}

impl<S> Guarded<S> {
    /// Answers a call about volumes or the cluster as soon as its budget allows it.
    fn held_back(
        &self,
        budget: fn(&Guard) -> &Budget,
        deadline: Duration,
        answer: impl FnOnce() -> Answering + Send + 'static,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>> {
        let guard = Arc::clone(&self.guard);
        let Some(place) = guard.enter(budget(&guard)) else {
            let subject = budget(&guard).subject;
            let words = format!("too many calls about {subject} are under way; repeat this one later");
            let status = Status::unavailable(words);
            return Box::pin(std::future::ready(Ok(status.into_http())));
        };
        Box::pin(in_time(deadline, async move {
            guard.admit_in_time(budget(&guard)).await;
            let answer = answer().await;
            drop(place);
            Ok(answer)
        }))
    }
}

/// Answers a call, with `DEADLINE_EXCEEDED` if it takes too long.
async fn in_time(
    deadline: Duration,
    call: impl Future<Output = Result<Response<Body>, Infallible>>,
) -> Result<Response<Body>, Infallible> {
    let late = |_| Ok(Status::deadline_exceeded("the call took too long").into_http());
    tokio::time::timeout(deadline, call).await.unwrap_or_else(late)
}
