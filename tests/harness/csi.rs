//! kubelet and the sidecars of a guest's cluster, played from outside: clients of the agent's CSI sockets, which
//! systemd-socket-proxyd in the guest makes reachable through vsock.
//!
//! As kubelet does, each call has a connection of its own.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use guestlet::transport::http2::{Client, ORIGIN};
use guestlet::wire::proto::csi::controller_client::ControllerClient;
use guestlet::wire::proto::csi::identity_client::IdentityClient;
use guestlet::wire::proto::csi::node_client::NodeClient;
use guestlet::wire::proto::csi::volume_capability::access_mode::Mode;
use guestlet::wire::proto::csi::volume_capability::{AccessMode, AccessType, MountVolume};
use guestlet::wire::proto::csi::volume_usage::Unit;
use guestlet::wire::proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerPublishVolumeRequest,
    ControllerUnpublishVolumeRequest, CreateVolumeRequest, DeleteVolumeRequest, ListVolumesRequest,
    NodeExpandVolumeRequest, NodeGetInfoRequest, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
    ProbeRequest, VolumeCapability,
};
use guestlet::wire::proto::registration::registration_client::RegistrationClient;
use guestlet::wire::proto::registration::{InfoRequest, RegistrationStatus};
use http::Uri;
use tonic::Status;

use super::grpc::{self, Answer};
use super::vm::{SOON, Vm};
use super::wait_for;

/// kubelet's folder in the guest, and the driver's name.
pub const KUBELET: &str = "/var/lib/kubelet";
pub const DRIVER: &str = "driver.harvesterhci.io";

/// A socket of the agent's.
#[derive(Debug, Clone, Copy)]
enum Socket {
    Node = 7001,
    Controller = 7002,
    Registration = 7003,
}

/// The guest's port that leads to the socket of the sidecars.
pub const SIDECARS: u32 = Socket::Controller as u32;

impl Socket {
    fn path(self) -> String {
        match self {
            Self::Node => format!("{KUBELET}/plugins/{DRIVER}/csi.sock"),
            Self::Controller => format!("{KUBELET}/plugins/{DRIVER}/controller/csi.sock"),
            Self::Registration => format!("{KUBELET}/plugins_registry/{DRIVER}-reg.sock"),
        }
    }
}

/// Those of one guest.
#[derive(Debug, Clone, Copy)]
pub struct Csi<'v>(&'v Vm);

impl<'v> Csi<'v> {
    /// Makes the sockets of a real guest reachable, now and after its next boots.
    ///
    /// # Errors
    /// If the guest refuses.
    pub fn of(vm: &'v Vm) -> anyhow::Result<Self> {
        for socket in [Socket::Node, Socket::Controller, Socket::Registration] {
            let (name, port) = (format!("proxy-{socket:?}").to_lowercase(), socket as u32);
            let unit = format!("[Socket]\nListenStream=vsock::{port}\n[Install]\nWantedBy=sockets.target\n");
            vm.write(&format!("/etc/systemd/system/{name}.socket"), unit.as_bytes())?;
            let unit = format!("[Service]\nExecStart=/lib/systemd/systemd-socket-proxyd {}\n", socket.path());
            vm.write(&format!("/etc/systemd/system/{name}.service"), unit.as_bytes())?;
            vm.run(&format!("systemctl enable --now {name}.socket"))?;
        }
        vm.run(&format!("mkdir -p {KUBELET}"))?;
        Ok(Self(vm))
    }

    /// Those of a guest whose sockets [`Csi::of`] has made reachable.
    pub fn reachable(vm: &'v Vm) -> Self {
        Self(vm)
    }

