//! A host half that makes volumes for a guest's cluster, or does what the test wants in place of that.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use guestlet::transport::Both;
use guestlet::wire::proto::csi::controller_server::{Controller, ControllerServer};
use guestlet::wire::proto::csi::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse, CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest,
    DeleteVolumeResponse, GetCapacityRequest, GetCapacityResponse, ListVolumesRequest, ListVolumesResponse,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, Volume,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::host::host;
use crate::lab::Lab;

/// A host half that makes volumes, and says "no" or nothing at all where their names say so.
#[derive(Debug, Clone, Default)]
pub struct Scripted {
    /// It was asked for a volume.
    pub asked: Arc<Notify>,
    /// Volumes that it makes slowly, at this moment, and the most that there were at any.
    pub at_once: Arc<(AtomicUsize, AtomicUsize)>,
}

macro_rules! scripted {
    ($($call:ident($request:ty) -> $answer:ty;)+) => {
        #[tonic::async_trait]
        impl Controller for Scripted {
            async fn create_volume(
                &self,
                request: Request<CreateVolumeRequest>,
            ) -> Result<Response<CreateVolumeResponse>, Status> {
                self.asked.notify_one();
                let CreateVolumeRequest { name, parameters, .. } = request.into_inner();
                match name.as_str() {
                    "refused" => Err(Status::resource_exhausted("the pool is full")),
                    "silent" => std::future::pending().await,
                    "slow" => {
                        let (now, most) = &*self.at_once;
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        now.fetch_sub(1, Ordering::SeqCst);
                        Ok(Response::new(CreateVolumeResponse::default()))
                    }
                    _ => {
                        let volume = Volume { volume_id: name, volume_context: parameters, ..Volume::default() };
                        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
                    }
                }
            }

            $(async fn $call(&self, _: Request<$request>) -> Result<Response<$answer>, Status> {
                Err(Status::out_of_range(stringify!($call)))
            })+
        }
    };
}

scripted! {
    delete_volume(DeleteVolumeRequest) -> DeleteVolumeResponse;
    controller_publish_volume(ControllerPublishVolumeRequest) -> ControllerPublishVolumeResponse;
    controller_unpublish_volume(ControllerUnpublishVolumeRequest) -> ControllerUnpublishVolumeResponse;
    validate_volume_capabilities(ValidateVolumeCapabilitiesRequest) -> ValidateVolumeCapabilitiesResponse;
    list_volumes(ListVolumesRequest) -> ListVolumesResponse;
    get_capacity(GetCapacityRequest) -> GetCapacityResponse;
    controller_get_capabilities(ControllerGetCapabilitiesRequest) -> ControllerGetCapabilitiesResponse;
    controller_expand_volume(ControllerExpandVolumeRequest) -> ControllerExpandVolumeResponse;
    controller_get_volume(ControllerGetVolumeRequest) -> ControllerGetVolumeResponse;
}

impl Scripted {
    /// Serves the agent.
    pub async fn answer_for(&self, lab: &mut Lab) {
        let known = host("one", CancellationToken::new());
        lab.introduce_by(Both(known, ControllerServer::new(self.clone()))).await;
    }
}

/// Asks for a volume of this name.
pub fn named(name: &str) -> CreateVolumeRequest {
    let parameters = [("hostStorageClass".to_owned(), "fast".to_owned())].into();
    CreateVolumeRequest { name: name.to_owned(), parameters, ..CreateVolumeRequest::default() }
}
