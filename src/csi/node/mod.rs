//! `csi.v1.Node`: one file per subject of calls; here is what they share.

mod info;

use std::sync::Arc;

use tokio::sync::watch;
use tonic::{Request, Response, Status};

use crate::csi::{Identity, Settings};
use crate::wire::proto::csi;
use crate::wire::proto::csi::node_server::{Node, NodeServer};

/// Bytes of one request: maps of a few KiB each.
const MAX_REQUEST: usize = 256 * 1024;

/// The service; clones share it.
#[derive(Debug, Clone)]
pub struct Service(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    known: watch::Receiver<Option<Identity>>,
    topology: Vec<String>,
}

impl Service {
    /// A service of a guest whose identity is `known` from some time on.
    pub fn new(settings: &Settings, known: watch::Receiver<Option<Identity>>) -> Self {
        Self(Arc::new(Shared { known, topology: settings.topology.clone() }))
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
        _: Request<csi::NodeStageVolumeRequest>,
    ) -> Result<Response<csi::NodeStageVolumeResponse>, Status> {
        Err(Status::unimplemented("this is no capability of this driver"))
    }

    async fn node_unstage_volume(
        &self,
        _: Request<csi::NodeUnstageVolumeRequest>,
    ) -> Result<Response<csi::NodeUnstageVolumeResponse>, Status> {
        Err(Status::unimplemented("this is no capability of this driver"))
    }

    async fn node_publish_volume(
        &self,
        _: Request<csi::NodePublishVolumeRequest>,
    ) -> Result<Response<csi::NodePublishVolumeResponse>, Status> {
        Err(Status::unimplemented("this is no capability of this driver"))
    }

    async fn node_unpublish_volume(
        &self,
        _: Request<csi::NodeUnpublishVolumeRequest>,
    ) -> Result<Response<csi::NodeUnpublishVolumeResponse>, Status> {
        Err(Status::unimplemented("this is no capability of this driver"))
    }

    async fn node_get_volume_stats(
        &self,
        _: Request<csi::NodeGetVolumeStatsRequest>,
    ) -> Result<Response<csi::NodeGetVolumeStatsResponse>, Status> {
        Err(Status::unimplemented("this is no capability of this driver"))
    }

    async fn node_expand_volume(
        &self,
        _: Request<csi::NodeExpandVolumeRequest>,
    ) -> Result<Response<csi::NodeExpandVolumeResponse>, Status> {
        Err(Status::unimplemented("this is no capability of this driver"))
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
