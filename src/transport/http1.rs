//! HTTP/1 over a stream, for whoever asks how a program is: Prometheus, and probes of kubelet.

use std::convert::Infallible;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};

use super::Stream;

/// How long a client may take for the head of a request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a request's head.
const BUFFER: usize = 8 * 1024;

/// Answers the requests of one client, until it has no more.
///
/// # Errors
/// If the connection breaks, or what comes is no HTTP.
pub async fn serve<A>(
    stream: impl Stream,
    answer: impl Fn(Request<Incoming>) -> A + Send,
) -> Result<(), hyper::Error>
where
    A: Future<Output = Response<String>> + Send,
{
    let service = service_fn(move |request| {
        let answer = answer(request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(stream), service)
        .await
}
