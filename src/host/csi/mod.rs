//! `csi.v1.Controller` for the guests of this host: validates each request, turns it into a call of the
//! [`Keeper`], and turns the result into the answer.
//!
//! The connection tells which VM sends a request, and with it the cluster for which it acts; the messages do not.
//! `check` refuses requests that are wrong in any state. To add a call: its method here, and its capability.
//!
//! A call may wait for minutes, and a request may contain much data that is never used. So the required fields are
//! taken out first, and the request is dropped before anything is awaited.

use std::collections::HashMap;

use tonic::body::Body;
use tonic::{Code, Request, Response, Status};
use tower_service::Service as _;

use super::audit::{Entry, What};
use super::backends::Vm;
use super::backends::disks::Bus;
use super::backends::volumes::{self, Export, Plugged};
use super::caller::{Behalf, Caller};
use super::for_guests::{self, Answering, Asking};
use super::text;
use super::volumes::problem::{Kind, Problem};
use super::volumes::size::{Range, SMALLEST};
use super::volumes::{Asker, Given, Keeper, Wanted};
use crate::access::verb::{self, Verb};
use crate::wire::proto::csi::controller_server::{Controller, ControllerServer};
use crate::wire::proto::csi::{self, controller_service_capability as capability};

mod check;

use check::Parameters;

/// Key of the serial number by which a guest finds the disk.
const SERIAL: &str = "guestlet.io/serial";
/// Key of the bus on which the guest sees the disk.
const BUS: &str = "guestlet.io/bus";

/// Keys of the server and path of a share, and of the mount options that the server requires.
const NFS_SERVER: &str = "guestlet.io/nfs-server";
const NFS_PATH: &str = "guestlet.io/nfs-path";
const NFS_OPTIONS: &str = "guestlet.io/nfs-options";

/// Key in the volume context by which an agent marks a request that only asks where a share of its node is served.
const WHERE: &str = "guestlet.io/where";

/// Validated request to publish a volume to a node.
struct Publication {
    id: String,
    node: String,
    capability: csi::VolumeCapability,
    read_only: bool,
}

/// Server of `csi.v1.Controller` for one guest.
#[derive(Debug, Clone)]
struct Service {
    keeper: Keeper,
    guest: Asking,
}

#[tonic::async_trait]
impl for_guests::Volumes for Keeper {
    fn answer(&self, guest: Asking, call: http::Request<Body>) -> Answering {
        let mut server = ControllerServer::new(Service { keeper: self.clone(), guest });
        Box::pin(async move {
            match server.call(call).await {
                Ok(answer) => answer,
                Err(never) => match never {},
            }
        })
    }

    async fn most(&self, vm: &Vm) -> u32 {
        Self::most(self, vm).await
    }
}

type Answer<T> = Result<Response<T>, Status>;

impl Service {
    /// Returns the name of the host that the guest reports to kubelet.
    fn host(&self) -> Result<String, Problem> {
        let place = self.guest.place.borrow();
        let host = place.as_ref().map(|place| place.host.clone()).filter(|host| !host.is_empty());
        host.ok_or_else(|| Problem::new(Kind::Unavailable, "the host of this VM is not known yet; try again"))
    }

    fn asker(&self) -> (Asker, Behalf) {
        let Vm { name: vm, cluster, .. } = Vm::clone(&self.guest.vm);
        let behalf = Behalf::of(Caller::Guest(vm.clone()));
        (Asker::Guest { vm, cluster, behalf: behalf.clone() }, behalf)
    }

    /// Admits a call. A caller without permission gets no other error, not even about a wrong request.
    fn admit<T>(&self, request: Request<T>) -> Result<(Asker, T), Status> {
        let (asker, _) = self.asker();
        self.keeper.authorise(&asker).map_err(Problem::for_guest)?;
        Ok((asker, request.into_inner()))
    }

    /// Admits a call that changes something, and records it in the audit log with the node and the volume that it
    /// names.
    fn begin<T>(
        &self,
        request: Request<T>,
        verb: &'static Verb,
        about: impl FnOnce(&T) -> (&str, &str),
    ) -> Result<(Asker, Entry, T), Status> {
        let (asker, behalf) = self.asker();
        let request = request.into_inner();
        let (node, volume) = about(&request);
        let what = What { verb, vm: text::clean(node), subject: text::clean(volume) };
        if let Err(problem) = self.keeper.authorise(&asker) {
            self.guest.audit.denied(&behalf, &what);
            return Err(problem.for_guest());
        }
        Ok((asker, self.guest.audit.begin(&behalf, what), request))
    }
}

impl Service {
    /// Reports whether volumes of this host can have these capabilities.
    fn may_be(&self, capabilities: &[csi::VolumeCapability]) -> bool {
        check::capabilities(capabilities)
            .is_ok_and(|used| used == check::Use::Alone || self.keeper.has_shares())
    }

