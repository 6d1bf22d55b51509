//! The socket of the admin API: who is let in, how many at a time, and how connections end.

use std::sync::Arc;

use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

use super::super::clients::Clients;
use super::super::introduced::Introduced;
use super::super::peer::Peer;
use super::{Api, services};
use crate::access::Rules;
use crate::transport::http2::{self, Bounds};
use crate::transport::seats::Seats;
use crate::transport::unix::Listener;
use crate::wire::proto::v1::admin_server::AdminServer;

/// Connections of one user.
const OF_ONE: u32 = 8;
/// Connections of all users together; the other places are for those who may do everything.
const OF_ALL: u32 = 48;
/// Connections at a time; a further one is closed at once.
const MAX_CLIENTS: u32 = 64;
/// Bytes of one request.
const MAX_REQUEST: usize = 8 * 1024;

/// Serves `socket` until `shutdown`, and then closes every connection within moments. Removes the socket.
pub async fn run(socket: Listener, api: Api, shutdown: CancellationToken) {
    let mut rules = api.admission.rules.clone();
    let admin = AdminServer::new(api.clone()).max_decoding_message_size(MAX_REQUEST);
    let service = services::beside(&api, admin);
    let clients = Clients::new("API", MAX_CLIENTS);
    let seats = Seats::new(OF_ONE, OF_ALL);
    open_or_close(&socket, &rules.borrow_and_update());
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            Ok(()) = rules.changed() => {
                open_or_close(&socket, &rules.borrow_and_update());
                continue;
            }
            accepted = socket.accept() => accepted,
        };
        let accepted = accepted.and_then(|stream| {
            let credentials = stream.peer_cred()?;
            Ok((stream, Peer::new(credentials.uid(), credentials.gid())))
        });
        let seat = match &accepted {
            Ok((_, peer)) if !peer.is_trusted() => match seats.take(peer.uid()) {
                None => {
                    tracing::debug!(uid = peer.uid(), "rejected a client: its user has too many connections");
                    continue;
                }
                seat => seat,
            },
            _ => None,
        };
        let (service, shutdown) = (service.clone(), shutdown.clone());
        let serve = |(stream, peer): (UnixStream, Arc<Peer>)| async move {
            let bounds = if peer.is_trusted() { Bounds::WIDE } else { Bounds::SMALL };
            let service = Introduced { service, peer };
            if let Err(error) = http2::serve_within(stream, service, shutdown, bounds).await {
                tracing::debug!(%error, "a client's connection broke");
            }
            drop(seat);
        };
        clients.take(accepted, serve).await;
    }
    // The connections end by themselves; the socket must not promise anything meanwhile.
    drop(socket);
    clients.ended().await;
}

/// Lets everybody in to be asked who they are, if anybody else than the socket's owner may do anything.
fn open_or_close(socket: &Listener, rules: &Rules) {
    if let Err(error) = socket.open_to_all(!rules.is_empty()) {
        tracing::error!("cannot change the mode of {}: {error}", socket.path().display());
    }
    if !rules.is_empty() && !socket.is_in_reach() {
        let path = socket.path().display();
        tracing::warn!(
            "{path} cannot be reached by those who may use it: its directory is not searchable by others; chmod o+x"
        );
    }
}
