//! What external-provisioner, external-attacher and external-resizer do, as far as a volume's life needs it: they see the
//! cluster's objects and ask the agent's socket for the sidecars. Whatever fails is done again in the next round.

use std::path::{Path, PathBuf};
use std::time::Duration;

use guestlet::transport::http2::{self, Client, ORIGIN};
use guestlet::wire::proto::csi;
use guestlet::wire::proto::csi::controller_client::ControllerClient;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tonic::Status;

use crate::api::Api;
use crate::kubelet::{block, mount};
use crate::lab::DRIVER;

const VOLUMES: &str = "/api/v1/persistentvolumes";
const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
const ATTACHMENTS: &str = "/apis/storage.k8s.io/v1/volumeattachments";
const CLASSES: &str = "/apis/storage.k8s.io/v1/storageclasses";
const NODES: &str = "/apis/storage.k8s.io/v1/csinodes";
/// Keeps an attachment until its volume is detached.
const FINALIZER: &str = "external-attacher/driver-harvesterhci-io";
const ROUND: Duration = Duration::from_millis(200);

/// One of the sidecars.
#[derive(Clone, Copy, PartialEq)]
pub enum Role {
    Provisioner,
    Attacher,
    Resizer,
}

impl Role {
    pub const ALL: [Self; 3] = [Self::Provisioner, Self::Attacher, Self::Resizer];

    /// The name of its image.
    pub fn image(self) -> &'static str {
        match self {
            Self::Provisioner => "csi-provisioner",
            Self::Attacher => "csi-attacher",
            Self::Resizer => "csi-resizer",
        }
    }

    /// The name of its Lease.
    pub fn lease(self) -> &'static str {
        match self {
            Self::Provisioner => "driver-harvesterhci-io",
            Self::Attacher => "external-attacher-leader-driver-harvesterhci-io",
            Self::Resizer => "external-resizer-driver-harvesterhci-io",
        }
    }
}

/// Sidecars of one driver, which work until this is dropped.
pub struct Sidecars(JoinHandle<()>);

impl Drop for Sidecars {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Sidecars {
    /// Starts them; `socket` is the agent's.
    pub fn start(api: Api, socket: PathBuf) -> Self {
        Self(tokio::spawn(work(api, socket, &Role::ALL)))
    }
}

/// Does the work of these, without end.
pub async fn work(api: Api, socket: PathBuf, roles: &[Role]) {
    let work = Work { api, socket, roles };
    let mut told = String::new();
    loop {
        let failed = work.round().await.err().map(|status| status.to_string()).unwrap_or_default();
        if !failed.is_empty() && failed != told {
            eprintln!("a sidecar tries it again: {failed}");
        }
        told = failed;
        tokio::time::sleep(ROUND).await;
    }
}

struct Work<'r> {
    api: Api,
    socket: PathBuf,
    roles: &'r [Role],
}

