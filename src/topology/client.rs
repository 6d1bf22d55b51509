//! kube's client over this module's own connections: one for each request, TLS with kubelet's certificate, and a
//! limit on the length of a line from the API server. A connection ends with its answer, so that between requests
//! only that of a watch is in memory.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderValue, Request, Response};
use hyper::body::{Body as HttpBody, Bytes, Frame, Incoming};
use hyper_util::rt::TokioIo;
use kube::client::Body;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::topology::credential::{Credential, Server};

/// Timeout until an answer begins.
const DEADLINE: Duration = Duration::from_secs(15);
/// Maximum length of a line in bytes: a line is an object, a list, or an event of a watch.
const MAX_LINE: usize = 2 << 20;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Creates kube's client with this credential.
pub fn client(credential: &Credential) -> kube::Client {
    let tls = TlsConnector::from(credential.tls.clone());
    kube::Client::new(Service { tls, server: credential.server.clone() }, "default")
}

/// Service that makes each request on a connection of its own.
#[derive(Clone)]
struct Service {
    tls: TlsConnector,
    server: Server,
}

impl tower_service::Service<Request<Body>> for Service {
    type Response = Response<Answer>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answer>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            let answer = tokio::time::timeout(DEADLINE, service.ask(request)).await;
            answer.map_err(|_| "the API server does not answer")?
        })
    }
}

impl Service {
    async fn ask(self, mut request: Request<Body>) -> Result<Response<Answer>, BoxError> {
        let Server { host, port, name } = self.server;
        let stream = TcpStream::connect((host.as_str(), port)).await?;
        stream.set_nodelay(true)?;
        let stream = self.tls.connect(name, stream).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        let headers = request.headers_mut();
        headers.insert(http::header::HOST, HeaderValue::try_from(format!("{host}:{port}"))?);
        headers.insert(
            http::header::USER_AGENT,
            HeaderValue::from_static(concat!("guestlet/", env!("CARGO_PKG_VERSION"))),
        );
        let mut connection: Connection = Box::pin(connection);
        let asking = sender.send_request(request);
        let mut asking = std::pin::pin!(asking);
        let answer = tokio::select! {
            biased;
            answer = &mut asking => answer?,
            ended = &mut connection => {
                ended?;
                // The answer may have arrived before the connection ended.
                asking.await?
            }
        };
        Ok(answer.map(|body| Answer { body, connection: Some(connection), line: 0 }))
    }
}

type Connection = Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>;

/// Body of an answer, with its connection, which ends with it.
struct Answer {
    body: Incoming,
    connection: Option<Connection>,
    /// Bytes since the last end of a line.
    line: usize,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Some(connection) = &mut this.connection
            && connection.as_mut().poll(context).is_ready()
        {
            // An error of the connection is reported by the body.
            this.connection = None;
        }
        let frame = std::task::ready!(Pin::new(&mut this.body).poll_frame(context));
        if let Some(data) = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref()) {
            this.line = match data.iter().rposition(|byte| *byte == b'\n') {
                Some(place) => data.len() - place - 1,
                None => this.line + data.len(),
            };
            if this.line > MAX_LINE {
                return Poll::Ready(Some(Err("the API server sends a line that is too long".into())));
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }
}
