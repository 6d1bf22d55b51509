//! Server for metrics over HTTP/1, on a unix socket or on TCP: of this program and of all guests (`/metrics`), of
//! this program alone (`/host/metrics`), of one guest (`/guests/<VM>/metrics`), or of an exporter in it
//! (`/guests/<VM>/<JOB>/metrics`, which Prometheus discovers by `/sd`). It also serves probes: liveness
//! (`/healthz`), and whether the VMs and volumes are known (`/readyz`).

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use tokio_util::sync::CancellationToken;

use super::backends::meters::Meters;
use super::backends::volumes::Volumes;
use super::clients::Clients;
use super::exporters::{Exporters, Found};
use super::fleet::{Handle, Stopped};
use super::gather::{Gatherer, Guest};
use super::half::Half;
use super::metrics::{self, Tally};
use crate::metrics::exposition::{self, Format};
use crate::transport::{BoxStream, http1, unix};

/// Limit on connections; further ones are closed at once.
const MAX_CLIENTS: u32 = 32;
/// Longest lifetime of a connection.
const LIFETIME: Duration = Duration::from_secs(300);
/// Timeout of the fleet for counting the VMs.
const TO_COUNT: Duration = Duration::from_secs(1);
/// Answer until the backend has reported all VMs.
const NOT_KNOWN: &str = "the list of VMs is not known yet";

/// Listener for requests of Prometheus.
#[derive(Debug)]
pub enum Listener {
    /// Unix socket.
    Unix(unix::Listener),
    /// TCP port. The caller ensures that it is on the loopback interface or of a pod.
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

/// Sources of the metrics.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Fleet, for the VMs and their state.
    fleet: Handle,
    /// Volumes, for the space of their pools.
    volumes: Arc<dyn Volumes>,
    /// Counters of the host half.
    half: Arc<Half>,
    /// Gatherer of metrics from guests and their hypervisors.
    gatherer: Gatherer,
    /// Exporters in guests.
    exporters: Exporters,
}

impl Subject {
    /// Creates the sources of the metrics.
    pub fn new(
        fleet: Handle,
        volumes: Arc<dyn Volumes>,
        half: Arc<Half>,
        exporters: Exporters,
        meters: Arc<dyn Meters>,
    ) -> Self {
        let gatherer = Gatherer::new(fleet.clone(), Arc::clone(&half), meters);
        Self { fleet, volumes, half, gatherer, exporters }
    }
}

/// Serves metrics until `shutdown`.
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

/// Page that is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page<'p> {
    All,
    Host,
    Guest(&'p str),
    Discovery,
    Alive,
    Ready,
}

impl<'p> Page<'p> {
    /// Returns the page at this path.
    fn at(path: &'p str) -> Option<Self> {
        Some(match path {
            "/metrics" | "/" => Self::All,
            "/host/metrics" => Self::Host,
            "/sd" => Self::Discovery,
            "/healthz" => Self::Alive,
            "/readyz" => Self::Ready,
            path => Self::Guest(path.strip_prefix("/guests/")?.strip_suffix("/metrics")?),
        })
    }
}

/// Status, media type and body of a response.
type Answer = (StatusCode, &'static str, String);

/// Builds an answer with a text for people.
fn words(status: StatusCode, words: &str) -> Answer {
    (status, Format::Text.media_type(), format!("{words}\n"))
}

async fn answer(request: &Request<Incoming>, subject: &Subject) -> Response<String> {
    let header = |name: header::HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
    let format = Format::accepted(header(header::ACCEPT).unwrap_or_default());
    let page = Page::at(request.uri().path());
    let answer = match (request.method(), page) {
        (&Method::GET, Some(page @ (Page::Alive | Page::Ready))) => {
            let (status, text) = health(page, subject).await;
            Ok((status, Format::Text.media_type(), text))
        }
        (&Method::GET, Some(page)) => match (tally(&subject.fleet).await, page) {
            (Err(stopped), _) => Err(stopped),
            (Ok(None), _) => Ok(words(StatusCode::SERVICE_UNAVAILABLE, NOT_KNOWN)),
            (Ok(Some(_)), Page::Discovery) => discovery(header(header::HOST), subject).await,
            (Ok(Some(tally)), page) => page_of(page, tally, format, subject).await,
        },
        (&Method::GET, None) => Ok(words(StatusCode::NOT_FOUND, "the metrics are at /metrics")),
        _ => Ok(words(StatusCode::METHOD_NOT_ALLOWED, "only GET is supported")),
    };
    let answer =
        answer.unwrap_or_else(|stopped| words(StatusCode::SERVICE_UNAVAILABLE, &stopped.to_string()));
    let mut response = Response::new(answer.2);
    *response.status_mut() = answer.0;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(answer.1));
    response
}

