//! HTTP/1 over a stream, for clients that check the state of a program (Prometheus, and probes of kubelet),
//! and for requests of the same kind to other programs.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use http::{Request, Response, StatusCode, header};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1 as client;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};

use super::Stream;

/// Timeout for the headers of a request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a request's head.
const BUFFER: usize = 8 * 1024;

/// Serves the requests of one client, until it closes the connection.
///
/// # Errors
/// If the connection breaks, or the client does not send HTTP.
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

/// Single GET request.
#[derive(Debug, Clone, Copy)]
pub struct Fetch<'f> {
    /// Path of the resource.
    pub path: &'f str,
    /// Accepted media types.
    pub accept: &'static str,
    /// Most bytes of the answer.
    pub max_bytes: usize,
}

/// Reason why there is no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    /// The connection broke, or what came is no HTTP.
    #[error("it does not speak HTTP: {0}")]
    Broken(#[from] hyper::Error),
    /// Invalid path.
    #[error("the path cannot be requested: {0}")]
    Path(#[from] http::Error),
    /// Status other than success.
    #[error("it answers {0}")]
    Status(StatusCode),
    /// Compressed answer, which was not requested: its size after decompression is unbounded.
    #[error("its answer is compressed, which was not requested")]
    Compressed,
    /// Answer that exceeds the limit in bytes.
    #[error("its answer has more than {0} bytes")]
    TooLarge(usize),
}

/// Sends a request on a connection that is used for it alone, and returns the body of the answer.
///
/// # Errors
/// If there is no answer, or it is not acceptable.
pub async fn get(stream: impl Stream, fetch: Fetch<'_>) -> Result<Vec<u8>, NoAnswer> {
    let request = Request::get(fetch.path)
        .header(header::HOST, "localhost")
        .header(header::ACCEPT, fetch.accept)
        .header(header::ACCEPT_ENCODING, "identity")
        .header(header::CONNECTION, "close")
        .header(header::USER_AGENT, concat!("guestlet-host/", env!("CARGO_PKG_VERSION")))
        .body(String::new())?;
    let mut client = client::Builder::new();
    let (mut sender, connection) = client.max_buf_size(BUFFER * 4).handshake(TokioIo::new(stream)).await?;
    let exchange = async {
        let response = sender.send_request(request).await?;
        if response.status() != StatusCode::OK {
            return Err(NoAnswer::Status(response.status()));
        }
        if response.headers().get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity") {
            return Err(NoAnswer::Compressed);
        }
        let (mut body, mut bytes) = (response.into_body(), Vec::new());
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            let Ok(data) = frame?.into_data() else { continue };
            if data.len() > fetch.max_bytes - bytes.len() {
                return Err(NoAnswer::TooLarge(fetch.max_bytes));
            }
            bytes.extend_from_slice(&data);
        }
        Ok(bytes)
    };
    // The connection may end before its answer is read, which is then complete. If the connection breaks, the
    // exchange fails as well.
    let driven = async {
        let _ = connection.await;
        std::future::pending().await
    };
    tokio::select! {
        done = exchange => done,
        never = driven => never,
    }
}
