//! Server for nodes: terminates the TLS of each connection, and serves `guestlet.v1.Controller` on it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::UnixTime;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::ask::Asked;
use super::nodes::Nodes;
use crate::host::backends::kubevirt::controller::certificates::{self, Ca};
use crate::host::backends::kubevirt::controller::join::{self, JoinError};
use crate::host::clients::Clients;
use crate::host::text;
use crate::sys::tcp;
use crate::transport::callback::Opened;
use crate::transport::http2::{self, Bounds};
use crate::transport::seats::Seats;
use crate::trust::certificate;
use crate::wire::proto::v1::controller_server::{Controller, ControllerServer};
use crate::wire::proto::v1::{
    AskRequest, AskResponse, AttachReceiptRequest, AttachReceiptResponse, CallbackFromHost, JoinRequest,
    JoinResponse, WatchChecksRequest, WatchChecksResponse,
};

/// Limit on connections; further ones are closed at once.
const MAX_CLIENTS: u32 = 4096;
/// Timeout of the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Limit on the bytes of one request: a guest's call, and the fields around it.
const MAX_REQUEST: usize = 80 * 1024;
/// Limits on a node. It has many guests, whose calls may take minutes.
const BOUNDS: Bounds = Bounds { open_calls: 256, ..Bounds::USUAL };
/// Limit on the connections of one node. When it reconnects, the previous connection may still be open.
const CONNECTIONS_OF_A_NODE: u32 = 4;

/// Limits on a client that has shown no certificate: all it may do is join, and soon.
const BOUNDS_OF_NOBODY: Bounds =
    Bounds { open_calls: 2, stream_window: 16 * 1024, connection_window: 32 * 1024, send_buffer: 16 * 1024 };
const MAX_JOIN: usize = 24 * 1024;
const TIME_TO_JOIN: Duration = Duration::from_secs(30);
/// Limit of concurrent unauthenticated connections from one address, including handshakes. Each pod has its own
/// address.
const NOBODIES: u32 = 16;
/// Limit on concurrent token reviews by the API server.
const TOKENS: usize = 8;

/// Prerequisites for nodes to join.
pub struct Joining {
    /// Certificate authority that signs the certificates of nodes.
    pub ca: Arc<Ca>,
    /// TLS configuration of the listener.
    pub tls: Arc<ServerConfig>,
    /// Client of the API server, which reviews tokens.
    pub client: kube::Client,
    /// Namespace of the nodes' pods.
    pub namespace: String,
}

/// Service for the nodes of the host cluster.
pub struct Server {
    /// Prerequisites for joining.
    pub joining: Joining,
    /// Handler of the nodes' requests for their guests.
    pub asked: Asked,
    /// Nodes that are connected, through which agents can be called.
    pub nodes: Nodes,
}

/// Limits on the connected clients.
#[derive(Debug)]
struct Doors {
    tokens: Semaphore,
    /// Connections with a client certificate, and those without one.
    nodes: Seats<String>,
    nobodies: Seats<IpAddr>,
}

impl Default for Doors {
    fn default() -> Self {
        let nodes = Seats::new(CONNECTIONS_OF_A_NODE, MAX_CLIENTS);
        Self { tokens: Semaphore::new(TOKENS), nodes, nobodies: Seats::new(NOBODIES, MAX_CLIENTS) }
    }
}

/// Serves nodes until `shutdown`.
pub async fn serve(listener: TcpListener, server: Server, shutdown: CancellationToken) {
    let clients = Clients::new("nodes", MAX_CLIENTS);
    let (server, doors) = (Arc::new(server), Arc::new(Doors::default()));
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (server, doors, shutdown) = (Arc::clone(&server), Arc::clone(&doors), shutdown.clone());
        let serve = |stream| async move {
            if let Err(error) = connection(stream, server, doors, shutdown).await {
                tracing::debug!(error, "the connection of a node");
            }
        };
        clients.take(accepted.map(|(stream, _)| stream), serve).await;
    }
}

