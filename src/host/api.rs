//! `guestlet.v1.Admin` for `guestctl`, on a unix socket that only its owner can open.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream, StreamExt as _};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::backends::disks::Disks;
use super::clients::Clients;
use super::disks;
use super::fleet::{Handle, Reach, Stopped, Watched};
use super::half::Half;
use super::ping;
use super::place::Topology;
use super::settings::Standing;
use super::trust::{Trust, people};
use super::volumes::Keeper;
use crate::transport::http2;
use crate::transport::unix::Listener;
use crate::wire::proto::v1::admin_server::{Admin, AdminServer};
use crate::wire::proto::v1::{
    AcceptKeyRequest, AttachDiskRequest, AttachVolumeRequest, AttachedDisk, CreateVolumeRequest,
    DetachDiskRequest, DetachDiskResponse, DetachVolumeRequest, ExpandVolumeRequest, ForgetKeyRequest,
    ForgetKeyResponse, GetHostStatusRequest, GetTrustBootstrapRequest, GetVirtualMachineRequest, GuestKey,
    HostStatus, ListAttachedDisksRequest, ListAttachedDisksResponse, ListDiskVolumesRequest,
    ListDiskVolumesResponse, ListKeysRequest, ListKeysResponse, ListVirtualMachineDisksRequest,
    ListVirtualMachineDisksResponse, ListVirtualMachinesRequest, ListVirtualMachinesResponse,
    ListVolumesRequest, ListVolumesResponse, PingVirtualMachineRequest, Pong, RemoveDiskVolumeRequest,
    RemoveDiskVolumeResponse, RemoveVolumeRequest, RemoveVolumeResponse, ResizeDiskRequest,
    RotateGuestKeyRequest, TrustBootstrap, VirtualMachine, VirtualMachineEvent, Volume,
    WatchVirtualMachinesRequest,
};

/// Connections at a time; a further one is closed at once.
const MAX_CLIENTS: u32 = 64;
/// Bytes of one request.
const MAX_REQUEST: usize = 8 * 1024;

/// Serves `socket` until `shutdown`, and then closes every connection within moments. Removes the socket.
pub async fn run(socket: Listener, api: Api, shutdown: CancellationToken) {
    let service = AdminServer::new(api).max_decoding_message_size(MAX_REQUEST);
    let clients = Clients::new("API", MAX_CLIENTS);
    loop {
        let accepted = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = socket.accept() => accepted,
        };
        let (service, shutdown) = (service.clone(), shutdown.clone());
        let serve = |stream| async move {
            if let Err(error) = http2::serve(stream, service, shutdown).await {
                tracing::debug!(%error, "a client's connection broke");
            }
        };
        clients.take(accepted, serve).await;
    }
    // The connections end by themselves; the socket must not promise anything meanwhile.
    drop(socket);
    clients.ended().await;
}

/// What answers.
#[derive(Debug, Clone)]
pub struct Api {
    /// Knows the VMs.
    pub fleet: Handle,
    /// Plugs disks into them.
    pub disks: Arc<dyn Disks>,
    /// Keeps their volumes.
    pub volumes: Keeper,
    /// The keys of guests.
    pub trust: Arc<Trust>,
    /// This run.
    pub half: Arc<Half>,
    /// Where this host is.
    pub topology: watch::Receiver<Arc<Topology>>,
    /// How the settings are.
    pub settings: watch::Receiver<Standing>,
}

impl From<Stopped> for Status {
    fn from(stopped: Stopped) -> Self {
        Self::unavailable(stopped.to_string())
    }
}

fn unknown() -> Status {
    Status::not_found("no VM of this name is known")
}

#[tonic::async_trait]
impl Admin for Api {
    async fn list_virtual_machines(
        &self,
        request: Request<ListVirtualMachinesRequest>,
    ) -> Result<Response<ListVirtualMachinesResponse>, Status> {
        let with_state = request.into_inner().with_state;
        let known = self.fleet.list().await?;
        let virtual_machines = known.into_iter().map(|known| known.told(with_state)).collect();
        Ok(Response::new(ListVirtualMachinesResponse { virtual_machines }))
    }

    async fn get_virtual_machine(
        &self,
        request: Request<GetVirtualMachineRequest>,
    ) -> Result<Response<VirtualMachine>, Status> {
        let found = self.fleet.get(request.into_inner().name).await?;
        Ok(Response::new(found.ok_or_else(unknown)?.told(true)))
    }

