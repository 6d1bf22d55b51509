//! The host half of the node: its volumes are disks that the made-up machine of the tests plugs and unplugs.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use guestlet::csi::Both;
use guestlet::wire::proto::csi::controller_server::{Controller, ControllerServer};
use guestlet::wire::proto::csi::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse, CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest,
    DeleteVolumeResponse, GetCapacityRequest, GetCapacityResponse, ListVolumesRequest, ListVolumesResponse,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, Volume,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::disk::{Disk, Machine};
use crate::host::host;
use crate::lab::{Lab, NODE};

/// The volumes of the cluster; clones share them.
#[derive(Clone)]
pub struct Half(Arc<Mutex<Volumes>>);

struct Volumes {
    machine: Machine,
    made: u32,
    by_id: BTreeMap<String, Held>,
}

struct Held {
    disk: Disk,
    is_attached: bool,
}

impl Half {
    pub fn new(machine: Machine) -> Self {
        Self(Arc::new(Mutex::new(Volumes { machine, made: 0, by_id: BTreeMap::new() })))
    }

    /// Serves the agent.
    pub async fn answer_for(&self, lab: &mut Lab) {
        let known = host("one", CancellationToken::new());
        lab.introduce_by(Both(known, ControllerServer::new(self.clone()))).await;
    }

    /// Whether all volumes are attached.
    pub fn all_are_attached(&self) -> bool {
        self.all().by_id.values().all(|held| held.is_attached)
    }

    /// Whether there is a volume, or the disk of one that somebody uses.
    pub fn is_left(&self) -> bool {
        let all = self.all();
        !all.by_id.is_empty() || all.machine.is_used()
    }

    /// Where the machine's own /sys is.
    pub fn real_sys(&self) -> String {
        self.all().machine.real()
    }

    fn all(&self) -> MutexGuard<'_, Volumes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The size that a request wants, in bytes and in mebibytes.
fn size(range: Option<guestlet::wire::proto::csi::CapacityRange>) -> Result<(i64, u64), Status> {
    let bytes = range.unwrap_or_default().required_bytes;
    let mebibytes = u64::try_from(bytes >> 20).map_err(|_| Status::out_of_range("the size is negative"))?;
    Ok((bytes, mebibytes))
}

fn unknown() -> Status {
    Status::not_found("there is no such volume")
}

#[tonic::async_trait]
impl Controller for Half {
    async fn create_volume(
        &self,
        request: Request<CreateVolumeRequest>,
    ) -> Result<Response<CreateVolumeResponse>, Status> {
        let CreateVolumeRequest { name, capacity_range, .. } = request.into_inner();
        let (capacity_bytes, mebibytes) = size(capacity_range)?;
        let mut all = self.all();
        if !all.by_id.contains_key(&name) {
            all.made += 1;
            let disk = all.machine.disk(&format!("volume-{}", all.made), mebibytes);
            all.by_id.insert(name.clone(), Held { disk, is_attached: false });
        }
        let volume = Volume { volume_id: name, capacity_bytes, ..Volume::default() };
        Ok(Response::new(CreateVolumeResponse { volume: Some(volume) }))
    }

    async fn delete_volume(
        &self,
        request: Request<DeleteVolumeRequest>,
    ) -> Result<Response<DeleteVolumeResponse>, Status> {
        let id = request.into_inner().volume_id;
        let mut all = self.all();
        if all.by_id.get(&id).is_some_and(|held| held.is_attached) {
            return Err(Status::failed_precondition("it is attached"));
        }
        all.by_id.remove(&id);
        Ok(Response::new(DeleteVolumeResponse {}))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> Result<Response<ControllerPublishVolumeResponse>, Status> {
        let ControllerPublishVolumeRequest { volume_id, node_id, .. } = request.into_inner();
        if node_id != NODE {
            return Err(Status::not_found("there is no such node"));
        }
        let mut all = self.all();
        let held = all.by_id.get_mut(&volume_id).ok_or_else(unknown)?;
        if !held.is_attached {
            held.disk.plug();
            held.is_attached = true;
        }
        let context = [("guestlet.io/serial", held.disk.serial.as_str()), ("guestlet.io/bus", "virtio")];
        let publish_context: HashMap<_, _> =
            context.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        Ok(Response::new(ControllerPublishVolumeResponse { publish_context }))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Result<Response<ControllerUnpublishVolumeResponse>, Status> {
        let id = request.into_inner().volume_id;
        if let Some(held) = self.all().by_id.get_mut(&id)
            && held.is_attached
        {
            held.disk.unplug();
            held.is_attached = false;
        }
        Ok(Response::new(ControllerUnpublishVolumeResponse {}))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Result<Response<ControllerExpandVolumeResponse>, Status> {
        let ControllerExpandVolumeRequest { volume_id, capacity_range, .. } = request.into_inner();
        let (capacity_bytes, mebibytes) = size(capacity_range)?;
        self.all().by_id.get(&volume_id).ok_or_else(unknown)?.disk.resize(mebibytes);
        Ok(Response::new(ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required: true }))
    }

    async fn validate_volume_capabilities(
        &self,
        _: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Result<Response<ValidateVolumeCapabilitiesResponse>, Status> {
        Err(Status::unimplemented("nobody asks for it"))
    }

    async fn list_volumes(
        &self,
        _: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        Err(Status::unimplemented("nobody asks for it"))
    }

    async fn get_capacity(
        &self,
        _: Request<GetCapacityRequest>,
    ) -> Result<Response<GetCapacityResponse>, Status> {
        Err(Status::unimplemented("nobody asks for it"))
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Result<Response<ControllerGetCapabilitiesResponse>, Status> {
        Err(Status::unimplemented("nobody asks for it"))
    }

    async fn controller_get_volume(
        &self,
        _: Request<ControllerGetVolumeRequest>,
    ) -> Result<Response<ControllerGetVolumeResponse>, Status> {
        Err(Status::unimplemented("nobody asks for it"))
    }
}
