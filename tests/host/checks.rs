//! The health checks of a simulated guest: it remembers which it was given, and makes none.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use guestlet::transport::http2;
use guestlet::wire::proto::v1;
use guestlet::wire::proto::v1::health_checks_server::{HealthChecks, HealthChecksServer, SERVICE_NAME};
use tonic::body::Body;
use tonic::{Request, Response, Status};

/// What it was given.
#[derive(Debug, Default, Clone)]
pub struct Checker {
    pub given: Arc<Mutex<Vec<v1::SetHealthChecksRequest>>>,
}

#[tonic::async_trait]
impl HealthChecks for Checker {
    async fn set_health_checks(
        &self,
        request: Request<v1::SetHealthChecksRequest>,
    ) -> Result<Response<v1::SetHealthChecksResponse>, Status> {
        let request = request.into_inner();
        assert!(!request.host_instance_id.is_empty() && request.generation > 0);
        // None has passed yet.
        let failing = |check: &v1::HealthCheckTarget| v1::HealthCheckResult {
            id: check.id.clone(),
            healthy: false,
            problem: "it was not tried yet".into(),
        };
        let results = request.checks.iter().map(failing).collect();
        self.given.lock().unwrap().push(request);
        Ok(Response::new(v1::SetHealthChecksResponse { results }))
    }
}

/// The services of an agent.
#[derive(Clone)]
pub struct Services<G> {
    pub guest: G,
    pub checks: HealthChecksServer<Checker>,
}

impl<G, R> tower_service::Service<http::Request<R>> for Services<G>
where
    G: http2::Service<R>,
    HealthChecksServer<Checker>: http2::Service<R>,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Those that tonic generates are always ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<R>) -> Self::Future {
        if http2::is_of(request.uri().path(), SERVICE_NAME) {
            Box::pin(self.checks.call(request))
        } else {
            Box::pin(self.guest.call(request))
        }
    }
}
