//! `guestlet.v1.Admin` for `guestctl`, on a unix socket that is open to its owner alone, or to everybody once
//! there are access rules ([`super::admission`]). `serve` owns the socket and its connections. Each method begins
//! with `admit`, which is the only way to the content of its request.

mod serve;
mod services;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};

use super::admission::{Admission, Call, Sight};
use super::backends::qemu::Machine;
use super::backends::{self, disks::Disks};
use super::calls::Calls;
use super::cloud;
use super::console;
use super::disks;
use super::fleet::{Handle, Identity, Reach, Stopped, Watched};
use super::half::Half;
use super::keys;
use super::machine::Desks;
use super::metrics::Tally;
use super::ping;
use super::place::Topology;
use super::settings::Standing;
use super::trust::Trust;
use super::volumes::Keeper;
use crate::wire::proto::v1::admin_server::Admin;
use crate::wire::proto::v1::{
    AcceptKeyRequest, AttachDiskRequest, AttachVolumeRequest, AttachedDisk, CreateVolumeRequest,
    DetachDiskRequest, DetachDiskResponse, DetachVolumeRequest, ExpandVolumeRequest, ForgetKeyRequest,
    ForgetKeyResponse, GetHostStatusRequest, GetTrustBootstrapRequest, GetVirtualMachineRequest, GuestKey,
    HostStatus, ListAddressPoolsRequest, ListAddressPoolsResponse, ListAttachedDisksRequest,
    ListAttachedDisksResponse, ListClusterLoadBalancersRequest, ListClusterLoadBalancersResponse,
    ListDiskVolumesRequest, ListDiskVolumesResponse, ListKeysRequest, ListKeysResponse,
    ListVirtualMachineDisksRequest, ListVirtualMachineDisksResponse, ListVirtualMachinesRequest,
    ListVirtualMachinesResponse, ListVolumesRequest, ListVolumesResponse, PingVirtualMachineRequest, Pong,
    RemoveClusterLoadBalancerRequest, RemoveClusterLoadBalancerResponse, RemoveDiskVolumeRequest,
    RemoveDiskVolumeResponse, RemoveVolumeRequest, RemoveVolumeResponse, ResizeDiskRequest,
    RotateGuestKeyRequest, RotateHostKeyRequest, RotateHostKeyResponse, SessionState, TrustBootstrap,
    VirtualMachine, VirtualMachineEvent, Volume, WatchVirtualMachinesRequest,
};

pub use serve::run;

/// Timeout of the fleet for counting the VMs.
const TO_COUNT: Duration = Duration::from_secs(1);

/// Implementation of the admin API.
#[derive(Debug, Clone)]
pub struct Api {
    /// Admission check of all calls.
    pub admission: Admission,
    /// Fleet, which knows the VMs.
    pub fleet: Handle,
    /// Disks of VMs, which can be attached and detached.
    pub disks: Arc<dyn Disks>,
    /// Keeper of the volumes of VMs.
    pub volumes: Keeper,
    /// Keys of guests, and of this host half.
    pub trust: Arc<Trust>,
    /// State of this run of the host half.
    pub half: Arc<Half>,
    /// Topology of this host.
    pub topology: watch::Receiver<Arc<Topology>>,
    /// State of the settings: their file, their age, and any problem with them.
    pub settings: watch::Receiver<Standing>,
    /// State of the backend, with its problems.
    pub backend: backends::Standing,
    /// Limits on the concurrent calls to each guest.
    pub desks: Desks,
    /// The consoles of VMs.
    pub consoles: console::Desk,
    /// Load balancers; `None` where this host half has none.
    pub cloud: Option<cloud::Handle>,
    /// All VMs that the settings list; `None` where the settings do not list VMs.
    pub listed: Option<watch::Receiver<Vec<Machine>>>,
}

impl From<Stopped> for Status {
    fn from(stopped: Stopped) -> Self {
        Self::unavailable(stopped.to_string())
    }
}

fn unknown() -> Status {
    Status::not_found("there is no such VM")
}

/// Stream of VM events for one watcher.
type Events = Pin<Box<dyn Stream<Item = Result<VirtualMachineEvent, Status>> + Send>>;

/// The clusters of VMs, by the VMs' names.
type Clusters = BTreeMap<String, String>;

fn cluster<'c>(clusters: &'c Clusters, vm: &str) -> &'c str {
    clusters.get(vm).map_or("", String::as_str)
}

