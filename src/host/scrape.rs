//! Serves the metrics over HTTP/1, on a unix socket or on TCP; and whether the program works (`/healthz`), and knows its VMs
//! and volumes (`/readyz`).

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use tokio_util::sync::CancellationToken;

use super::backends::volumes::Volumes;
use super::clients::Clients;
use super::fleet::Handle;
use super::half::Half;
use super::metrics;
use crate::transport::{BoxStream, http1, unix};

/// Connections at a time; a further one is closed at once.
const MAX_CLIENTS: u32 = 16;
/// The longest a connection may live.
const LIFETIME: Duration = Duration::from_secs(300);
/// How long the fleet may take to count VMs.
const TO_COUNT: Duration = Duration::from_secs(1);

/// Where Prometheus asks.
#[derive(Debug)]
pub enum Listener {
    /// A unix socket.
    Unix(unix::Listener),
    /// A TCP port; the caller sees to it that it is loopback's, or a pod's.
    Tcp(tokio::net::TcpListener),
}

impl Listener {
    async fn accept(&self) -> std::io::Result<BoxStream> {
        match self {
            Self::Unix(listener) => Ok(Box::new(listener.accept().await?)),
            Self::Tcp(listener) => Ok(Box::new(listener.accept().await?.0)),
        }
    }
}

/// What is told of.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Which VMs there are, and how.
    pub fleet: Handle,
    /// What room they have.
    pub volumes: Arc<dyn Volumes>,
    /// What was counted.
    pub half: Arc<Half>,
}

/// Serves until `shutdown`.
pub async fn run(listener: Listener, subject: Subject, shutdown: CancellationToken) {
    let clients = Clients::new("metrics", MAX_CLIENTS);
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let subject = subject.clone();
        let serve =
            |stream| async move { drop(tokio::time::timeout(LIFETIME, client(stream, subject)).await) };
        clients.take(accepted, serve).await;
    }
}

async fn client(stream: BoxStream, subject: Subject) {
    let served = http1::serve(stream, |request| {
        let subject = subject.clone();
        async move { answer(&request, &subject).await }
    });
    if let Err(error) = served.await {
        tracing::debug!(%error, "a client of the metrics");
    }
}

async fn answer(request: &Request<Incoming>, subject: &Subject) -> Response<String> {
    let Subject { fleet, volumes, half } = subject;
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics" | "/") => match fleet.tally().await {
            Ok(tally) => {
                let uptime = half.started.elapsed().unwrap_or_default();
                (StatusCode::OK, metrics::render(&half.metrics, tally, &volumes.rooms(), uptime))
            }
            Err(stopped) => (StatusCode::SERVICE_UNAVAILABLE, format!("{stopped}\n")),
        },
        (&Method::GET, "/healthz" | "/readyz") => match tokio::time::timeout(TO_COUNT, fleet.tally()).await {
            Ok(Ok(_)) => match volumes.unread().filter(|_| request.uri().path() == "/readyz") {
                None => (StatusCode::OK, "ok\n".to_owned()),
                Some(words) => (StatusCode::SERVICE_UNAVAILABLE, format!("{words}\n")),
            },
            Ok(Err(stopped)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{stopped}\n")),
            // The program is well all the same: to start it again would not help.
            Err(_) if request.uri().path() == "/healthz" => (StatusCode::OK, "ok\n".to_owned()),
            Err(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, "it is not known yet which VMs there are\n".to_owned())
            }
        },
        (&Method::GET, _) => (StatusCode::NOT_FOUND, "the metrics are at /metrics\n".to_owned()),
        _ => (StatusCode::METHOD_NOT_ALLOWED, "only GET is answered\n".to_owned()),
    };
    let mut response = Response::new(text);
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
