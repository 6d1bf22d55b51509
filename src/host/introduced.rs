//! Requests of a connection of the admin API, with the peer that made them attached.

use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::Incoming;

use super::peer::Peer;
use crate::transport::http2;

/// Service that attaches the peer to each of its requests.
#[derive(Debug, Clone)]
pub struct Introduced<S> {
    /// Service that handles the requests.
    pub service: S,
    /// Peer that makes the requests.
    pub peer: Arc<Peer>,
}

impl<S: http2::Service> tower_service::Service<http::Request<Incoming>> for Introduced<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(Arc::clone(&self.peer));
        self.service.call(request)
    }
}
