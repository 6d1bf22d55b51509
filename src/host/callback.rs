//! What the guest of one session asks: `guestlet.v1.Host`, `csi.v1.Controller` of its cluster's volumes, and
//! `guestlet.v1.Cloud` of its cluster's VMs and load balancers. Its calls are messages of the connection on which it is asked ([`crate::transport::callback`]).
//!
//! ```text
//!  open ──▶ WhoAmI ──▶ in use        (denied by the guest's settings: none, for as long as the session lasts)
//!   ▲ │                  │
//!   │ └──refused, lost───┤
//!   └── wait (backoff) ◀─┘──too many calls, or broken again and again──▶ refused
//! ```
//!
//! The future of [`keep`] lives inside that of the session: with it, whatever is served here ends at once.

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

/// What an agent says that it can do, if it has a callback.
const CAPABILITY: &str = "callback";
/// Bytes of one request; they are all small.
const MAX_REQUEST: usize = 16 * 1024;
/// The same of a request about volumes.
const MAX_VOLUME_REQUEST: u32 = 64 * 1024;
/// Bytes of what is around a request: its method and its number.
const AROUND: usize = 1024;
/// Bytes of a ping.
const MAX_PING: usize = 4096;
/// When it is counted again how many volumes a VM can have.
const COUNT_AGAIN: Duration = Duration::from_secs(1);
/// How long a call may take, its request included.
const CALL_DEADLINE: Duration = Duration::from_secs(30);
/// The same of a call about volumes, which may have to wait for a guest. What it has begun goes on.
const VOLUME_DEADLINE: Duration = Duration::from_secs(180);
/// How long a call about volumes waits before it is looked again whether it may be made.
const CALL_AGAIN: Duration = Duration::from_millis(20);
/// How often in a row the guest may break the callback soon after it was opened.
const MAX_BREAKS: u32 = 8;

/// Whether an agent that can do these has a callback.
pub fn is_able(capabilities: &[String]) -> bool {
    capabilities.iter().any(|capability| capability == CAPABILITY)
}

/// Keeps the callback of an open session, whose agent is called with `client`, and has one if it is `able`.
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
            // Its settings change with a restart of the agent, and that with the session.
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

/// Opens the callback once, and serves it to its end.
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
        // As many for calls about volumes, which may have to wait for a pool, and for those about the cluster, of which some
        // wait for news, as for all others.
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

/// What the end of a callback means for the session.
fn end(ended: Ended) -> End {
    match ended {
        Ended::Breach(breach) => Refusal::Callback(breach.to_string()).into(),
        Ended::Status(status) => match End::from(*status) {
            // Who holds the guest is settled by its events.
            End::Refused(Refusal::Held(message)) => Loss::Call { code: Code::Aborted, message }.into(),
            end => end,
        },
    }
}

/// Calls the agent. What is sent to it with a call waits for it.
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

/// What the host answers to one guest.
#[derive(Debug, Clone)]
struct Service {
    contact: Contact,
    introduced: Arc<Notify>,
    /// How many volumes the VM can have, and when that was counted.
    counted: Arc<tokio::sync::Mutex<Option<(Instant, u32)>>>,
}

impl Service {
    /// How many volumes the VM can have: asked of its hypervisor, but not as often as a guest may ask.
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

/// What one guest may ask in a session, over all callbacks that are opened in it.
#[derive(Debug)]
struct Guard {
    allowance: Mutex<Allowance>,
    volumes: Budget,
    cluster: Budget,
    flooded: Notify,
    unread: Arc<Unread>,
    half: Arc<Half>,
}

/// For calls about volumes, or about the cluster: many of a cluster's must not cost its VM the session.
#[derive(Debug)]
struct Budget {
    /// What they are about, for people.
    subject: &'static str,
    allowance: Mutex<Allowance>,
    /// Those of them that were held back and given up, or refused.
    given_up: Mutex<Allowance>,
    /// Those of them that may be under way at a time.
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

    /// One more call.
    fn admit(&self) -> bool {
        self.half.metrics.callback_calls.fetch_add(1, Ordering::Relaxed);
        let admitted = take(&self.allowance);
        if !admitted {
            self.flooded.notify_one();
        }
        admitted
    }

    /// A place for one more call of a budget; without one it is to be repeated. They leave the others room to be heard.
    fn enter(&self, budget: &Budget) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&budget.places).try_acquire_owned().ok();
        if place.is_none() && !take(&budget.given_up) {
            self.flooded.notify_one();
        }
        place
    }

    /// One more call of a budget: sidecars make many at once, and wait for their answers. So these are held back, not
    /// taken for a flood, as long as somebody waits for them.
    async fn admit_in_time(&self, budget: &Budget) {
        self.half.metrics.callback_calls.fetch_add(1, Ordering::Relaxed);
        let mut waiting = Waiting { guard: self, budget, admitted: false };
        while !take(&budget.allowance) {
            tokio::time::sleep(CALL_AGAIN).await;
        }
        waiting.admitted = true;
    }
}

/// A call that is held back. One that is given up counts as one that was made.
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

/// The services of one guest, whose calls are counted, whatever they call, and end.
#[derive(Debug, Clone)]
struct Guarded<S> {
    service: S,
    /// For what is asked of volumes, and by whom.
    volumes: Option<Arc<dyn Volumes>>,
    /// For what is asked of its cluster.
    cloud: Option<Arc<dyn Cloud>>,
    guest: Asking,
    guard: Arc<Guard>,
}

impl<S: http2::Service<Body>> tower_service::Service<Request<Body>> for Guarded<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Those that tonic generates are always ready.
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
    /// The answer to a call about volumes or the cluster: it waits until it may be made.
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

/// The answer to a call, which comes in time.
async fn in_time(
    deadline: Duration,
    call: impl Future<Output = Result<Response<Body>, Infallible>>,
) -> Result<Response<Body>, Infallible> {
    let late = |_| Ok(Status::deadline_exceeded("the call took too long").into_http());
    tokio::time::timeout(deadline, call).await.unwrap_or_else(late)
}
