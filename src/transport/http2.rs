//! HTTP/2, the transport of gRPC, over exactly one stream that the caller owns.
//!
//! The server and channel of tonic keep connections alive on their own tasks. Here a connection is one value:
//! dropping the future of [`serve`] or the [`Connection`] closes the stream at once, and ends every call that
//! was running on it. A session with a guest needs this: once it has ended, nothing is served any longer.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2 as server;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;

use crate::supervise::{Children, Scope};
use crate::transport::Stream;

#[cfg(feature = "agent")]
mod authority;
mod client;
#[cfg(feature = "agent")]
pub mod foreign;

pub use client::{Answer, Client, Connection, connect, connect_for_streams};
pub use h2::Error as ClientError;

/// Calls that a peer may have open at a time; a further one waits or is refused by HTTP/2.
const MAX_CONCURRENT_STREAMS: u32 = 64;
/// Header bytes of one request.
const MAX_HEADER_LIST_SIZE: u32 = 16 * 1024;
/// Bytes that a peer may send before the reader has taken them, for each call and for all together.
const STREAM_WINDOW: u32 = 64 * 1024;
const CONNECTION_WINDOW: u32 = 256 * 1024;
/// The same for each of both where streams carry what programs write and files have: with less, both ends wait for each other most of
/// the time.
const WIDE_WINDOW: u32 = 256 * 1024;
const WIDE_CONNECTION_WINDOW: u32 = 512 * 1024;
/// Bytes of the data of one frame there: less costs more turns of both ends.
const WIDE_FRAME: u32 = 64 * 1024;
/// Bytes of answers that wait for a peer that does not read, for each call.
const SEND_BUFFER: usize = 64 * 1024;
const WIDE_SEND_BUFFER: usize = 256 * 1024;
/// Bytes of heads that the peer may refer to later (RFC 7541). Calls are few and their heads are short, and a
/// table of them lasts as long as the connection.
const HEADER_TABLE_SIZE: u32 = 0;
/// Streams that the peer reset before they were served; beyond it the connection is closed.
const MAX_PENDING_RESETS: usize = 32;
/// Frames for calls that were refused or have ended; beyond it the connection is closed. Clients of gRPC make up to 100 calls before they
/// know how many may be open, with some frames each.
const MAX_LATE_FRAMES: usize = 512;
/// Time that a peer may take until its first call; a connection that stays idle is closed.
const FIRST_CALL: Duration = Duration::from_secs(10);
/// Time that a connection may take to finish its calls after the shutdown began.
const GRACE: Duration = Duration::from_secs(2);

/// Origin of requests on a stream: the stream itself says who is at its other end, so any will do.
pub const ORIGIN: &str = "http://guestlet";

/// A gRPC service, as tonic generates them, for requests whose body is `B`.
pub trait Service<B = Incoming>:
    tower_service::Service<Request<B>, Response = Response<Body>, Error = Infallible, Future: Send + 'static>
    + Clone
    + Send
    + 'static
{
}

impl<S, B> Service<B> for S where
    S: tower_service::Service<
            Request<B>,
            Response = Response<Body>,
            Error = Infallible,
            Future: Send + 'static,
        > + Clone
        + Send
        + 'static
{
}

/// Returns whether the path `/service/method` belongs to the service called `name`.
pub fn is_of(path: &str, name: &str) -> bool {
    path.strip_prefix('/').and_then(|path| path.strip_prefix(name)).is_some_and(|rest| rest.starts_with('/'))
}

/// Tells when the service is called.
#[derive(Debug, Clone)]
struct Called<S> {
    service: S,
    called: Arc<Notify>,
}

impl<S: Service> tower_service::Service<Request<Incoming>> for Called<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        self.called.notify_one();
        self.service.call(request)
    }
}

/// Runs hyper's tasks in the connection's scope.
#[derive(Debug, Clone)]
struct Executor(Children);

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn(task);
    }
}

/// Limits on the resources that one connection may use on the serving side.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Calls that may be open at a time; a further one waits or is refused by HTTP/2.
    pub open_calls: u32,
    /// Bytes that the peer may send before the reader has taken them, for each call.
    pub stream_window: u32,
    /// The same for all calls together.
    pub connection_window: u32,
    /// Bytes of answers that wait for a peer that does not read, for each call.
    pub send_buffer: usize,
}

impl Bounds {
    /// For peers that know what they want.
    pub const USUAL: Self = Self {
        open_calls: MAX_CONCURRENT_STREAMS,
        stream_window: STREAM_WINDOW,
        connection_window: CONNECTION_WINDOW,
        send_buffer: WIDE_SEND_BUFFER,
    };
    /// For peers that know what they want, and may have much under way.
    pub const WIDE: Self =
        Self { stream_window: WIDE_WINDOW, connection_window: WIDE_CONNECTION_WINDOW, ..Self::USUAL };
    /// For many peers of small calls.
    pub const SMALL: Self = Self {
        open_calls: 16,
        stream_window: 16 * 1024,
        connection_window: 64 * 1024,
        send_buffer: 16 * 1024,
    };
}

/// Serves `service` on `stream` until the peer closes it, or says nothing for too long at its beginning, or
/// until `shutdown`, which lets calls that are running end for a moment. Dropping the future closes the stream
/// at once.
///
/// # Errors
/// If the peer breaks the protocol, or the stream breaks.
pub async fn serve<S>(
    stream: impl Stream,
    service: S,
    shutdown: CancellationToken,
) -> Result<(), hyper::Error>
where
    S: Service,
{
    serve_within(stream, service, shutdown, Bounds::USUAL).await
}

/// As [`serve`], within other bounds.
///
/// # Errors
/// If the peer breaks the protocol, or the stream breaks.
pub async fn serve_within<S>(
    stream: impl Stream,
    service: S,
    shutdown: CancellationToken,
    bounds: Bounds,
) -> Result<(), hyper::Error>
where
    S: Service,
{
    let scope = Scope::new();
    let called = Arc::new(Notify::new());
    let service = Called { service, called: Arc::clone(&called) };
    let connection = server::Builder::new(Executor(scope.children()))
        .max_concurrent_streams(bounds.open_calls)
        .max_header_list_size(MAX_HEADER_LIST_SIZE)
        .header_table_size(HEADER_TABLE_SIZE)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .max_local_error_reset_streams(MAX_LATE_FRAMES)
        .initial_stream_window_size(bounds.stream_window)
        .initial_connection_window_size(bounds.connection_window)
        .max_send_buf_size(bounds.send_buffer)
        .max_frame_size(WIDE_FRAME.min(bounds.stream_window))
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
    // Boxed, because otherwise the caller's future would reserve room for several copies of it.
    let mut connection = Box::pin(connection);
    tokio::select! {
        ended = &mut connection => return ended,
        () = shutdown.cancelled() => {}
        idle = tokio::time::timeout(FIRST_CALL, called.notified()) => if idle.is_err() {
            return Ok(());
        }
    }
    tokio::select! {
        ended = &mut connection => return ended,
        () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    tokio::time::timeout(GRACE, connection).await.unwrap_or(Ok(()))
}
