//! Tells the services of a connection who is at its other end.

use std::sync::Arc;
use std::task::{Context, Poll};

use crate::trust::Peer;

/// A secret of both ends of the connection that a request came on; only where both have keys.
#[derive(Debug, Clone, Copy)]
pub struct Binding(pub [u8; 32]);

/// Returns the peer of a request; without one in the extensions, a peer that has proved nothing.
pub fn peer<T>(request: &tonic::Request<T>) -> Arc<Peer> {
    request.extensions().get().map_or_else(|| Arc::new(Peer::Plain), Arc::clone)
}

/// Service whose requests carry `Arc<Peer>`, and [`Binding`] if there is one, among their extensions.
#[derive(Debug, Clone)]
pub struct Introduced<S> {
    service: S,
    peer: Arc<Peer>,
    binding: Option<Binding>,
}

impl<S> Introduced<S> {
    /// The service for the connection with this peer.
    pub fn new(service: S, peer: Arc<Peer>, binding: Option<[u8; 32]>) -> Self {
        Self { service, peer, binding: binding.map(Binding) }
    }
}

impl<S, B> tower_service::Service<http::Request<B>> for Introduced<S>
where
    S: tower_service::Service<http::Request<B>>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<B>) -> Self::Future {
        let extensions = request.extensions_mut();
        extensions.insert(Arc::clone(&self.peer));
        if let Some(binding) = self.binding {
            extensions.insert(binding);
        }
        self.service.call(request)
    }
}