impl Work<'_> {
    async fn round(&self) -> Result<(), Status> {
        for role in self.roles {
            match role {
                Role::Provisioner => {
                    self.provision().await?;
                    self.remove().await?;
                }
                Role::Attacher => self.attach_all().await?,
                Role::Resizer => self.resize().await?,
            }
        }
        Ok(())
    }

    async fn provision(&self) -> Result<(), Status> {
        for claim in self.api.list(CLAIMS).await {
            if claim["spec"]["volumeName"].is_null() && is_to_be_made(&claim) {
                self.make(&claim).await?;
            }
        }
        Ok(())
    }

    async fn resize(&self) -> Result<(), Status> {
        for claim in self.api.list(CLAIMS).await {
            if let Some(volume) = claim["spec"]["volumeName"].as_str() {
                self.grow(&claim, volume).await?;
            }
        }
        Ok(())
    }

    async fn attach_all(&self) -> Result<(), Status> {
        let mut result = Ok(());
        for attachment in self.api.list(ATTACHMENTS).await {
            // One that has to wait holds up no other.
            result = self.attach(&attachment).await.and(result);
        }
        result
    }

    async fn remove(&self) -> Result<(), Status> {
        let attachments = self.api.list(ATTACHMENTS).await;
        for volume in self.api.list(VOLUMES).await {
            let is_attached = attachments.iter().any(|it| attached(it) == name(&volume));
            if volume["status"]["phase"] == "Released" && !is_deleted(&volume) && !is_attached {
                let request = csi::DeleteVolumeRequest { volume_id: handle(&volume), ..Default::default() };
                controller(&self.socket).await?.delete_volume(request).await?;
                self.api.delete(&format!("{VOLUMES}/{}", name(&volume))).await;
            }
        }
        Ok(())
    }

    async fn make(&self, claim: &Value) -> Result<(), Status> {
        let spec = &claim["spec"];
        let class = text(&spec["storageClassName"]);
        let class = self.api.get(&format!("{CLASSES}/{class}")).await.expect("the claim's class");
        let kind = class["parameters"]["csi.storage.k8s.io/fstype"].as_str().unwrap_or_default();
        let request = csi::CreateVolumeRequest {
            name: format!("pvc-{}", text(&claim["metadata"]["uid"])),
            capacity_range: Some(range(&spec["resources"]["requests"]["storage"])),
            volume_capabilities: vec![capability(&spec["volumeMode"], kind)],
            ..Default::default()
        };
        let name = request.name.clone();
        let answer = controller(&self.socket).await?.create_volume(request).await?.into_inner();
        let volume = json!({
            "metadata": { "name": name, "annotations": { "pv.kubernetes.io/provisioned-by": DRIVER } },
            "spec": {
                "capacity": spec["resources"]["requests"],
                "accessModes": spec["accessModes"],
                "volumeMode": spec["volumeMode"],
                "storageClassName": spec["storageClassName"],
                "persistentVolumeReclaimPolicy": class["reclaimPolicy"],
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "namespace": "default",
                    "name": claim["metadata"]["name"],
                    "uid": claim["metadata"]["uid"],
                },
                "csi": {
                    "driver": DRIVER,
                    "fsType": kind,
                    "volumeHandle": answer.volume.unwrap_or_default().volume_id,
                },
            },
        });
        self.api.ensure(VOLUMES, &volume).await;
        Ok(())
    }

    async fn grow(&self, claim: &Value, volume: &str) -> Result<(), Status> {
        let path = format!("{VOLUMES}/{volume}");
        let Some(volume) = self.api.get(&path).await else { return Ok(()) };
        let wanted = &claim["spec"]["resources"]["requests"];
        if bytes(&wanted["storage"]) <= bytes(&volume["spec"]["capacity"]["storage"]) {
            return Ok(());
        }
        let request = csi::ControllerExpandVolumeRequest {
            volume_id: handle(&volume),
            capacity_range: Some(range(&wanted["storage"])),
            ..Default::default()
        };
        let answer = controller(&self.socket).await?.controller_expand_volume(request).await?.into_inner();
        assert!(answer.node_expansion_required, "{answer:?}");
        self.api.patch(&path, &json!({ "spec": { "capacity": wanted } })).await;
        let pending = json!({ "type": "FileSystemResizePending", "status": "True" });
        let status = json!({ "status": { "conditions": [pending] } });
        self.api.patch(&format!("{CLAIMS}/{}/status", name(claim)), &status).await;
        Ok(())
    }

    async fn attach(&self, attachment: &Value) -> Result<(), Status> {
        let path = format!("{ATTACHMENTS}/{}", name(attachment));
        let volume = attached(attachment);
        let node = text(&attachment["spec"]["nodeName"]);
        if is_deleted(attachment) {
            let volume = self.api.get(&format!("{VOLUMES}/{volume}")).await.expect("the attached volume");
            let request = csi::ControllerUnpublishVolumeRequest {
                volume_id: handle(&volume),
                node_id: self.node_id(node).await?,
                ..Default::default()
            };
            controller(&self.socket).await?.controller_unpublish_volume(request).await?;
            self.api.patch(&path, &json!({ "metadata": { "finalizers": null } })).await;
        } else if attachment["status"]["attached"] != true {
            self.api.patch(&path, &json!({ "metadata": { "finalizers": [FINALIZER] } })).await;
            let volume = self.api.get(&format!("{VOLUMES}/{volume}")).await.expect("the volume to attach");
            let spec = &volume["spec"];
            let request = csi::ControllerPublishVolumeRequest {
                volume_id: handle(&volume),
                node_id: self.node_id(node).await?,
                volume_capability: Some(capability(&spec["volumeMode"], text(&spec["csi"]["fsType"]))),
                ..Default::default()
            };
            let answer = controller(&self.socket).await?.controller_publish_volume(request).await?;
            let told = answer.into_inner().publish_context;
            let status = json!({ "status": { "attached": true, "attachmentMetadata": told } });
            self.api.patch(&format!("{path}/status"), &status).await;
        }
        Ok(())
    }

    /// What the driver calls a Node.
    async fn node_id(&self, node: &str) -> Result<String, Status> {
        let drivers = self.api.get(&format!("{NODES}/{node}")).await.unwrap_or_default();
        let drivers = drivers["spec"]["drivers"].as_array().cloned().unwrap_or_default();
        let driver = drivers.iter().find(|driver| driver["name"] == DRIVER);
        let driver = driver.ok_or_else(|| Status::unavailable("the Node has no such driver"))?;
        Ok(text(&driver["nodeID"]).to_owned())
    }
}

async fn controller(socket: &Path) -> Result<ControllerClient<Client>, Status> {
    let stream = UnixStream::connect(socket).await?;
    let (client, mut connection) =
        http2::connect(stream).await.map_err(|error| Status::unavailable(error.to_string()))?;
    tokio::spawn(async move { drop(connection.ended().await) });
    Ok(ControllerClient::with_origin(client, http::Uri::from_static(ORIGIN)))
}

/// Whether the scheduler has chosen the node that needs the claim's volume.
fn is_to_be_made(claim: &Value) -> bool {
    let annotations = &claim["metadata"]["annotations"];
    annotations["volume.beta.kubernetes.io/storage-provisioner"] == DRIVER
        && annotations["volume.kubernetes.io/selected-node"].is_string()
}

fn is_deleted(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

fn name(object: &Value) -> &str {
    text(&object["metadata"]["name"])
}

/// The volume that an attachment is of.
fn attached(attachment: &Value) -> &str {
    text(&attachment["spec"]["source"]["persistentVolumeName"])
}

fn handle(volume: &Value) -> String {
    text(&volume["spec"]["csi"]["volumeHandle"]).to_owned()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// A quantity in whole mebibytes, as the tests write them, in bytes.
pub fn bytes(quantity: &Value) -> i64 {
    let mebibytes = text(quantity).strip_suffix("Mi").and_then(|number| number.parse::<i64>().ok());
    mebibytes.unwrap_or_else(|| panic!("{quantity} is no number of Mi")) << 20
}

fn range(quantity: &Value) -> csi::CapacityRange {
    csi::CapacityRange { required_bytes: bytes(quantity), limit_bytes: 0 }
}

fn capability(mode: &Value, kind: &str) -> csi::VolumeCapability {
    if mode == "Block" { block() } else { mount(kind, &[]) }
}