/// Serves a client until it disconnects, its certificate expires, or `shutdown`. A client without a certificate
/// can only join.
async fn connection(
    stream: TcpStream,
    server: Arc<Server>,
    doors: Arc<Doors>,
    shutdown: CancellationToken,
) -> Result<(), String> {
    // Until the client has shown a certificate, it counts as unauthenticated.
    let peer = stream.peer_addr().map_err(|error| error.to_string())?.ip().to_canonical();
    let nobody = doors.nobodies.take(peer);
    let nobody = nobody.ok_or_else(|| format!("too many unauthenticated connections of {peer}"))?;
    tcp::notice_silence(&stream).map_err(|error| error.to_string())?;
    let shaking = TlsAcceptor::from(Arc::clone(&server.joining.tls)).accept(stream);
    let stream = tokio::time::timeout(HANDSHAKE, shaking).await;
    let stream = stream.map_err(|_| "no handshake in time".to_owned())?.map_err(|error| error.to_string())?;
    let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first().cloned());
    let node = shown.as_ref().and_then(certificates::node_of);
    let service = OfNode { node: node.clone(), server, doors: Arc::clone(&doors) };
    let Some(node) = node else {
        let service = ControllerServer::new(service).max_decoding_message_size(MAX_JOIN);
        let serving = http2::serve_within(stream, service, shutdown, BOUNDS_OF_NOBODY);
        return match tokio::time::timeout(TIME_TO_JOIN, serving).await {
            Ok(ended) => ended.map_err(|error| error.to_string()),
            Err(_) => Ok(()),
        };
    };
    drop(nobody);
    let seat = doors.nodes.take(node.clone());
    let _seat = seat.ok_or_else(|| format!("the node {node} has too many connections"))?;
    let service = ControllerServer::new(service).max_decoding_message_size(MAX_REQUEST);
    let serving = http2::serve_within(stream, service, shutdown, BOUNDS);
    let lasts = shown.as_ref().and_then(certificate::ends).map_or(Duration::ZERO, |end| {
        Duration::from_secs(end.as_secs().saturating_sub(UnixTime::now().as_secs()))
    });
    match tokio::time::timeout(lasts, serving).await {
        Ok(ended) => ended.map_err(|error| error.to_string()),
        Err(_) => Err(format!("the certificate of the node {node} has expired")),
    }
}

/// Service of one connection.
#[derive(Clone)]
struct OfNode {
    /// Name of the node, from its certificate; `None` if it has shown none.
    node: Option<String>,
    server: Arc<Server>,
    doors: Arc<Doors>,
}

impl OfNode {
    fn node(&self) -> Result<&str, Status> {
        self.node
            .as_deref()
            .ok_or_else(|| Status::unauthenticated("no certificate was presented; join first"))
    }
}

#[tonic::async_trait]
impl Controller for OfNode {
    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        let JoinRequest { token, certificate_signing_request } = request.into_inner();
        let Joining { ca, client, namespace, .. } = &self.server.joining;
        let _place = self.doors.tokens.acquire().await;
        let node = join::node_of_token(client, namespace, &token).await.map_err(|refused| {
            tracing::warn!("a node may not join: {refused}");
            match refused {
                JoinError::Unavailable(_) => Status::unavailable(refused.to_string()),
                JoinError::Refused(_) => Status::unauthenticated(refused.to_string()),
            }
        })?;
        let certificate = ca.sign(&certificate_signing_request, &node);
        let certificate = certificate.map_err(|error| Status::invalid_argument(text::chain(&error)))?;
        tracing::info!(node, "a node has joined");
        Ok(Response::new(JoinResponse { certificate: certificate.to_vec() }))
    }

    async fn ask(&self, request: Request<AskRequest>) -> Result<Response<AskResponse>, Status> {
        let answer = self.server.asked.answer(self.node()?, request.into_inner()).await?;
        Ok(Response::new(AskResponse { answer }))
    }

    async fn watch_checks(
        &self,
        request: Request<WatchChecksRequest>,
    ) -> Result<Response<WatchChecksResponse>, Status> {
        self.server.asked.checks(self.node()?, request.into_inner()).await.map(Response::new)
    }

    async fn attach_receipt(
        &self,
        request: Request<AttachReceiptRequest>,
    ) -> Result<Response<AttachReceiptResponse>, Status> {
        self.server.asked.attach(self.node()?, request.into_inner()).await.map(Response::new)
    }

    type AttendStream = Opened;

    async fn attend(
        &self,
        request: Request<tonic::Streaming<CallbackFromHost>>,
    ) -> Result<Response<Opened>, Status> {
        let (nodes, node) = (self.server.nodes.clone(), self.node()?.to_owned());
        nodes.attend(node, request.into_inner()).await.map(Response::new)
    }
}
