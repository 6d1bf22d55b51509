//! What sidecars in a guest ask of volumes.

use std::collections::HashMap;

use guestlet::transport::callback::Caller;
use guestlet::transport::http2;
use guestlet::wire::proto::csi::controller_client::ControllerClient;
use guestlet::wire::proto::csi::volume_capability::access_mode::Mode;
use guestlet::wire::proto::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use guestlet::wire::proto::csi::{self, VolumeCapability};
use tonic::{Code, Status};

use crate::lab::DEADLINE;

/// A guest's end of the callback.
#[derive(Clone)]
pub struct Asking(pub Caller);

macro_rules! calls {
    ($($name:ident: $request:ident => $response:ident;)*) => {
        impl Asking {
            $(pub fn $name(&self, request: csi::$request) -> Result<csi::$response, Status> {
                let mut client = self.client();
                wait(async move { client.$name(request).await.map(tonic::Response::into_inner) })
            })*
        }
    };
}

calls! {
    create_volume: CreateVolumeRequest => CreateVolumeResponse;
    delete_volume: DeleteVolumeRequest => DeleteVolumeResponse;
    controller_publish_volume: ControllerPublishVolumeRequest => ControllerPublishVolumeResponse;
    controller_unpublish_volume: ControllerUnpublishVolumeRequest => ControllerUnpublishVolumeResponse;
    validate_volume_capabilities: ValidateVolumeCapabilitiesRequest => ValidateVolumeCapabilitiesResponse;
    list_volumes: ListVolumesRequest => ListVolumesResponse;
    get_capacity: GetCapacityRequest => GetCapacityResponse;
    controller_get_capabilities: ControllerGetCapabilitiesRequest => ControllerGetCapabilitiesResponse;
    controller_expand_volume: ControllerExpandVolumeRequest => ControllerExpandVolumeResponse;
    controller_get_volume: ControllerGetVolumeRequest => ControllerGetVolumeResponse;
}

pub fn wait<T>(call: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(DEADLINE, call).await.expect("the host half answers") })
}

impl Asking {
    pub fn client(&self) -> ControllerClient<Caller> {
        ControllerClient::with_origin(self.0.clone(), http::Uri::from_static(http2::ORIGIN))
    }

    pub fn create(&self, name: &str, size: i64) -> Result<csi::Volume, Status> {
        self.create_in(name, size, None)
    }

    pub fn create_in(&self, name: &str, size: i64, class: Option<&str>) -> Result<csi::Volume, Status> {
        let mut request = wanted(name, size);
        request.parameters =
            class.into_iter().map(|class| ("hostStorageClass".to_owned(), class.to_owned())).collect();
        self.create_volume(request).map(|answer| answer.volume.unwrap())
    }

    pub fn delete(&self, id: &str) -> Result<(), Status> {
        let request = csi::DeleteVolumeRequest { volume_id: id.into(), ..Default::default() };
        self.delete_volume(request).map(drop)
    }

    pub fn publish(&self, id: &str, node: &str) -> Result<HashMap<String, String>, Status> {
        self.controller_publish_volume(publishing(id, node)).map(|answer| answer.publish_context)
    }

    pub fn unpublish(&self, id: &str, node: &str) -> Result<(), Status> {
        let (volume_id, node_id) = (id.into(), node.into());
        let request = csi::ControllerUnpublishVolumeRequest { volume_id, node_id, ..Default::default() };
        self.controller_unpublish_volume(request).map(drop)
    }

    pub fn expand(&self, id: &str, size: i64) -> Result<i64, Status> {
        let capacity_range = Some(csi::CapacityRange { required_bytes: size, limit_bytes: 0 });
        let request =
            csi::ControllerExpandVolumeRequest { volume_id: id.into(), capacity_range, ..Default::default() };
        self.controller_expand_volume(request).map(|answer| answer.capacity_bytes)
    }

    /// All volumes that it sees, and the nodes that have each.
    pub fn all(&self) -> Vec<(String, Vec<String>)> {
        let answer = self.list_volumes(csi::ListVolumesRequest::default()).unwrap();
        let entry = |entry: csi::list_volumes_response::Entry| {
            (entry.volume.unwrap().volume_id, entry.status.unwrap().published_node_ids)
        };
        answer.entries.into_iter().map(entry).collect()
    }
}

pub fn mount(mode: Mode) -> VolumeCapability {
    let mount = MountVolume { fs_type: "ext4".into(), ..MountVolume::default() };
    VolumeCapability {
        access_type: Some(AccessType::Mount(mount)),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

pub fn block() -> VolumeCapability {
    let access_type = Some(AccessType::Block(BlockVolume {}));
    VolumeCapability { access_type, ..mount(Mode::SingleNodeWriter) }
}

pub fn wanted(name: &str, size: i64) -> csi::CreateVolumeRequest {
    csi::CreateVolumeRequest {
        name: name.into(),
        capacity_range: Some(csi::CapacityRange { required_bytes: size, limit_bytes: 0 }),
        volume_capabilities: vec![mount(Mode::SingleNodeWriter)],
        ..Default::default()
    }
}

pub fn publishing(id: &str, node: &str) -> csi::ControllerPublishVolumeRequest {
    csi::ControllerPublishVolumeRequest {
        volume_id: id.into(),
        node_id: node.into(),
        volume_capability: Some(mount(Mode::SingleNodeWriter)),
        ..Default::default()
    }
}

/// Asserts that a call was refused with this code, saying this.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(outcome: Result<T, Status>, code: Code, words: &str) {
    let status = outcome.unwrap_err();
    assert!(
        status.code() == code && status.message().contains(words),
        "{status:?}; expected {code:?} {words:?}"
    );
}