impl Api {
    /// Returns the agent to ping and the plan of the pings.
    async fn calls(
        &self,
        request: PingVirtualMachineRequest,
        call: &Call,
    ) -> Result<(Calls, ping::Plan), Status> {
        let plan = ping::Plan::of(&request)?;
        match self.fleet.caller(request.name).await?.ok_or_else(unknown)? {
            Reach::Session { agent, .. } => Ok((agent.on_behalf_of(call.behalf.clone()), plan)),
            Reach::Paused => Err(Status::failed_precondition("the VM is paused: its guest cannot answer")),
            Reach::Untold => Err(Status::unavailable("the node of this guest cannot be reached now")),
            Reach::NoSession => Err(Status::failed_precondition("there is no session with this guest now")),
        }
    }

    /// Returns the handle of the load balancers, or `UNIMPLEMENTED` if this host half has none.
    fn cloud(&self) -> Result<&cloud::Handle, Status> {
        self.cloud.as_ref().ok_or_else(|| Status::unimplemented("this guestlet-host has no load balancers"))
    }

    async fn clusters(&self) -> Result<Clusters, Stopped> {
        let machines = self.fleet.machines().await?;
        Ok(machines.into_iter().map(|one| (one.vm.name.clone(), one.vm.cluster.clone())).collect())
    }

    /// Counts the VMs and sessions that this caller may see.
    async fn tally(&self, sight: &Sight) -> Result<Tally, Stopped> {
        if sight.is_full() {
            return self.fleet.tally().await;
        }
        let known = self.fleet.list().await?;
        let seen: Vec<_> = known.iter().filter(|one| sight.has(&one.view.name, &one.view.cluster)).collect();
        let count = |state| seen.iter().filter(|one| one.view.session() == state).count();
        let (connected, no_vsock) = (count(SessionState::Connected), count(SessionState::NoVsock));
        Ok(Tally { vms: seen.len(), connected, no_vsock, ..Tally::default() })
    }

    /// Filters `events` for those of VMs that the caller may see. For a VM that no longer exists, its last known
    /// cluster is used.
    async fn in_sight(
        &self,
        sight: Sight,
        events: impl Stream<Item = Result<VirtualMachineEvent, Status>> + Send + 'static,
    ) -> Result<Events, Stopped> {
        let clusters = Arc::new(Mutex::new(self.clusters().await?));
        let fleet = self.fleet.clone();
        let seen = futures_util::StreamExt::filter_map(events, move |event| {
            let (sight, fleet, clusters) = (sight.clone(), fleet.clone(), Arc::clone(&clusters));
            async move {
                let Ok(event) = event else { return Some(event) };
                let found = fleet.find(Identity::Name(event.name.clone())).await.ok().flatten();
                let mut clusters = clusters.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(found) = found {
                    clusters.insert(event.name.clone(), found.vm.cluster.clone());
                }
                sight.has(&event.name, cluster(&clusters, &event.name)).then_some(Ok(event))
            }
        });
        Ok(Box::pin(seen))
    }
}

