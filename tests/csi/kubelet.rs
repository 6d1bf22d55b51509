//! A kubelet of the tests, and its sidecars: dials for each call, as the real one does.

use std::path::{Path, PathBuf};

use guestlet::transport::http2::{self, Client, ORIGIN};
use guestlet::wire::proto::csi;
use guestlet::wire::proto::csi::controller_client::ControllerClient;
use guestlet::wire::proto::csi::identity_client::IdentityClient;
use guestlet::wire::proto::csi::node_client::NodeClient;
use guestlet::wire::proto::csi::volume_capability::access_mode::Mode;
use guestlet::wire::proto::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use guestlet::wire::proto::registration::registration_client::RegistrationClient;
use guestlet::wire::proto::registration::{InfoRequest, PluginInfo, RegistrationStatus};
use http::Uri;
use tokio::net::UnixStream;
use tonic::Status;

use crate::lab::Lab;

/// What must never be logged.
pub const SECRET: &str = "correct horse battery staple";

async fn dial(socket: &Path) -> Client {
    let stream = UnixStream::connect(socket).await.unwrap();
    let (client, mut connection) = http2::connect(stream).await.unwrap();
    tokio::spawn(async move { drop(connection.ended().await) });
    client
}

pub async fn node(socket: &Path) -> NodeClient<Client> {
    NodeClient::with_origin(dial(socket).await, Uri::from_static(ORIGIN))
}

pub async fn controller(socket: &Path) -> ControllerClient<Client> {
    ControllerClient::with_origin(dial(socket).await, Uri::from_static(ORIGIN))
}

pub async fn identity(socket: &Path) -> IdentityClient<Client> {
    IdentityClient::with_origin(dial(socket).await, Uri::from_static(ORIGIN))
}

/// Asks a plugin who it is, and says that it was registered.
pub async fn register(socket: &Path) -> PluginInfo {
    let mut client = RegistrationClient::with_origin(dial(socket).await, Uri::from_static(ORIGIN));
    let info = client.get_info(InfoRequest {}).await.unwrap().into_inner();
    let status = RegistrationStatus { plugin_registered: true, error: String::new() };
    client.notify_registration_status(status).await.unwrap();
    info
}

/// A file system of this kind, or of any.
pub fn mount(kind: &str, flags: &[&str]) -> csi::VolumeCapability {
    with_group(kind, flags, "")
}

/// As [`mount`], for a group.
pub fn with_group(kind: &str, flags: &[&str], group: &str) -> csi::VolumeCapability {
    let mount = MountVolume {
        fs_type: kind.to_owned(),
        mount_flags: flags.iter().map(|&flag| flag.to_owned()).collect(),
        volume_mount_group: group.to_owned(),
    };
    capability(AccessType::Mount(mount))
}

/// The device itself.
pub fn block() -> csi::VolumeCapability {
    capability(AccessType::Block(BlockVolume {}))
}

fn capability(access: AccessType) -> csi::VolumeCapability {
    let mode = AccessMode { mode: Mode::SingleNodeMultiWriter.into() };
    csi::VolumeCapability { access_type: Some(access), access_mode: Some(mode) }
}

pub fn with_mode(capability: csi::VolumeCapability, mode: Mode) -> csi::VolumeCapability {
    csi::VolumeCapability { access_mode: Some(AccessMode { mode: mode.into() }), ..capability }
}

/// A volume as kubelet knows it.
#[derive(Clone)]
pub struct Volume {
    pub id: String,
    /// Of its disk; empty if whoever attached it says none.
    pub serial: String,
    pub staging: PathBuf,
    pub socket: PathBuf,
}

impl Volume {
    /// With the folder that it is to be staged at.
    pub fn new(lab: &Lab, id: &str, serial: &str) -> Self {
        let staging = lab.root().join(format!("plugins/kubernetes.io/csi/x/{id}/globalmount"));
        std::fs::create_dir_all(&staging).unwrap();
        Self { id: id.to_owned(), serial: serial.to_owned(), staging, socket: lab.socket() }
    }

