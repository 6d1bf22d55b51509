//! Serves nodes: TLS, whose end each connection is, and `guestlet.v1.Controller` on it.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::ask::Asked;
use super::nodes::{Attended, Nodes};
use crate::host::backends::kubevirt::controller::certificates::{self, Ca};
use crate::host::backends::kubevirt::controller::join::{self, JoinError};
use crate::host::clients::Clients;
use crate::host::text;
use crate::sys::tcp;
use crate::transport::http2::{self, Bounds};
use crate::wire::proto::v1::controller_server::{Controller, ControllerServer};
use crate::wire::proto::v1::{AskRequest, AskResponse, CallbackFromHost, JoinRequest, JoinResponse};

/// Connections at a time; a further one is closed at once.
const MAX_CLIENTS: u32 = 4096;
/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a connection may last: by then its certificate has expired.
const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// Bytes of one request: a guest's call, and what is around it.
const MAX_REQUEST: usize = 128 * 1024;
/// A node has many guests, whose calls may take minutes.
const BOUNDS: Bounds = Bounds { open_calls: 1024, ..Bounds::USUAL };

/// Who may join.
pub struct Joining {
    /// Vouches for nodes.
    pub ca: Arc<Ca>,
    /// What their connections begin with.
    pub tls: Arc<ServerConfig>,
    /// Says whose tokens are whose.
    pub client: kube::Client,
    /// That of the nodes' pods.
    pub namespace: String,
}

/// What nodes are served.
pub struct Server {
    /// Who may join.
    pub joining: Joining,
    /// Answers what they ask for their guests.
    pub asked: Asked,
    /// Those that attend.
    pub nodes: Nodes,
}

/// Serves nodes until `shutdown`.
pub async fn serve(listener: TcpListener, server: Server, shutdown: CancellationToken) {
    let clients = Clients::new("nodes", MAX_CLIENTS);
    let server = Arc::new(server);
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (server, shutdown) = (Arc::clone(&server), shutdown.clone());
        let serve = |stream| async move {
            if let Ok(Err(error)) = tokio::time::timeout(LIFETIME, node(stream, server, shutdown)).await {
                tracing::debug!(error, "the connection of a node");
            }
        };
        clients.take(accepted.map(|(stream, _)| stream), serve).await;
    }
}

/// Serves whoever is at the other end of a stream.
async fn node(stream: TcpStream, server: Arc<Server>, shutdown: CancellationToken) -> Result<(), String> {
    tcp::notice_silence(&stream).map_err(|error| error.to_string())?;
    let shaking = TlsAcceptor::from(Arc::clone(&server.joining.tls)).accept(stream);
    let stream = tokio::time::timeout(HANDSHAKE, shaking).await;
    let stream = stream.map_err(|_| "no handshake in time".to_owned())?.map_err(|error| error.to_string())?;
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first().cloned());
    let node = certificate.and_then(|certificate| certificates::node_of(&certificate));
    let service = ControllerServer::new(OfNode { node, server }).max_decoding_message_size(MAX_REQUEST);
    http2::serve_within(stream, service, shutdown, BOUNDS).await.map_err(|error| error.to_string())
}

/// What one connection is served.
#[derive(Clone)]
struct OfNode {
    /// Which node it is, by its certificate; none if it has shown none.
    node: Option<String>,
    server: Arc<Server>,
}

impl OfNode {
    fn node(&self) -> Result<&str, Status> {
        self.node.as_deref().ok_or_else(|| Status::unauthenticated("join first: there is no certificate"))
    }
}

#[tonic::async_trait]
impl Controller for OfNode {
    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        let JoinRequest { token, certificate_signing_request } = request.into_inner();
        let Joining { ca, client, namespace, .. } = &self.server.joining;
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

    type AttendStream = Attended;

    async fn attend(
        &self,
        request: Request<tonic::Streaming<CallbackFromHost>>,
    ) -> Result<Response<Attended>, Status> {
        let (nodes, node) = (self.server.nodes.clone(), self.node()?.to_owned());
        nodes.attend(node, request.into_inner()).await.map(Response::new)
    }
}
