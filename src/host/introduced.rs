//! The requests of a connection of the admin API, with the peer that made them.

use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::Incoming;

use super::peer::Peer;
use crate::transport::http2;

/// A service whose requests say who makes them.
#[derive(Debug, Clone)]
pub struct Introduced<S> {
    /// What serves them.
    pub service: S,
    /// Who makes them.
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