#[tonic::async_trait]
impl Admin for Api {
    async fn list_virtual_machines(
        &self,
        request: Request<ListVirtualMachinesRequest>,
    ) -> Result<Response<ListVirtualMachinesResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let mut known = self.fleet.list().await?;
        known.retain(|known| call.sight.has(&known.view.name, &known.view.cluster));
        let virtual_machines = known.into_iter().map(|known| {
            let recent = asked.with_recent.then(|| self.half.recent.of(&known.view.name)).flatten();
            VirtualMachine { recent, ..known.told(asked.with_state) }
        });
        let virtual_machines = virtual_machines.collect();
        Ok(Response::new(ListVirtualMachinesResponse { virtual_machines }))
    }

    async fn get_virtual_machine(
        &self,
        request: Request<GetVirtualMachineRequest>,
    ) -> Result<Response<VirtualMachine>, Status> {
        let (_, asked) = self.admission.admit(request).await?;
        let found = self.fleet.get(asked.name).await?;
        let vm = found.ok_or_else(unknown)?.told(true);
        Ok(Response::new(VirtualMachine { recent: self.half.recent.of(&vm.name), ..vm }))
    }

    type WatchVirtualMachinesStream = Events;

    async fn watch_virtual_machines(
        &self,
        request: Request<WatchVirtualMachinesRequest>,
    ) -> Result<Response<Self::WatchVirtualMachinesStream>, Status> {
        let (call, WatchVirtualMachinesRequest { name, since }) = self.admission.admit(request).await?;
        let name = Some(name).filter(|name| !name.is_empty());
        let Watched { past, coming } = self.fleet.watch(name.clone(), since).await?.ok_or_else(unknown)?;
        let past = tokio_stream::iter(past).map(|event| Ok(VirtualMachineEvent::clone(&event)));
        let coming = BroadcastStream::new(coming).filter_map(move |event| match event {
            Ok(event) if name.as_ref().is_some_and(|name| *name != event.name) => None,
            Ok(event) => Some(Ok(VirtualMachineEvent::clone(&event))),
            Err(_) => Some(Err(Status::data_loss("events were lost: they came faster than they were read"))),
        });
        let events = past.chain(coming);
        if call.sight.is_full() {
            return Ok(Response::new(Box::pin(events)));
        }
        Ok(Response::new(self.in_sight(call.sight, events).await?))
    }

    type PingVirtualMachineStream = Pin<Box<dyn Stream<Item = Result<Pong, Status>> + Send>>;

    async fn ping_virtual_machine(
        &self,
        request: Request<PingVirtualMachineRequest>,
    ) -> Result<Response<Self::PingVirtualMachineStream>, Status> {
        let (mut call, request) = self.admission.admit(request).await?;
        match self.calls(request, &call).await {
            Ok((calls, plan)) => {
                let pongs = ping::pongs(calls, plan, call.entry.take());
                Ok(Response::new(Box::pin(pongs.map(Ok))))
            }
            Err(status) => call.end(Err(status)),
        }
    }

    async fn list_disks(
        &self,
        request: Request<ListVirtualMachineDisksRequest>,
    ) -> Result<Response<ListVirtualMachineDisksResponse>, Status> {
        let (_, asked) = self.admission.admit(request).await?;
        let vm = self.fleet.get(asked.name).await?.ok_or_else(unknown)?;
        let (session, last_heard) = (vm.view.session, vm.view.last_heard);
        let state = vm.state.as_ref().ok_or_else(|| {
            Status::failed_precondition("this guest has not yet reported its disks: there was no session")
        })?;
        Ok(Response::new(ListVirtualMachineDisksResponse {
            disks: state.disks.clone(),
            file_systems: state.file_systems.clone(),
            last_heard,
            session,
        }))
    }

    async fn get_host_status(
        &self,
        request: Request<GetHostStatusRequest>,
    ) -> Result<Response<HostStatus>, Status> {
        let (call, _) = self.admission.admit(request).await?;
        let problems = self.backend.problems.borrow().clone().into_iter();
        let tally = match tokio::time::timeout(TO_COUNT, self.tally(&call.sight)).await {
            Ok(tally) => tally?,
            // The fleet does not answer before the backend has reported all VMs once.
            Err(_) => Tally::default(),
        };
        let mut settings = self.settings.borrow().clone();
        if !call.sight.is_full() {
            // The text of the problem may name objects that the caller must not see.
            settings.problem = settings.problem.map(|_| "as root, guestctl doctor shows why".to_owned());
        }
        let count = |count| u32::try_from(count).unwrap_or(u32::MAX);
        Ok(Response::new(HostStatus {
            version: crate::VERSION.to_owned(),
            host: Some(self.half.host.clone()),
            started: Some(self.half.started.into()),
            settings_file: settings.file.display().to_string(),
            settings_since: Some(settings.since.into()),
            settings_problem: settings.problem.unwrap_or_default(),
            virtual_machines: count(tally.vms),
            connected: count(tally.connected),
            topology: Some(Topology::clone(&self.topology.borrow())),
            backend_problems: problems.map(|(what, why)| format!("{what}: {why}")).collect(),
            node: self.backend.node.clone(),
            without_vsock: count(tally.no_vsock),
            advice: self.backend.advice.borrow().clone(),
            audit_file: self.half.audit.file().map(|file| file.display().to_string()).unwrap_or_default(),
        }))
    }

    async fn attach_disk(
        &self,
        request: Request<AttachDiskRequest>,
    ) -> Result<Response<AttachedDisk>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = disks::attach(&*self.disks, &self.fleet, &call.behalf, asked).await;
        call.end(done)
    }

    async fn detach_disk(
        &self,
        request: Request<DetachDiskRequest>,
    ) -> Result<Response<DetachDiskResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = disks::detach(&*self.disks, &self.fleet, &call.behalf, asked).await;
        call.end(done)
    }

    async fn resize_disk(
        &self,
        request: Request<ResizeDiskRequest>,
    ) -> Result<Response<AttachedDisk>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = disks::resize(&*self.disks, asked).await;
        call.end(done)
    }

    async fn list_disk_volumes(
        &self,
        request: Request<ListDiskVolumesRequest>,
    ) -> Result<Response<ListDiskVolumesResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let mut answer = disks::volumes(&*self.disks, asked).await?;
        if !call.sight.is_full() {
            let clusters = self.clusters().await?;
            answer.volumes.retain(|one| call.sight.has(&one.name, cluster(&clusters, &one.name)));
        }
        Ok(Response::new(answer))
    }

    async fn remove_disk_volume(
        &self,
        request: Request<RemoveDiskVolumeRequest>,
    ) -> Result<Response<RemoveDiskVolumeResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = disks::remove_volume(&*self.disks, asked).await;
        call.end(done)
    }

    async fn list_attached_disks(
        &self,
        request: Request<ListAttachedDisksRequest>,
    ) -> Result<Response<ListAttachedDisksResponse>, Status> {
        let (_, asked) = self.admission.admit(request).await?;
        disks::list(&*self.disks, asked).await.map(Response::new)
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let mut answer = self.volumes.list_for_people(asked).await?;
        answer.volumes.retain(|one| {
            let vm = one.holder.as_ref().map_or("", |holder| &holder.vm);
            call.sight.has(vm, &one.cluster)
        });
        Ok(Response::new(answer))
    }

    async fn create_volume(&self, request: Request<CreateVolumeRequest>) -> Result<Response<Volume>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = self.volumes.create_for_people(call.behalf.clone(), asked).await;
        call.end(done)
    }

    async fn attach_volume(&self, request: Request<AttachVolumeRequest>) -> Result<Response<Volume>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = self.volumes.attach_for_people(call.behalf.clone(), asked).await;
        call.end(done)
    }

    async fn detach_volume(&self, request: Request<DetachVolumeRequest>) -> Result<Response<Volume>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = self.volumes.detach_for_people(call.behalf.clone(), asked).await;
        call.end(done)
    }

    async fn expand_volume(&self, request: Request<ExpandVolumeRequest>) -> Result<Response<Volume>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = self.volumes.expand_for_people(call.behalf.clone(), asked).await;
        call.end(done)
    }

    async fn list_cluster_load_balancers(
        &self,
        request: Request<ListClusterLoadBalancersRequest>,
    ) -> Result<Response<ListClusterLoadBalancersResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let mut answer = cloud::people::list(self.cloud()?, asked).await?;
        answer.load_balancers.retain(|one| call.sight.has("", &one.cluster));
        Ok(Response::new(answer))
    }

    async fn remove_cluster_load_balancer(
        &self,
        request: Request<RemoveClusterLoadBalancerRequest>,
    ) -> Result<Response<RemoveClusterLoadBalancerResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = match self.cloud() {
            Ok(cloud) => cloud::people::remove(cloud, asked).await,
            Err(status) => Err(status),
        };
        call.end(done)
    }

    async fn list_address_pools(
        &self,
        request: Request<ListAddressPoolsRequest>,
    ) -> Result<Response<ListAddressPoolsResponse>, Status> {
        self.admission.admit(request).await?;
        cloud::people::pools(self.cloud()?).await.map(Response::new)
    }

    async fn list_keys(
        &self,
        request: Request<ListKeysRequest>,
    ) -> Result<Response<ListKeysResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let mut answer = keys::list(&self.trust, &self.fleet, asked).await?;
        if !call.sight.is_full() {
            let clusters = self.clusters().await?;
            answer.guests.retain(|one| call.sight.has(&one.name, cluster(&clusters, &one.name)));
        }
        Ok(Response::new(answer))
    }

    async fn accept_key(&self, request: Request<AcceptKeyRequest>) -> Result<Response<GuestKey>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = keys::accept(&self.trust, &self.fleet, asked).await;
        call.end(done)
    }

    async fn forget_key(
        &self,
        request: Request<ForgetKeyRequest>,
    ) -> Result<Response<ForgetKeyResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = keys::forget(&self.trust, &self.fleet, self.listed.as_ref(), asked).await;
        call.end(done)
    }

    async fn rotate_guest_key(
        &self,
        request: Request<RotateGuestKeyRequest>,
    ) -> Result<Response<GuestKey>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = keys::rotate(&self.trust, &self.fleet, &call.behalf, asked).await;
        call.end(done)
    }

    async fn rotate_host_key(
        &self,
        request: Request<RotateHostKeyRequest>,
    ) -> Result<Response<RotateHostKeyResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = keys::rotate_host(&self.trust, asked).await;
        call.end(done)
    }

    async fn get_trust_bootstrap(
        &self,
        request: Request<GetTrustBootstrapRequest>,
    ) -> Result<Response<TrustBootstrap>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let host_name = &self.half.host.host_name;
        let done = keys::bootstrap(&self.trust, &self.fleet, host_name, asked).await;
        call.end(done)
    }

    async fn remove_volume(
        &self,
        request: Request<RemoveVolumeRequest>,
    ) -> Result<Response<RemoveVolumeResponse>, Status> {
        let (call, asked) = self.admission.admit(request).await?;
        let done = self.volumes.remove_for_people(call.behalf.clone(), asked).await;
        call.end(done)
    }
}

#[cfg(test)]
mod tests;
