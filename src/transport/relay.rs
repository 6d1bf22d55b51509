//! Service of the host half that is offered to programs of the guest's cluster, such as `csi.v1.Controller` to
//! the sidecars. Every call is passed to the host half, over the connection that it opened for the guest's
//! calls, and the answer is returned unchanged.
//!
//! ```text
//!  program ──unix socket──▶ Relay ──callback──▶ host half, which knows from the connection which guest asks
//! ```
//!
//! The messages are passed as bytes: fields that a later version of the service adds are passed as well, and
//! the host half decides whether a call is valid. Calls of other services fail with UNIMPLEMENTED.
//!
//! No call waits for a host half that is not connected: it fails at once with UNAVAILABLE and the reason, and
//! the caller retries. A call whose callback breaks fails with UNAVAILABLE as well: it is unknown whether the
//! host half has begun it, and every call may be repeated. A program that disconnects ends its call here, but
//! the host half completes what it has begun.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use tokio::sync::Semaphore;
use tonic::Status;
use tonic::body::Body;
use tower_service::Service;

use crate::transport::callback::{Caller, request_message};
use crate::transport::http2::is_of;

/// Bytes of one request; the names and parameters of one volume, or what a Service wants, are far below it.
const MAX_REQUEST: usize = 64 * 1024;
/// Timeout for the host half. Callers give up sooner, unless they are configured not to.
const DEADLINE: Duration = Duration::from_secs(150);
/// Maximum number of concurrent calls to the host half, which is also its default limit. Further ones wait
/// here, within the same deadline.
const AT_ONCE: usize = 16;

/// Function that returns the caller for the host half, or the reason why there is none.
pub type Way = Arc<dyn Fn() -> Result<Caller, String> + Send + Sync>;

/// Relayed service.
#[derive(Clone)]
pub struct Relay {
    service: &'static str,
    way: Way,
    places: Arc<Semaphore>,
}

impl Relay {
    /// Creates a relay for calls of this service, such as `csi.v1.Controller`, which looks up the way again for
    /// each call.
    pub fn new(service: &'static str, way: Way) -> Self {
        Self { service, way, places: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// Makes one call of the host half. Of the request's head only the method is passed on: neither side's metadata is the
    /// other's business.
    async fn ask(self, request: Request<Incoming>) -> Result<Response<Body>, Status> {
        let (head, body) = request.into_parts();
        if !is_of(head.uri.path(), self.service) {
            return Err(Status::unimplemented(format!("only calls of {} are served here", self.service)));
        }
        let message = request_message(Body::new(body), MAX_REQUEST).await?;
        let caller = (self.way)()
            .map_err(|reason| Status::unavailable(format!("cannot call the host half: {reason}")))?;
        let answer = tokio::time::timeout(DEADLINE, async {
            // The semaphore is never closed.
            let _place = self.places.acquire().await;
            caller.ask(head.uri.path(), message).await
        });
        let answer = answer.await.map_err(|_| {
            let seconds = DEADLINE.as_secs();
            Status::deadline_exceeded(format!("the host half did not answer within {seconds} s; try again"))
        })?;
        answer.map_err(|broken| {
            Status::unavailable(format!(
                "the connection to the host half broke, and the outcome of the call is unknown; try again: {broken}"
            ))
        })
    }
}

impl Service<Request<Incoming>> for Relay {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Each call waits for its own turn.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        let answer = self.clone().ask(request);
        Box::pin(async move { Ok(answer.await.unwrap_or_else(Status::into_http)) })
    }
}