    type WatchVirtualMachinesStream = Pin<Box<dyn Stream<Item = Result<VirtualMachineEvent, Status>> + Send>>;

    async fn watch_virtual_machines(
        &self,
        request: Request<WatchVirtualMachinesRequest>,
    ) -> Result<Response<Self::WatchVirtualMachinesStream>, Status> {
        let WatchVirtualMachinesRequest { name, since } = request.into_inner();
        let name = Some(name).filter(|name| !name.is_empty());
        let Watched { past, coming } = self.fleet.watch(name.clone(), since).await?.ok_or_else(unknown)?;
        let past = tokio_stream::iter(past).map(|event| Ok(VirtualMachineEvent::clone(&event)));
        let coming = BroadcastStream::new(coming).filter_map(move |event| match event {
            Ok(event) if name.as_ref().is_some_and(|name| *name != event.name) => None,
            Ok(event) => Some(Ok(VirtualMachineEvent::clone(&event))),
            Err(_) => Some(Err(Status::data_loss("events were lost: they came faster than they were read"))),
        });
        Ok(Response::new(Box::pin(past.chain(coming))))
    }

    type PingVirtualMachineStream = Pin<Box<dyn Stream<Item = Result<Pong, Status>> + Send>>;

    async fn ping_virtual_machine(
        &self,
        request: Request<PingVirtualMachineRequest>,
    ) -> Result<Response<Self::PingVirtualMachineStream>, Status> {
        let request = request.into_inner();
        let plan = ping::Plan::of(&request)?;
        let caller = match self.fleet.caller(request.name).await?.ok_or_else(unknown)? {
            Reach::Session { caller, .. } => *caller,
            Reach::Paused => {
                return Err(Status::failed_precondition("the VM is paused: its guest cannot answer"));
            }
            Reach::NoSession => {
                return Err(Status::failed_precondition("there is no session with this guest now"));
            }
        };
        Ok(Response::new(Box::pin(ping::pongs(caller, plan).map(Ok))))
    }

