//! `csi.v1.Node`: [`fields`] validates requests, [`calls`] operates on volumes, [`info`] has the other calls,
//! and [`moved`] asks the host half for the address of a share. This file has what they share.
//!
//! Each operation runs in a task of its own and is completed even if its caller disconnects. A repeated
//! request is answered meanwhile with the information that the operation is running.

mod calls;
mod fields;
mod info;
mod moved;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};

use crate::csi::{Identity, Settings, status};
use crate::guest::Guest;
use crate::guest::pod_volumes::Error;
use crate::supervise::Scope;
use crate::transport::relay::Way;
use crate::wire::proto::csi;
use crate::wire::proto::csi::node_server::{Node, NodeServer};

/// Limit of the bytes of one request: maps of a few KiB each.
const MAX_REQUEST: usize = 256 * 1024;
/// Time that running operations may take when the agent ends.
const LAST: Duration = Duration::from_secs(3);

/// Node service; clones share it.
#[derive(Clone)]
pub struct Service(Arc<Shared>);

impl std::fmt::Debug for Service {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Service")
    }
}

struct Shared {
    guest: Guest,
    operations: Scope,
    known: watch::Receiver<Option<Identity>>,
    topology: Vec<String>,
    way: Way,
    lookouts: moved::Lookouts,
}

impl Service {
    /// Creates a service for `guest`, whose identity may become `known` later. The host half is reached by `way`.
    pub fn new(
        guest: Guest,
        settings: &Settings,
        known: watch::Receiver<Option<Identity>>,
        way: Way,
    ) -> Self {
        guest.pod_volumes.serve(&settings.kubelet_root);
        let topology = settings.topology.clone();
        let lookouts = moved::Lookouts::default();
        Self(Arc::new(Shared { guest, operations: Scope::new(), known, topology, way, lookouts }))
    }

    fn guest(&self) -> Guest {
        self.0.guest.clone()
    }

    /// Runs `work` to completion, and returns its result if the caller still waits.
    async fn run<T: Send + 'static>(
        &self,
        (what, volume): (&'static str, String),
        work: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Status> {
        let outcome = self.0.operations.children().run_to_end(async move {
            work.await.map_err(|error| {
                let status = status::of(&error);
                let words = format!("volume {volume}: cannot {what} it: {}", status.message());
                match status.code() {
                    // The operation will succeed later, or the cause is known.
                    Code::Aborted | Code::NotFound | Code::OutOfRange => tracing::info!("{words}"),
                    _ => tracing::warn!("{words}"),
                }
                status
            })
        });
        outcome.await.ok_or_else(|| Status::unavailable("the agent is stopping"))?
    }

    /// Completes when no operation is running any longer, or after a short time.
    pub async fn finish(&self) {
        let _ = tokio::time::timeout(LAST, self.0.guest.pod_volumes.idle()).await;
    }

    /// Returns the service in the form that HTTP/2 serves.
    pub fn into_server(self) -> NodeServer<Self> {
        NodeServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }
}

#[tonic::async_trait]
impl Node for Service {
    async fn node_stage_volume(
        &self,
        request: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        self.stage(request.into_inner()).await.map(Response::new)
    }

    async fn node_unstage_volume(
        &self,
        request: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        self.unstage(request.into_inner()).await.map(Response::new)
    }

    async fn node_publish_volume(
        &self,
        request: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        self.publish(request.into_inner()).await.map(Response::new)
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        self.unpublish(request.into_inner()).await.map(Response::new)
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        self.stats(request.into_inner()).await.map(Response::new)
    }

    async fn node_expand_volume(
        &self,
        request: Request<csi::NodeExpandVolumeRequest>,
    ) -> Result<Response<csi::NodeExpandVolumeResponse>, Status> {
        self.expand(request.into_inner()).await.map(Response::new)
    }

    async fn node_get_capabilities(
        &self,
        _: Request<csi::NodeGetCapabilitiesRequest>,
    ) -> Result<Response<csi::NodeGetCapabilitiesResponse>, Status> {
        Ok(Response::new(info::capabilities()))
    }

    async fn node_get_info(
        &self,
        _: Request<csi::NodeGetInfoRequest>,
    ) -> Result<Response<csi::NodeGetInfoResponse>, Status> {
        self.info().map(Response::new)
    }
}