    /// Where a pod has it; its folder is made.
    pub fn target(&self, lab: &Lab, pod: &str) -> PathBuf {
        let folder = lab.root().join(format!("pods/{pod}/volumes/kubernetes.io~csi/{}", self.id));
        std::fs::create_dir_all(&folder).unwrap();
        folder.join("mount")
    }

    fn context(&self) -> std::collections::HashMap<String, String> {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        if self.serial.is_empty() {
            return [pair("unknown", "key")].into();
        }
        [pair("guestlet.io/serial", &self.serial), pair("guestlet.io/bus", "virtio")].into()
    }

    pub fn stage_request(&self, capability: &csi::VolumeCapability) -> csi::NodeStageVolumeRequest {
        csi::NodeStageVolumeRequest {
            volume_id: self.id.clone(),
            publish_context: self.context(),
            staging_target_path: self.staging.display().to_string(),
            volume_capability: Some(capability.clone()),
            secrets: [("password".to_owned(), SECRET.to_owned())].into(),
            ..Default::default()
        }
    }

    pub fn publish_request(
        &self,
        target: &Path,
        capability: &csi::VolumeCapability,
        readonly: bool,
    ) -> csi::NodePublishVolumeRequest {
        csi::NodePublishVolumeRequest {
            volume_id: self.id.clone(),
            publish_context: self.context(),
            staging_target_path: self.staging.display().to_string(),
            target_path: target.display().to_string(),
            volume_capability: Some(capability.clone()),
            readonly,
            secrets: [("password".to_owned(), SECRET.to_owned())].into(),
            ..Default::default()
        }
    }

    pub async fn stage(&self, capability: &csi::VolumeCapability) -> Result<(), Status> {
        let request = self.stage_request(capability);
        node(&self.socket).await.node_stage_volume(request).await.map(drop)
    }

    pub async fn publish(
        &self,
        target: &Path,
        capability: &csi::VolumeCapability,
        readonly: bool,
    ) -> Result<(), Status> {
        let request = self.publish_request(target, capability, readonly);
        node(&self.socket).await.node_publish_volume(request).await.map(drop)
    }

    pub async fn unpublish(&self, target: &Path) -> Result<(), Status> {
        let target_path = target.display().to_string();
        let request = csi::NodeUnpublishVolumeRequest { volume_id: self.id.clone(), target_path };
        node(&self.socket).await.node_unpublish_volume(request).await.map(drop)
    }

    pub async fn unstage(&self) -> Result<(), Status> {
        let staging_target_path = self.staging.display().to_string();
        let request = csi::NodeUnstageVolumeRequest { volume_id: self.id.clone(), staging_target_path };
        node(&self.socket).await.node_unstage_volume(request).await.map(drop)
    }

    pub async fn stats(&self, path: &Path) -> Result<csi::NodeGetVolumeStatsResponse, Status> {
        let request = csi::NodeGetVolumeStatsRequest {
            volume_id: self.id.clone(),
            volume_path: path.display().to_string(),
            staging_target_path: self.staging.display().to_string(),
        };
        node(&self.socket).await.node_get_volume_stats(request).await.map(tonic::Response::into_inner)
    }

    pub async fn expand(
        &self,
        path: &Path,
        required_bytes: impl TryInto<i64>,
        limit_bytes: i64,
    ) -> Result<csi::NodeExpandVolumeResponse, Status> {
        let required_bytes = required_bytes.try_into().ok().unwrap();
        let request = csi::NodeExpandVolumeRequest {
            volume_id: self.id.clone(),
            volume_path: path.display().to_string(),
            capacity_range: Some(csi::CapacityRange { required_bytes, limit_bytes }),
            staging_target_path: self.staging.display().to_string(),
            ..Default::default()
        };
        node(&self.socket).await.node_expand_volume(request).await.map(tonic::Response::into_inner)
    }
}