    /// Returns the identifier of the volume that the guest's cluster knows by this handle.
    fn id(&self, handle: &str) -> Result<String, Problem> {
        check::volume_id(handle)?;
        Ok(self.keeper.id(&self.guest.vm.cluster, handle))
    }

    /// Describes a volume for its cluster.
    fn volume(&self, volume: &volumes::Volume) -> csi::Volume {
        let volume_id = self.keeper.handle(&volume.id);
        csi::Volume { capacity_bytes: bytes(volume.size), volume_id, ..csi::Volume::default() }
    }

    /// Parses the request for a new volume, and returns its topology too.
    fn wanted(&self, request: csi::CreateVolumeRequest) -> Result<(Wanted, Vec<csi::Topology>), Problem> {
        let is_share = check::capabilities(&request.volume_capabilities)? == check::Use::Shared;
        check::without("volume_content_source", request.volume_content_source.is_some())?;
        check::without("mutable_parameters", !request.mutable_parameters.is_empty())?;
        let Parameters { class, claim } = check::parameters(&request.parameters)?;
        let range = request.capacity_range.unwrap_or_default();
        let range = Range::new(range.required_bytes, range.limit_bytes)?;
        let places = if self.keeper.are_of_one_host() {
            check::placed(request.accessibility_requirements.as_ref(), || self.host())?
        } else {
            Vec::new()
        };
        Ok((Wanted { name: request.name, class, range, claim, is_share }, places))
    }

    /// Parses the request to publish a volume to a node.
    fn publication(&self, request: csi::ControllerPublishVolumeRequest) -> Result<Publication, Problem> {
        let id = self.id(&request.volume_id)?;
        check::node_id(&request.node_id)?;
        let missing = || Problem::new(Kind::Invalid, "volume_capability is missing");
        let capability = request.volume_capability.ok_or_else(missing)?;
        check::capability(&capability)?;
        let read_only = request.readonly || check::is_read_only_share(&capability);
        Ok(Publication { id, node: request.node_id, capability, read_only })
    }

    /// Parses the request to expand a volume: its identifier, the sizes, and whether it is used as a block device.
    fn growth(&self, request: &csi::ControllerExpandVolumeRequest) -> Result<(String, Range, bool), Problem> {
        let id = self.id(&request.volume_id)?;
        let missing = || Problem::new(Kind::Invalid, "capacity_range is missing");
        let range = request.capacity_range.ok_or_else(missing)?;
        let range = Range::new(range.required_bytes, range.limit_bytes)?;
        if let Some(capability) = &request.volume_capability {
            check::capability(capability)?;
        }
        Ok((id, range, request.volume_capability.as_ref().is_some_and(check::is_block)))
    }

    /// Answers where a share is served. This changes nothing, so it is not recorded.
    async fn find_share(
        &self,
        request: Request<csi::ControllerPublishVolumeRequest>,
    ) -> Answer<csi::ControllerPublishVolumeResponse> {
        let (asker, request) = self.admit(request)?;
        let of_node = self
            .id(&request.volume_id)
            .and_then(|id| check::node_id(&request.node_id).map(|()| (id, request.node_id.clone())));
        drop(request);
        let found = async {
            let (id, node) = of_node?;
            let export = self.keeper.find_share(&asker, &id, &node).await?;
            let publish_context = context(Given::Share(export)).into_iter().collect();
            Ok(csi::ControllerPublishVolumeResponse { publish_context })
        };
        answer(found.await)
    }
}

/// Completes the audit record of a call, and returns the answer.
fn ended<T>(entry: Entry, outcome: Result<T, Problem>) -> Answer<T> {
    entry.end(outcome.as_ref().err().map_or(Code::Ok, Problem::code));
    answer(outcome)
}

fn answer<T>(outcome: Result<T, Problem>) -> Answer<T> {
    outcome.map(Response::new).map_err(Problem::for_guest)
}

