//! The host half of all nodes: its volumes are disks that the made-up machines of the tests plug and unplug.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use guestlet::transport::{Both, http2};
use guestlet::wire::proto::csi::controller_server::{Controller, ControllerServer};
use guestlet::wire::proto::csi::{
    ControllerExpandVolumeRequest, ControllerExpandVolumeResponse, ControllerGetCapabilitiesRequest,
    ControllerGetCapabilitiesResponse, ControllerGetVolumeRequest, ControllerGetVolumeResponse,
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
    ControllerUnpublishVolumeResponse, CreateVolumeRequest, CreateVolumeResponse, DeleteVolumeRequest,
    DeleteVolumeResponse, GetCapacityRequest, GetCapacityResponse, ListVolumesRequest, ListVolumesResponse,
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, Volume,
};
use guestlet::wire::proto::v1::guest_client::GuestClient;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};

use crate::disk::{Disk, Machine};
use crate::host::host_of;
use crate::lab::{Lab, release};

/// The volumes of the cluster; clones share them.
#[derive(Clone)]
pub struct Half(Arc<Mutex<Volumes>>);

struct Volumes {
    /// Those that it has, by what it calls them.
    machines: BTreeMap<&'static str, Arc<Machine>>,
    /// The agents that it reaches.
    agents: BTreeMap<&'static str, GuestClient<http2::Client>>,
    made: u32,
    by_id: BTreeMap<String, Held>,
    calls: Vec<Call>,
}

struct Held {
    disk: Disk,
    /// The machine that it is plugged into.
    at: Option<String>,
}

/// What was done for the sidecars.
#[derive(Clone, Debug, PartialEq)]
pub enum Call {
    Plugged { volume: String, machine: String },
    Unplugged { volume: String, machine: String },
}

/// How long an agent may take that is to let go of a disk.
const RELEASE: Duration = Duration::from_secs(10);

impl Half {
    pub fn new(machines: BTreeMap<&'static str, Arc<Machine>>) -> Self {
        let (agents, by_id) = (BTreeMap::new(), BTreeMap::new());
        Self(Arc::new(Mutex::new(Volumes { machines, agents, made: 0, by_id, calls: Vec::new() })))
    }

    /// Serves the agent of this machine.
    pub async fn answer_for(&self, machine: &'static str, lab: &mut Lab) {
        let known = host_of(machine, "one", CancellationToken::new());
        lab.introduce_by(Both(known, ControllerServer::new(self.clone()))).await;
        self.all().agents.insert(machine, lab.guest());
    }

    /// What was plugged and unplugged, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.all().calls.clone()
    }

    /// Whether all volumes are attached.
    pub fn all_are_attached(&self) -> bool {
        self.all().by_id.values().all(|held| held.at.is_some())
    }

    /// Whether there is a volume, or the disk of one that somebody uses.
    pub fn is_left(&self) -> bool {
        let all = self.all();
        !all.by_id.is_empty() || all.machines.values().any(|machine| machine.is_used())
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
            let machine = all.machines.values().next().expect("a machine");
            let disk = machine.disk(&format!("volume-{}", all.made), mebibytes);
            all.by_id.insert(name.clone(), Held { disk, at: None });
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
        if all.by_id.get(&id).is_some_and(|held| held.at.is_some()) {
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
        let all = &mut *self.all();
        let machine = all.machines.get(node_id.as_str());
        let machine = machine.ok_or_else(|| Status::not_found("there is no such node"))?;
        let held = all.by_id.get_mut(&volume_id).ok_or_else(unknown)?;
        if held.at.as_ref().is_some_and(|at| *at != node_id) {
            return Err(Status::failed_precondition("another machine has it"));
        }
        if held.at.is_none() {
            machine.take(&mut held.disk);
            held.disk.plug();
            held.at = Some(node_id.clone());
            all.calls.push(Call::Plugged { volume: volume_id, machine: node_id });
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
        let ControllerUnpublishVolumeRequest { volume_id, node_id, .. } = request.into_inner();
        let plugged = || {
            let all = self.all();
            let held = all.by_id.get(&volume_id).filter(|held| held.at.as_ref() == Some(&node_id))?;
            Some((held.disk.serial.clone(), all.agents.get(node_id.as_str()).cloned()))
        };
        let Some((serial, agent)) = plugged() else {
            return Ok(Response::new(ControllerUnpublishVolumeResponse {}));
        };
        if let Some(agent) = agent
            && let Ok(Err(refused)) = tokio::time::timeout(RELEASE, release(agent, &serial)).await
            && refused.code() == Code::FailedPrecondition
        {
            return Err(refused);
        }
        let all = &mut *self.all();
        let held = all.by_id.get_mut(&volume_id).ok_or_else(unknown)?;
        if held.at.take().is_some() {
            held.disk.unplug();
            all.calls.push(Call::Unplugged { volume: volume_id, machine: node_id });
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
