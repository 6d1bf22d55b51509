//! The callback channel of one session: the host dials, and the guest asks `guestlet.v1.Host`.
//!
//! ```text
//!  dial ──stream──▶ served ──WhoAmI──▶ open
//!   ▲ │               │                 │
//!   │ └──no stream────┴──lost───────────┤
//!   └────── wait (backoff) ◀────────────┘──too many calls, or broken again and again──▶ refused
//! ```
//!
//! The future of [`keep`] lives inside that of the session, and owns the stream: with the session, whatever
//! is served here ends at once.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;

use super::backoff::Backoff;
use super::contact::Contact;
use super::half::Half;
use super::metered;
use super::rate::Allowance;
use super::session::{LASTING, Report, Teller};
use super::talk::Refusal;
use super::text;
use super::unread::Unread;
use crate::transport::http2;
use crate::wire::proto::v1::host_server::{Host, HostServer};
use crate::wire::proto::v1::{CallbackState, PingRequest, PingResponse, WhoAmIRequest, WhoAmIResponse};

/// Bytes of one request; they are all small.
const MAX_REQUEST: usize = 16 * 1024;
/// Bytes of a ping.
const MAX_PING: usize = 4096;
/// How long a call may take, its request included.
const CALL_DEADLINE: Duration = Duration::from_secs(30);
/// How often the guest may break the channel within one session.
const MAX_BREAKS: u32 = 8;

/// Keeps the callback channel of an open session.
pub async fn keep(contact: &Contact, teller: Teller) -> Refusal {
    let guard = Guard::new(contact);
    let mut backoff = Backoff::new(Instant::now());
    let mut breaks = 0;
    let mut reason = String::new();
    loop {
        teller.send(Report::Callback(CallbackState::Connecting, reason)).await;
        let began = Instant::now();
        let Some(dialled) = contact.callback().await else {
            let reason = "no callback-socket is set".to_owned();
            teller.send(Report::Callback(CallbackState::Unspecified, reason)).await;
            return std::future::pending().await;
        };
        reason = match dialled {
            Ok((stream, gate)) => match serve(stream, contact, &guard, &teller).await {
                Err(refusal) => return refusal,
                Ok(_) if let Some(excess) = gate.shut() => return excess.into(),
                Ok(Ok(())) => "the guest closed the callback channel".to_owned(),
                Ok(Err(error)) => {
                    let reason = text::chain(&error);
                    breaks += 1;
                    if breaks == MAX_BREAKS {
                        return Refusal::Callback(reason);
                    }
                    reason
                }
            },
            Err(error) => text::chain(&error),
        };
        let now = Instant::now();
        if now - began >= LASTING {
            backoff.restart(now);
        }
        tokio::time::sleep(backoff.next_patient(fastrand::f64())).await;
    }
}

/// Serves one stream to its end.
async fn serve(
    stream: impl crate::transport::Stream,
    contact: &Contact,
    guard: &Arc<Guard>,
    teller: &Teller,
) -> Result<Result<(), hyper::Error>, Refusal> {
    let introduced = Arc::new(Notify::new());
    let service = Service { identity: contact.identity(), introduced: Arc::clone(&introduced) };
    let service = HostServer::new(service).max_decoding_message_size(MAX_REQUEST);
    let service = Guarded { service, guard: Arc::clone(guard) };
    let bounds = http2::Bounds { open_calls: contact.vm.limits.open_calls, ..http2::Bounds::SMALL };
    let mut serving = Box::pin(http2::serve_within(stream, service, CancellationToken::new(), bounds));
    let mut known = false;
    loop {
        tokio::select! {
            biased;
            () = guard.flooded.notified() => return Err(Refusal::Calls),
            () = guard.unread.too_long() => return Err(metered::Excess::Unread.into()),
            ended = &mut serving => return Ok(ended),
            () = introduced.notified(), if !known => {
                known = true;
                teller.send(Report::Callback(CallbackState::Open, String::new())).await;
            }
        }
    }
}

/// What the host answers to one guest.
#[derive(Debug, Clone)]
struct Service {
    identity: WhoAmIResponse,
    introduced: Arc<Notify>,
}

#[tonic::async_trait]
impl Host for Service {
    async fn who_am_i(
        &self,
        _: tonic::Request<WhoAmIRequest>,
    ) -> Result<tonic::Response<WhoAmIResponse>, Status> {
        self.introduced.notify_one();
        Ok(tonic::Response::new(self.identity.clone()))
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

/// What one guest may do to the callback channel, over all of its streams in a session.
#[derive(Debug)]
struct Guard {
    allowance: Mutex<Allowance>,
    flooded: Notify,
    unread: Arc<Unread>,
    half: Arc<Half>,
}

impl Guard {
    fn new(contact: &Contact) -> Arc<Self> {
        let per_second = f64::from(contact.vm.limits.calls_per_second);
        let allowance = Allowance::new(Instant::now(), per_second * 4.0, per_second);
        Arc::new(Self {
            allowance: Mutex::new(allowance),
            flooded: Notify::new(),
            unread: Arc::default(),
            half: Arc::clone(&contact.half),
        })
    }

    /// One more call.
    fn admit(&self) -> bool {
        self.half.metrics.callback_calls.fetch_add(1, Ordering::Relaxed);
        let mut allowance = self.allowance.lock().unwrap_or_else(PoisonError::into_inner);
        let admitted = allowance.take(Instant::now(), 1.0);
        if !admitted {
            self.flooded.notify_one();
        }
        admitted
    }
}

/// A service whose calls are counted, whatever they call, and end.
#[derive(Debug, Clone)]
struct Guarded<S> {
    service: S,
    guard: Arc<Guard>,
}

impl<S> tower_service::Service<Request<Incoming>> for Guarded<S>
where
    S: http2::Service,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        if !self.guard.admit() {
            let status = Status::resource_exhausted("too many calls");
            return Box::pin(std::future::ready(Ok(status.into_http())));
        }
        let answer = self.service.call(request);
        let unread = Arc::clone(&self.guard.unread);
        Box::pin(async move {
            let late = |_| Ok(Status::deadline_exceeded("the call took too long").into_http());
            let answer = tokio::time::timeout(CALL_DEADLINE, answer).await.unwrap_or_else(late)?;
            Ok(answer.map(|body| unread.watch(body)))
        })
    }
}
