//! `csi.v1.Controller` for the sidecars of the guest's cluster: every call goes to the host half, by what
//! that has opened for the guest's calls, and its answer comes back as it is.
//!
//! ```text
//!  sidecar ──unix socket──▶ Relay ──callback──▶ host half, which knows from the connection which guest asks
//! ```
//!
//! Nothing waits for a host half that is not there: UNAVAILABLE, at once, with the reason; the sidecars try again by
//! themselves. A call whose callback breaks is UNAVAILABLE as well: whether the host half has begun with it is unknown, and
//! every call may be repeated. A sidecar that hangs up ends its call here; what the host half has begun it finishes.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use tokio::sync::Semaphore;
use tonic::{Code, Request, Response, Status};

use crate::transport::callback::Caller;
use crate::transport::http2::ORIGIN;
use crate::wire::proto::csi::controller_client::ControllerClient;
use crate::wire::proto::csi::controller_server::{Controller, ControllerServer};
use crate::wire::proto::csi::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse, CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest,
    DeleteVolumeResponse, GetCapacityRequest, GetCapacityResponse, ListVolumesRequest, ListVolumesResponse,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse,
};

/// Bytes of one request; the names and parameters of one volume are far below it.
const MAX_REQUEST: usize = 64 * 1024;
/// Bytes of one answer; the longest is a page of the list of volumes.
const MAX_ANSWER: usize = 4 << 20;
/// How long the host half may take. The sidecars give up sooner, unless they are told not to.
const DEADLINE: Duration = Duration::from_secs(150);
/// Calls that it is asked at a time: it takes as many by default. Further ones wait here, within the same deadline.
const AT_ONCE: usize = 16;

/// The way to the host half, or why there is none.
pub type Way = Arc<dyn Fn() -> Result<Caller, String> + Send + Sync>;

/// The service.
#[derive(Clone)]
pub struct Relay {
    way: Way,
    places: Arc<Semaphore>,
}

impl Relay {
    /// One that asks for the way anew with each call.
    pub fn new(way: Way) -> Self {
        Self { way, places: Arc::new(Semaphore::new(AT_ONCE)) }
    }

    /// As something to serve.
    pub fn into_server(self) -> ControllerServer<Self> {
        ControllerServer::new(self).max_decoding_message_size(MAX_REQUEST)
    }

    /// Makes one call of the host half.
    async fn ask<Answer, F>(
        &self,
        call: impl FnOnce(ControllerClient<Caller>) -> F,
    ) -> Result<Response<Answer>, Status>
    where
        F: Future<Output = Result<Response<Answer>, Status>>,
    {
        let caller = (self.way)()
            .map_err(|reason| Status::unavailable(format!("the host half cannot be asked: {reason}")))?;
        let client = ControllerClient::with_origin(caller, Uri::from_static(ORIGIN))
            .max_decoding_message_size(MAX_ANSWER);
        let answer = tokio::time::timeout(DEADLINE, async {
            // Nobody closes it.
            let _place = self.places.acquire().await;
            call(client).await
        });
        let answer = answer.await.map_err(|_| {
            let seconds = DEADLINE.as_secs();
            Status::deadline_exceeded(format!("the host half did not answer within {seconds} s; try again"))
        })?;
        // Neither side's metadata is the other's business.
        answer.map(|answer| Response::new(answer.into_inner())).map_err(|status| of_host(&status))
    }
}

/// What the sidecar is told where the host half refused, or could not be asked any more.
fn of_host(status: &Status) -> Status {
    let unknown = matches!(status.code(), Code::Unknown | Code::Internal | Code::Cancelled);
    match status.source() {
        Some(source) if unknown => Status::unavailable(format!(
            "the way to the host half broke, and what came of the call is unknown; try again: {source}"
        )),
        _ => Status::new(status.code(), status.message()),
    }
}

/// Every call, passed on.
macro_rules! relayed {
    ($($call:ident($request:ty) -> $answer:ty;)+) => {
        #[tonic::async_trait]
        impl Controller for Relay {
            $(async fn $call(&self, request: Request<$request>) -> Result<Response<$answer>, Status> {
                let request = request.into_inner();
                self.ask(|mut client| async move { client.$call(request).await }).await
            })+
        }
    };
}

relayed! {
    create_volume(CreateVolumeRequest) -> CreateVolumeResponse;
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
