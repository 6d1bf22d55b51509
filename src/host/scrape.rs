//! Serves the metrics over HTTP/1, on a unix socket or on TCP: of this program and of all guests (`/metrics`), of this program alone
//! (`/host/metrics`), of one guest (`/guests/<VM>/metrics`), or of an exporter in it (`/guests/<VM>/<JOB>/metrics`, which Prometheus
//! discovers by `/sd`); and whether the program works (`/healthz`), and knows its VMs and volumes (`/readyz`).

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
use super::metrics;
use crate::metrics::exposition::{self, Format};
use crate::transport::{BoxStream, http1, unix};

/// Connections at a time; a further one is closed at once.
const MAX_CLIENTS: u32 = 32;
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
    /// What guests measure, and their hypervisors.
    gatherer: Gatherer,
    /// What exporters in them do.
    exporters: Exporters,
}

impl Subject {
    /// The VMs of this fleet, what room they have, what was counted, exporters in their guests, and what their hypervisors measure.
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
    Discovery,
    Alive,
    Ready,
}

impl<'p> Page<'p> {
    /// The one at this path.
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

/// A status, a media type, and a text.
type Answer = (StatusCode, &'static str, String);

/// What is said to people.
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
        (&Method::GET, Some(page)) => match (too_early(&subject.fleet).await, page) {
            (Some(refusal), _) => Ok(refusal),
            (None, Page::Discovery) => discovery(header(header::HOST), subject).await,
            (None, page) => page_of(page, format, subject).await,
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

/// Refuses what needs the list of VMs until the backend has reported all of them: Prometheus is better told at once than kept waiting.
async fn too_early(fleet: &Handle) -> Option<Answer> {
    let late = tokio::time::timeout(TO_COUNT, fleet.tally()).await.is_err();
    late.then(|| words(StatusCode::SERVICE_UNAVAILABLE, "the list of VMs is not known yet"))
}

/// The exporters in guests as targets at the address at which this is asked.
async fn discovery(host: Option<&str>, subject: &Subject) -> Result<Answer, Stopped> {
    match host.filter(|host| host.parse::<http::uri::Authority>().is_ok()) {
        Some(host) => Ok((StatusCode::OK, "application/json", subject.exporters.discovery(host).await?)),
        None => Ok(words(
            StatusCode::BAD_REQUEST,
            "the header Host is missing: the addresses of targets come from it",
        )),
    }
}

/// Metrics.
async fn page_of(page: Page<'_>, format: Format, subject: &Subject) -> Result<Answer, Stopped> {
    if let Some(text) = metrics_of(page, format, subject).await? {
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

/// What Prometheus reads there; none if there is no such VM.
async fn metrics_of(page: Page<'_>, format: Format, subject: &Subject) -> Result<Option<String>, Stopped> {
    let Subject { fleet, volumes, half, gatherer, .. } = subject;
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
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "the list of VMs is not known yet\n".to_owned()),
    }
}