/// Converts a size to the type that CSI uses.
fn bytes(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

fn nodes(volume: &volumes::Volume) -> Vec<String> {
    let sharers = volume.sharers.iter().flatten().map(|sharer| sharer.node.clone());
    volume.published.iter().map(|published| published.node.clone()).chain(sharers).collect()
}

/// Returns the publish context, by which the agent finds the volume that its node was given.
fn context(given: Given) -> Vec<(String, String)> {
    let pairs = match given {
        Given::Disk(Plugged { disk, bus }) => {
            let bus = match bus {
                Bus::Scsi => "scsi",
                Bus::VirtioBlk => "virtio",
            };
            vec![(SERIAL, disk.text().to_owned()), (BUS, bus.to_owned())]
        }
        Given::Share(Export { server, path, options }) => {
            vec![(NFS_SERVER, server), (NFS_PATH, path), (NFS_OPTIONS, options)]
        }
    };
    pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn condition(problem: Option<String>) -> csi::VolumeCondition {
    let abnormal = problem.is_some();
    csi::VolumeCondition { abnormal, message: problem.unwrap_or_else(|| "all is well".to_owned()) }
}

#[tonic::async_trait]
impl Controller for Service {
    async fn controller_get_capabilities(
        &self,
        _: Request<csi::ControllerGetCapabilitiesRequest>,
    ) -> Answer<csi::ControllerGetCapabilitiesResponse> {
        use capability::rpc::Type;
        let capabilities = [
            Type::CreateDeleteVolume,
            Type::PublishUnpublishVolume,
            Type::PublishReadonly,
            Type::ListVolumes,
            Type::ListVolumesPublishedNodes,
            Type::GetCapacity,
            Type::ExpandVolume,
            Type::GetVolume,
            Type::VolumeCondition,
            Type::SingleNodeMultiWriter,
        ];
        let capability = |one: Type| csi::ControllerServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: one.into() })),
        };
        let capabilities = capabilities.into_iter().map(capability).collect();
        Ok(Response::new(csi::ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn create_volume(
        &self,
        request: Request<csi::CreateVolumeRequest>,
    ) -> Answer<csi::CreateVolumeResponse> {
        let (asker, entry, request) =
            self.begin(request, &verb::VOLUMES_CREATE, |asked| ("", &asked.name))?;
        let wanted = self.wanted(request);
        let created = async {
            let (wanted, places) = wanted?;
            let made = self.keeper.create(&asker, &self.guest.vm.cluster, wanted).await?;
            Ok(csi::Volume { accessible_topology: places, ..self.volume(&made) })
        };
        ended(entry, created.await.map(|made| csi::CreateVolumeResponse { volume: Some(made) }))
    }

    async fn delete_volume(
        &self,
        request: Request<csi::DeleteVolumeRequest>,
    ) -> Answer<csi::DeleteVolumeResponse> {
        let (asker, entry, request) =
            self.begin(request, &verb::VOLUMES_RM, |asked| ("", &asked.volume_id))?;
        let id = self.id(&request.volume_id);
        drop(request);
        let deleted = async { self.keeper.remove(&asker, &id?).await };
        ended(entry, deleted.await.map(|()| csi::DeleteVolumeResponse {}))
    }

    async fn controller_publish_volume(
        &self,
        request: Request<csi::ControllerPublishVolumeRequest>,
    ) -> Answer<csi::ControllerPublishVolumeResponse> {
        if request.get_ref().volume_context.contains_key(WHERE) {
            return self.find_share(request).await;
        }
        let (asker, entry, request) =
            self.begin(request, &verb::VOLUMES_ATTACH, |asked| (&asked.node_id, &asked.volume_id))?;
        let publication = self.publication(request);
        let published = async {
            let Publication { id, node, capability, read_only } = publication?;
            check::fits(&self.keeper.get(&asker, &id).await?, &capability)?;
            self.keeper.publish(&asker, &id, &node, read_only).await
        };
        let answer = |given| csi::ControllerPublishVolumeResponse {
            publish_context: context(given).into_iter().collect(),
        };
        ended(entry, published.await.map(answer))
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<csi::ControllerUnpublishVolumeRequest>,
    ) -> Answer<csi::ControllerUnpublishVolumeResponse> {
        let (asker, entry, request) =
            self.begin(request, &verb::VOLUMES_DETACH, |asked| (&asked.node_id, &asked.volume_id))?;
        let id = self.id(&request.volume_id);
        let node = Some(request.node_id.clone()).filter(|node| !node.is_empty());
        drop(request);
        let unpublished = async {
            let id = id?;
            if let Some(node) = &node {
                check::node_id(node)?;
            }
            self.keeper.unpublish(&asker, &id, node.as_deref(), false).await
        };
        ended(entry, unpublished.await.map(|()| csi::ControllerUnpublishVolumeResponse {}))
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<csi::ValidateVolumeCapabilitiesRequest>,
    ) -> Answer<csi::ValidateVolumeCapabilitiesResponse> {
        use csi::validate_volume_capabilities_response::Confirmed;
        let (asker, mut request) = self.admit(request)?;
        // The request is kept, since most of it is returned in the answer, but the secrets are not.
        request.secrets = HashMap::new();
        let validated = async {
            let id = self.id(&request.volume_id)?;
            check::present(&request.volume_capabilities)?;
            let maps = [&request.volume_context, &request.parameters, &request.mutable_parameters];
            maps.into_iter().try_for_each(check::is_small)?;
            let volume = self.keeper.get(&asker, &id).await?;
            check::capabilities(&request.volume_capabilities)?;
            request.volume_capabilities.iter().try_for_each(|one| check::fits(&volume, one))?;
            check::without("mutable_parameters", !request.mutable_parameters.is_empty())?;
            check::parameters(&request.parameters).map(drop)
        };
        // CSI wants unsupported capabilities reported in the answer, not as an error.
        match validated.await {
            Err(problem)
                if problem.kind == Kind::Invalid
                    && !request.volume_id.is_empty()
                    && !request.volume_capabilities.is_empty() =>
            {
                let message = problem.to_string();
                Ok(Response::new(csi::ValidateVolumeCapabilitiesResponse { confirmed: None, message }))
            }
            outcome => answer(outcome.map(|()| {
                let confirmed = Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                };
                csi::ValidateVolumeCapabilitiesResponse { confirmed: Some(confirmed), message: String::new() }
            })),
        }
    }

    async fn list_volumes(
        &self,
        request: Request<csi::ListVolumesRequest>,
    ) -> Answer<csi::ListVolumesResponse> {
        use csi::list_volumes_response::{Entry, VolumeStatus};
        let (asker, request) = self.admit(request)?;
        let listed = async {
            let most = usize::try_from(request.max_entries)
                .map_err(|_| Problem::new(Kind::Invalid, "max_entries is negative"))?;
            let (volumes, next_token) = self.keeper.list(&asker, &request.starting_token, most).await?;
            let mut entries = Vec::with_capacity(volumes.len());
            for one in volumes {
                let volume_condition = Some(condition(self.keeper.problem(&one).await));
                let status = VolumeStatus { published_node_ids: nodes(&one), volume_condition };
                entries.push(Entry { status: Some(status), volume: Some(self.volume(&one)) });
            }
            Ok(csi::ListVolumesResponse { entries, next_token })
        };
        answer(listed.await)
    }

    async fn get_capacity(
        &self,
        request: Request<csi::GetCapacityRequest>,
    ) -> Answer<csi::GetCapacityResponse> {
        let (asker, request) = self.admit(request)?;
        let parameters = check::parameters(&request.parameters);
        let can_be = request.volume_capabilities.is_empty() || self.may_be(&request.volume_capabilities);
        // A provisioner that knows no topology sends one without segments.
        let place = request.accessible_topology.as_ref().filter(|place| !place.segments.is_empty());
        let is_here = match place {
            Some(place) if self.keeper.are_of_one_host() => {
                self.host().map(|host| check::is_here(place, &host))
            }
            _ => Ok(true),
        };
        drop(request);
        let capacity = async {
            let Parameters { class, .. } = parameters?;
            if !can_be || !is_here? {
                return Ok(csi::GetCapacityResponse::default());
            }
            let found = self.keeper.capacity(&asker, &self.guest.vm.cluster, class.as_deref()).await?;
            Ok(csi::GetCapacityResponse {
                available_capacity: bytes(found.free),
                maximum_volume_size: Some(bytes(found.largest)),
                minimum_volume_size: Some(bytes(SMALLEST)),
            })
        };
        answer(capacity.await)
    }

    async fn controller_expand_volume(
        &self,
        request: Request<csi::ControllerExpandVolumeRequest>,
    ) -> Answer<csi::ControllerExpandVolumeResponse> {
        let (asker, entry, request) =
            self.begin(request, &verb::VOLUMES_EXPAND, |asked| ("", &asked.volume_id))?;
        let growth = self.growth(&request);
        drop(request);
        let expanded = async {
            let (id, range, is_block) = growth?;
            let is_share = self.keeper.get(&asker, &id).await?.sharers.is_some();
            let size = self.keeper.expand(&asker, &id, range).await?;
            Ok(csi::ControllerExpandVolumeResponse {
                capacity_bytes: bytes(size),
                node_expansion_required: !is_block && !is_share,
            })
        };
        ended(entry, expanded.await)
    }

    async fn controller_get_volume(
        &self,
        request: Request<csi::ControllerGetVolumeRequest>,
    ) -> Answer<csi::ControllerGetVolumeResponse> {
        use csi::controller_get_volume_response::VolumeStatus;
        let (asker, request) = self.admit(request)?;
        let id = self.id(&request.volume_id);
        drop(request);
        let found = async {
            let one = self.keeper.get(&asker, &id?).await?;
            let volume_condition = Some(condition(self.keeper.problem(&one).await));
            let status = VolumeStatus { published_node_ids: nodes(&one), volume_condition };
            Ok(csi::ControllerGetVolumeResponse { status: Some(status), volume: Some(self.volume(&one)) })
        };
        answer(found.await)
    }
}
