//! `csi.v1.Node`: [`fields`] checks what requests say, [`calls`] has what is done to volumes, [`info`] the rest, and [`moved`] asks
//! the host half; here is what they share.
//!
//! An operation runs in a task of its own and so to its end, also if whoever asked for it hangs up: who asks again
//! meanwhile is told that it is running.

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

/// Bytes of one request: maps of a few KiB each.
const MAX_REQUEST: usize = 256 * 1024;
/// How long what is being done may go on when the agent ends.
const LAST: Duration = Duration::from_secs(3);

/// The service; clones share it.
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
    /// A service over `guest`, whose identity is `known` from some time on; the host half is asked that `way`.
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

    /// Does `work` to its end, and gives what came of it to whoever is still there.
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
                    // It will be, or it is known why not.
                    Code::Aborted | Code::NotFound | Code::OutOfRange => tracing::info!("{words}"),
                    _ => tracing::warn!("{words}"),
                }
                status
            })
        });
        outcome.await.ok_or_else(|| Status::unavailable("the agent is stopping"))?
    }

    /// Completes when nothing is being done any more, but soon in any case.
    pub async fn finish(&self) {
        let _ = tokio::time::timeout(LAST, self.0.guest.pod_volumes.idle()).await;
    }

    /// The service as HTTP/2 serves it.
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