    async fn list_disks(
        &self,
        request: Request<ListVirtualMachineDisksRequest>,
    ) -> Result<Response<ListVirtualMachineDisksResponse>, Status> {
        let vm = self.fleet.get(request.into_inner().name).await?.ok_or_else(unknown)?;
        let (session, last_heard) = (vm.view.session, vm.view.last_heard);
        let state = vm.state.as_ref().ok_or_else(|| {
            Status::failed_precondition(
                "this guest has not told yet which disks it has: there was no session",
            )
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
        _: Request<GetHostStatusRequest>,
    ) -> Result<Response<HostStatus>, Status> {
        let tally = self.fleet.tally().await?;
        let settings = self.settings.borrow().clone();
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
        }))
    }

    async fn attach_disk(
        &self,
        request: Request<AttachDiskRequest>,
    ) -> Result<Response<AttachedDisk>, Status> {
        disks::attach(&*self.disks, &self.fleet, request.into_inner()).await.map(Response::new)
    }

    async fn detach_disk(
        &self,
        request: Request<DetachDiskRequest>,
    ) -> Result<Response<DetachDiskResponse>, Status> {
        disks::detach(&*self.disks, &self.fleet, request.into_inner()).await.map(Response::new)
    }

    async fn resize_disk(
        &self,
        request: Request<ResizeDiskRequest>,
    ) -> Result<Response<AttachedDisk>, Status> {
        disks::resize(&*self.disks, request.into_inner()).await.map(Response::new)
    }

    async fn list_disk_volumes(
        &self,
        request: Request<ListDiskVolumesRequest>,
    ) -> Result<Response<ListDiskVolumesResponse>, Status> {
        disks::volumes(&*self.disks, request.into_inner()).await.map(Response::new)
    }

    async fn remove_disk_volume(
        &self,
        request: Request<RemoveDiskVolumeRequest>,
    ) -> Result<Response<RemoveDiskVolumeResponse>, Status> {
        disks::remove_volume(&*self.disks, request.into_inner()).await.map(Response::new)
    }

    async fn list_attached_disks(
        &self,
        request: Request<ListAttachedDisksRequest>,
    ) -> Result<Response<ListAttachedDisksResponse>, Status> {
        disks::list(&*self.disks, request.into_inner()).await.map(Response::new)
    }

    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> Result<Response<ListVolumesResponse>, Status> {
        self.volumes.list_for_people(request.into_inner()).await.map(Response::new)
    }

    async fn create_volume(&self, request: Request<CreateVolumeRequest>) -> Result<Response<Volume>, Status> {
        self.volumes.create_for_people(request.into_inner()).await.map(Response::new)
    }

    async fn attach_volume(&self, request: Request<AttachVolumeRequest>) -> Result<Response<Volume>, Status> {
        self.volumes.attach_for_people(request.into_inner()).await.map(Response::new)
    }

    async fn detach_volume(&self, request: Request<DetachVolumeRequest>) -> Result<Response<Volume>, Status> {
        self.volumes.detach_for_people(request.into_inner()).await.map(Response::new)
    }

    async fn expand_volume(&self, request: Request<ExpandVolumeRequest>) -> Result<Response<Volume>, Status> {
        self.volumes.expand_for_people(request.into_inner()).await.map(Response::new)
    }

    async fn list_keys(
        &self,
        request: Request<ListKeysRequest>,
    ) -> Result<Response<ListKeysResponse>, Status> {
        people::list(&self.trust, &self.fleet, request.into_inner()).await.map(Response::new)
    }

    async fn accept_key(&self, request: Request<AcceptKeyRequest>) -> Result<Response<GuestKey>, Status> {
        people::accept(&self.trust, &self.fleet, request.into_inner()).await.map(Response::new)
    }

    async fn forget_key(
        &self,
        request: Request<ForgetKeyRequest>,
    ) -> Result<Response<ForgetKeyResponse>, Status> {
        people::forget(&self.trust, &self.fleet, request.into_inner()).await.map(Response::new)
    }

    async fn rotate_guest_key(
        &self,
        request: Request<RotateGuestKeyRequest>,
    ) -> Result<Response<GuestKey>, Status> {
        people::rotate(&self.trust, &self.fleet, request.into_inner()).await.map(Response::new)
    }

    async fn get_trust_bootstrap(
        &self,
        request: Request<GetTrustBootstrapRequest>,
    ) -> Result<Response<TrustBootstrap>, Status> {
        let host_name = &self.half.host.host_name;
        people::bootstrap(&self.trust, &self.fleet, host_name, request.into_inner()).await.map(Response::new)
    }

    async fn remove_volume(
        &self,
        request: Request<RemoveVolumeRequest>,
    ) -> Result<Response<RemoveVolumeResponse>, Status> {
        self.volumes.remove_for_people(request.into_inner()).await.map(Response::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::backends::{Change, Kind, Vm};
    use crate::host::fleet::Fleet;
    use crate::host::volumes::policy::Policies;
    use crate::wire::proto::v1::PowerState;

    #[tokio::test]
    async fn a_watcher_that_is_too_slow_is_told_so() {
        let half = Arc::new(Half::new("host".into()));
        let (fleet, changes, handle) = Fleet::new(Arc::clone(&half));
        let shutdown = CancellationToken::new();
        let watching = async {
            changes.send(Change::Present(Vm::at("a", "/nowhere/a"))).await.unwrap();
            changes.send(Change::Synced).await.unwrap();
            let (_standing, settings) = watch::channel(Standing::new("/nowhere".into()));
            let (machines, pools) = (watch::channel(Vec::new()).1, watch::channel(Vec::new()).1);
            let topology = watch::channel(Arc::default()).1;
            let place = topology.clone();
            let built = Kind::Qemu { machines, topology, volumes: "/nowhere".into(), pools }.build(&half);
            let policies = watch::channel(Policies::new()).1;
            let volumes = Keeper::new(built.volumes, handle.clone(), policies, Arc::clone(&half));
            let (fleet, disks) = (handle.clone(), built.disks);
            let trust = Arc::new(Trust::for_tests());
            let api = Api { fleet, disks, volumes, trust, half, topology: place, settings };
            let request = WatchVirtualMachinesRequest::default();
            let mut events = api.watch_virtual_machines(Request::new(request)).await.unwrap().into_inner();
            for power in [PowerState::Paused, PowerState::Running].into_iter().cycle().take(2000) {
                let change = Change::Power { name: "a".into(), power, problem: String::new() };
                changes.send(change).await.unwrap();
            }
            // All of them are through when the changes' inbox has been emptied.
            while changes.capacity() < changes.max_capacity() {
                tokio::task::yield_now().await;
            }
            let lost = events.next().await.unwrap().unwrap_err();
            assert_eq!(lost.code(), tonic::Code::DataLoss);
            shutdown.cancel();
        };
        tokio::join!(fleet.run(shutdown.clone()), watching);
    }
}
