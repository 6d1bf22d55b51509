//! Serves the metrics over HTTP/1, on a unix socket or on TCP: of this program and of all guests (`/metrics`), of this program alone
//! (`/host/metrics`), or of one guest (`/guests/<VM>/metrics`); and whether the program works (`/healthz`), and knows its VMs and
//! volumes (`/readyz`).

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use tokio_util::sync::CancellationToken;

use super::backends::volumes::Volumes;
use super::clients::Clients;
use super::fleet::{Handle, Stopped};
use super::gather::{Gatherer, Guest};
use super::half::Half;
use super::metrics;
use crate::metrics::exposition::{self, Format};
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
    fleet: Handle,
    /// What room they have.
    volumes: Arc<dyn Volumes>,
    /// What was counted.
    half: Arc<Half>,
    /// What guests measure.
    gatherer: Gatherer,
}

impl Subject {
    /// The VMs of this fleet, what room they have, and what was counted.
    pub fn new(fleet: Handle, volumes: Arc<dyn Volumes>, half: Arc<Half>) -> Self {
        let gatherer = Gatherer::new(fleet.clone(), Arc::clone(&half));
        Self { fleet, volumes, half, gatherer }
    }
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

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page<'p> {
    All,
    Host,
    Guest(&'p str),
    Alive,
    Ready,
}

impl<'p> Page<'p> {
    /// The one at this path.
    fn at(path: &'p str) -> Option<Self> {
        Some(match path {
            "/metrics" | "/" => Self::All,
            "/host/metrics" => Self::Host,
            "/healthz" => Self::Alive,
            "/readyz" => Self::Ready,
            path => Self::Guest(path.strip_prefix("/guests/")?.strip_suffix("/metrics")?),
        })
    }
}

async fn answer(request: &Request<Incoming>, subject: &Subject) -> Response<String> {
    let accept = request.headers().get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = Format::accepted(accept.unwrap_or_default());
    let refused = |status, words: String| (status, format!("{words}\n"));
    let page = Page::at(request.uri().path());
    let is_metrics = !matches!(page, Some(Page::Alive | Page::Ready));
    let answer = match (request.method(), page) {
        (&Method::GET, Some(page @ (Page::Alive | Page::Ready))) => health(page, subject).await,
        (&Method::GET, Some(page)) => match metrics_of(page, format, subject).await {
            Ok(Some(text)) => (StatusCode::OK, text),
            Ok(None) => refused(StatusCode::NOT_FOUND, "there is no VM of this name".to_owned()),
            Err(stopped) => refused(StatusCode::SERVICE_UNAVAILABLE, stopped.to_string()),
        },
        (&Method::GET, None) => refused(StatusCode::NOT_FOUND, "the metrics are at /metrics".to_owned()),
        _ => refused(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered".to_owned()),
    };
    let mut response = Response::new(answer.1);
    *response.status_mut() = answer.0;
    let format = if answer.0 == StatusCode::OK && is_metrics { format } else { Format::Text };
    let kind = header::HeaderValue::from_static(format.media_type());
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// What Prometheus reads there; none if there is no such VM.
async fn metrics_of(page: Page<'_>, format: Format, subject: &Subject) -> Result<Option<String>, Stopped> {
    let Subject { fleet, volumes, half, gatherer } = subject;
    let guests: Vec<Guest> = match page {
        Page::All => gatherer.all().await?,
        Page::Guest(name) => match gatherer.one(name).await? {
            Some(guest) => vec![guest],
            None => return Ok(None),
        },
        _ => Vec::new(),
    };
    let mut text = String::new();
    if !matches!(page, Page::Guest(_)) {
        let uptime = half.started.elapsed().unwrap_or_default();
        let own = metrics::render(&half.metrics, fleet.tally().await?, &volumes.rooms(), uptime);
        text = exposition::convert(&own, format);
    }
    let guests: Vec<_> = guests.iter().map(|guest| (guest.name.as_str(), &guest.metrics)).collect();
    exposition::guests(&mut text, format, &guests);
    exposition::end(&mut text, format);
    Ok(Some(text))
}

/// How the program is.
async fn health(page: Page<'_>, Subject { fleet, volumes, .. }: &Subject) -> (StatusCode, String) {
    match tokio::time::timeout(TO_COUNT, fleet.tally()).await {
        Ok(Ok(_)) => match volumes.unread().filter(|_| page == Page::Ready) {
            None => (StatusCode::OK, "ok\n".to_owned()),
            Some(words) => (StatusCode::SERVICE_UNAVAILABLE, format!("{words}\n")),
        },
        Ok(Err(stopped)) => (StatusCode::SERVICE_UNAVAILABLE, format!("{stopped}\n")),
        // The program is well all the same: to start it again would not help.
        Err(_) if page == Page::Alive => (StatusCode::OK, "ok\n".to_owned()),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "it is not known yet which VMs there are\n".to_owned()),
    }
}
