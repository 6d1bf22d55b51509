//! `guestlet.v1.Metrics`: what this machine measures of itself, for the host half.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tonic::{Request, Response, Status};

use crate::guest::Guest;
use crate::guest::metrics::Collector;
use crate::metrics;
use crate::wire::proto::v1;
use crate::wire::proto::v1::metrics_server::{self, MetricsServer};

/// Maximum number of calls that wait for an answer; more than a host half makes.
const MOST: usize = 8;

/// The service; clones share its places and what it remembers.
#[derive(Debug, Clone)]
pub struct Service {
    guest: Guest,
    collector: Arc<Collector>,
    places: Arc<Semaphore>,
}

impl Service {
    /// A service over this guest.
    pub fn new(guest: Guest) -> Self {
        Self { guest, collector: Arc::default(), places: Arc::new(Semaphore::new(MOST)) }
    }

    /// The service as HTTP/2 serves it.
    pub fn into_server(self) -> MetricsServer<Self> {
        MetricsServer::new(self)
    }
}

#[tonic::async_trait]
impl metrics_server::Metrics for Service {
    async fn collect_metrics(
        &self,
        request: Request<v1::CollectMetricsRequest>,
    ) -> Result<Response<v1::CollectMetricsResponse>, Status> {
        let _place = self.places.try_acquire().map_err(|_| {
            Status::resource_exhausted(format!("{MOST} callers wait for metrics already; try again later"))
        })?;
        let most = match usize::try_from(request.get_ref().max_samples).unwrap_or(usize::MAX) {
            0 => metrics::MOST_OF_GUEST,
            most => most.min(metrics::MOST_OF_GUEST),
        };
        let samples = self.collector.collect(&self.guest, most).await;
        let samples = samples.map_err(|silent| Status::deadline_exceeded(silent.to_string()))?;
        Ok(Response::new(metrics::message(&samples)))
    }
}
