//! Dispatch between two services on one connection, by the path of a call.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use super::http2::is_of;

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// Both of them: calls of `A` go there, all others to `B`.
#[derive(Debug, Clone)]
pub struct Both<A, B>(pub A, pub B);

impl<A, B, R> Service<Request<R>> for Both<A, B>
where
    A: Service<Request<R>, Response = Response<Body>, Error = Infallible, Future = Answer> + NamedService,
    B: Service<Request<R>, Response = Response<Body>, Error = Infallible, Future = Answer>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        match self.0.poll_ready(context) {
            Poll::Ready(Ok(())) => self.1.poll_ready(context),
            waits => waits,
        }
    }

    fn call(&mut self, request: Request<R>) -> Answer {
        if is_of(request.uri().path(), A::NAME) { self.0.call(request) } else { self.1.call(request) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn only_paths_of_the_service_are_its_own(path in "(/?csi\\.v1\\.)?\\PC{0,20}") {
            prop_assert_eq!(is_of(&path, "csi.v1.Node"), path.starts_with("/csi.v1.Node/"));
        }
    }

    #[test]
    fn a_name_that_begins_alike_is_another() {
        assert!(is_of("/csi.v1.Identity/Probe", "csi.v1.Identity"));
        assert!(!is_of("/csi.v1.IdentityX/Probe", "csi.v1.Identity"));
        assert!(!is_of("csi.v1.Identity/Probe", "csi.v1.Identity"));
    }
}