/// Counts the VMs. Returns `None` while the backend has not reported all of them yet: Prometheus gets an answer at
/// once instead of waiting for it.
async fn tally(fleet: &Handle) -> Result<Option<Tally>, Stopped> {
    tokio::time::timeout(TO_COUNT, fleet.tally()).await.ok().transpose()
}

/// Lists the exporters in guests as targets, at the address from the request's `Host` header.
async fn discovery(host: Option<&str>, subject: &Subject) -> Result<Answer, Stopped> {
    match host.filter(|host| host.parse::<http::uri::Authority>().is_ok()) {
        Some(host) => Ok((StatusCode::OK, "application/json", subject.exporters.discovery(host).await?)),
        None => Ok(words(
            StatusCode::BAD_REQUEST,
            "the header Host is missing: the addresses of targets come from it",
        )),
    }
}

/// Returns the metrics of a page: of the host half, of a VM, or of an exporter in a guest.
async fn page_of(page: Page<'_>, tally: Tally, format: Format, subject: &Subject) -> Result<Answer, Stopped> {
    if let Some(text) = metrics_of(page, tally, format, subject).await? {
        return Ok((StatusCode::OK, format.media_type(), text));
    }
    let found = match page {
        Page::Guest(place) => subject.exporters.at(place).await?,
        _ => Found::Nothing,
    };
    Ok(match found {
        Found::Answer(text) => (StatusCode::OK, Format::Text.media_type(), text),
        Found::Failed(why) => words(StatusCode::BAD_GATEWAY, &why),
        Found::Nothing => words(StatusCode::NOT_FOUND, "there is no such VM, or it has no such job"),
    })
}

/// Returns the metrics of the host half and of guests for this page; `None` if the VM does not exist.
async fn metrics_of(
    page: Page<'_>,
    tally: Tally,
    format: Format,
    subject: &Subject,
) -> Result<Option<String>, Stopped> {
    let Subject { volumes, half, gatherer, .. } = subject;
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
        let own = metrics::render(&half.metrics, tally, &volumes.rooms(), uptime);
        text = exposition::convert(&own, format);
    }
    let guests: Vec<_> = guests.iter().map(|guest| (guest.name.as_str(), &guest.metrics)).collect();
    exposition::guests(&mut text, format, &guests);
    exposition::end(&mut text, format);
    Ok(Some(text))
}

/// Returns the health of the program, for liveness and readiness probes.
async fn health(page: Page<'_>, Subject { fleet, volumes, .. }: &Subject) -> (StatusCode, String) {
    match tally(fleet).await {
        Ok(Some(_)) => match volumes.unread().filter(|_| page == Page::Ready) {
            None => (StatusCode::OK, "ok\n".to_owned()),
            Some(words) => (StatusCode::SERVICE_UNAVAILABLE, format!("{words}\n")),
        },
        Err(stopped) => (StatusCode::SERVICE_UNAVAILABLE, format!("{stopped}\n")),
        // The program itself is healthy, and a restart would not help.
        Ok(None) if page == Page::Alive => (StatusCode::OK, "ok\n".to_owned()),
        Ok(None) => (StatusCode::SERVICE_UNAVAILABLE, format!("{NOT_KNOWN}\n")),
    }
}