    /// The guest.
    pub fn vm(self) -> &'v Vm {
        self.0
    }

    /// As kubelet gets to know the driver; what the node is called there.
    pub fn register(self) -> anyhow::Result<String> {
        let info = || self.registration(async |mut client| client.get_info(InfoRequest {}).await).ok();
        let told = wait_for("registration", SOON, info)?;
        let endpoint = Socket::Node.path();
        ensure!(told.r#type == "CSIPlugin" && told.name == DRIVER && told.endpoint == endpoint, "{told:?}");
        ensure!(told.supported_versions == ["1.0.0"], "{told:?}");
        let info = self.node(async |mut client| client.node_get_info(NodeGetInfoRequest {}).await)?;
        ensure!(info.max_volumes_per_node > 0 && info.accessible_topology.is_none(), "{info:?}");
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        self.registration(async |mut client| client.notify_registration_status(status).await)?;
        Ok(info.node_id)
    }

    /// Whether the agent says that it can reach the host half.
    pub fn probe(self) -> Result<Option<bool>, Status> {
        let probed = self.identity(async |mut client| client.probe(ProbeRequest {}).await)?;
        Ok(probed.ready)
    }

    pub fn create(self, name: &str, size: i64) -> Result<String, Status> {
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(bytes(size)),
            volume_capabilities: vec![capability()],
            ..CreateVolumeRequest::default()
        };
        let created = self.controller(async |mut client| client.create_volume(request).await)?;
        Ok(created.volume.unwrap_or_default().volume_id)
    }

    pub fn delete(self, id: &str) -> Result<(), Status> {
        let request = DeleteVolumeRequest { volume_id: id.to_owned(), ..DeleteVolumeRequest::default() };
        self.controller(async |mut client| client.delete_volume(request).await).map(drop)
    }

    pub fn attach(self, id: &str, node: &str) -> Result<HashMap<String, String>, Status> {
        let request = ControllerPublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: node.to_owned(),
            volume_capability: Some(capability()),
            ..ControllerPublishVolumeRequest::default()
        };
        let attached = self.controller(async |mut client| client.controller_publish_volume(request).await)?;
        Ok(attached.publish_context)
    }

    pub fn detach(self, id: &str, node: &str) -> Result<(), Status> {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: node.to_owned(),
            ..ControllerUnpublishVolumeRequest::default()
        };
        self.controller(async |mut client| client.controller_unpublish_volume(request).await).map(drop)
    }

    pub fn stage(self, id: &str, context: HashMap<String, String>) -> Result<(), Status> {
        let staging_target_path = staging(id);
        let request = NodeStageVolumeRequest {
            volume_id: id.to_owned(),
            publish_context: context,
            staging_target_path,
            volume_capability: Some(capability()),
            ..NodeStageVolumeRequest::default()
        };
        self.node(async |mut client| client.node_stage_volume(request).await).map(drop)
    }

    pub fn publish(self, id: &str, context: HashMap<String, String>) -> Result<(), Status> {
        let request = NodePublishVolumeRequest {
            volume_id: id.to_owned(),
            publish_context: context,
            staging_target_path: staging(id),
            target_path: target(id),
            volume_capability: Some(capability()),
            ..NodePublishVolumeRequest::default()
        };
        self.node(async |mut client| client.node_publish_volume(request).await).map(drop)
    }

    /// As kubelet has it before it calls.
    pub fn make_folders(self, id: &str) -> anyhow::Result<()> {
        self.0.run(&format!("mkdir -p {} {}", staging(id), pod(id))).map(drop)
    }

    /// Attached, staged and published, as a pod has it; when each was done.
    pub fn use_volume(self, id: &str, node: &str) -> anyhow::Result<[Duration; 3]> {
        self.make_folders(id)?;
        let begun = Instant::now();
        let context = self.attach(id, node)?;
        let attached = begun.elapsed();
        self.stage(id, context.clone())?;
        let staged = begun.elapsed();
        self.publish(id, context)?;
        Ok([attached, staged, begun.elapsed()])
    }

    pub fn unpublish(self, id: &str) -> Result<(), Status> {
        let request = NodeUnpublishVolumeRequest { volume_id: id.to_owned(), target_path: target(id) };
        self.node(async |mut client| client.node_unpublish_volume(request).await).map(drop)
    }

    pub fn unstage(self, id: &str) -> Result<(), Status> {
        let request = NodeUnstageVolumeRequest { volume_id: id.to_owned(), staging_target_path: staging(id) };
        self.node(async |mut client| client.node_unstage_volume(request).await).map(drop)
    }

    fn stats(self, id: &str) -> Result<NodeGetVolumeStatsResponse, Status> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: id.to_owned(),
            volume_path: target(id),
            staging_target_path: staging(id),
        };
        self.node(async |mut client| client.node_get_volume_stats(request).await)
    }

    /// Bytes of the file system of a volume that is well.
    pub fn total(self, id: &str) -> anyhow::Result<i64> {
        let stats = self.stats(id)?;
        ensure!(stats.volume_condition.as_ref().is_some_and(|condition| !condition.abnormal), "{stats:?}");
        let bytes = stats.usage.iter().find(|usage| usage.unit == i32::from(Unit::Bytes));
        Ok(bytes.context("no bytes")?.total)
    }

    /// What is wrong with a volume, if something is.
    pub fn problem(self, id: &str) -> Result<Option<String>, Status> {
        let condition = self.stats(id)?.volume_condition.unwrap_or_default();
        Ok(Some(condition.message).filter(|_| condition.abnormal))
    }

    /// Grows the volume, while it is used.
    pub fn expand(self, id: &str, size: i64) -> anyhow::Result<()> {
        let request = ControllerExpandVolumeRequest {
            volume_id: id.to_owned(),
            capacity_range: Some(bytes(size)),
            volume_capability: Some(capability()),
            ..ControllerExpandVolumeRequest::default()
        };
        let expanded = self.controller(async |mut client| client.controller_expand_volume(request).await)?;
        ensure!(expanded.node_expansion_required && expanded.capacity_bytes >= size, "{expanded:?}");
        let request = NodeExpandVolumeRequest {
            volume_id: id.to_owned(),
            volume_path: target(id),
            staging_target_path: staging(id),
            capacity_range: Some(bytes(size)),
            volume_capability: Some(capability()),
            ..NodeExpandVolumeRequest::default()
        };
        self.node(async |mut client| client.node_expand_volume(request).await)?;
        Ok(())
    }

    /// The identifiers of the cluster's volumes.
    pub fn volumes(self) -> Result<Vec<String>, Status> {
        let request = ListVolumesRequest::default();
        let listed = self.controller(async |mut client| client.list_volumes(request).await)?;
        Ok(listed.entries.into_iter().filter_map(|entry| Some(entry.volume?.volume_id)).collect())
    }

    /// A call of `csi.v1.Identity`, on the socket of the sidecars.
    ///
    /// # Errors
    /// As the agent answers; UNAVAILABLE if it cannot be reached.
    pub fn identity<T>(
        self,
        call: impl AsyncFnOnce(IdentityClient<Client>) -> Answer<T>,
    ) -> Result<T, Status> {
        self.call(Socket::Controller, async |client| {
            call(IdentityClient::with_origin(client, origin())).await
        })
    }

    /// A call of `csi.v1.Controller`, as the sidecars make them.
    ///
    /// # Errors
    /// As the agent answers; UNAVAILABLE if it cannot be reached.
    pub fn controller<T>(
        self,
        call: impl AsyncFnOnce(ControllerClient<Client>) -> Answer<T>,
    ) -> Result<T, Status> {
        self.call(Socket::Controller, async |client| {
            call(ControllerClient::with_origin(client, origin())).await
        })
    }

    /// A call of `csi.v1.Node`, as kubelet makes them.
    ///
    /// # Errors
    /// As the agent answers; UNAVAILABLE if it cannot be reached.
    pub fn node<T>(self, call: impl AsyncFnOnce(NodeClient<Client>) -> Answer<T>) -> Result<T, Status> {
        self.call(Socket::Node, async |client| call(NodeClient::with_origin(client, origin())).await)
    }

    /// A call of kubelet's plugin registration.
    ///
    /// # Errors
    /// As the agent answers; UNAVAILABLE if it cannot be reached.
    pub fn registration<T>(
        self,
        call: impl AsyncFnOnce(RegistrationClient<Client>) -> Answer<T>,
    ) -> Result<T, Status> {
        self.call(Socket::Registration, async |client| {
            call(RegistrationClient::with_origin(client, origin())).await
        })
    }

    fn call<T>(self, socket: Socket, call: impl AsyncFnOnce(Client) -> Answer<T>) -> Result<T, Status> {
        grpc::call(self.0, socket as u32, call)
    }
}

/// kubelet's folders for a volume: where it is staged, of the pod that has it, and where that sees it.
pub fn staging(id: &str) -> String {
    format!("{KUBELET}/plugins/kubernetes.io/csi/{DRIVER}/{id}/globalmount")
}

fn pod(id: &str) -> String {
    format!("{KUBELET}/pods/{id}/volumes/kubernetes.io~csi/{id}")
}

pub fn target(id: &str) -> String {
    format!("{}/mount", pod(id))
}

fn capability() -> VolumeCapability {
    let mount = MountVolume { fs_type: "ext4".to_owned(), ..MountVolume::default() };
    let mode = AccessMode { mode: Mode::SingleNodeWriter.into() };
    VolumeCapability { access_mode: Some(mode), access_type: Some(AccessType::Mount(mount)) }
}

fn bytes(required: i64) -> CapacityRange {
    CapacityRange { required_bytes: required, limit_bytes: 0 }
}

fn origin() -> Uri {
    Uri::from_static(ORIGIN)
}
