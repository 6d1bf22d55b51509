//! What guests ask of volumes: `csi.v1.Controller`, with pools and a QEMU behind it.

use std::collections::HashMap;
use std::path::PathBuf;

use guestlet::transport::callback::Caller;
use guestlet::transport::http2;
use guestlet::wire::proto::csi::controller_client::ControllerClient;
use guestlet::wire::proto::csi::volume_capability::access_mode::Mode;
use guestlet::wire::proto::csi::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use guestlet::wire::proto::csi::{self, VolumeCapability};
use tonic::{Code, Status};

use crate::guest::{Door, Guest, Manner, info};
use crate::hypervisor::Hypervisor;
use crate::lab::{DEADLINE, Lab, text, uuid};

mod access;
mod authority;
mod busy;
mod clusters;
mod faults;
mod full;
mod io_errors;
mod life;
mod machine;
mod mirror;
mod people;
mod places;
mod random;
mod rules;

/// A machine with VMs, each with an agent and a QEMU, that have volumes.
pub struct Machines {
    pub lab: Lab,
    vms: HashMap<String, (Guest, Hypervisor)>,
}

/// The pools of most tests: `fast` is raw and thin, `full` is raw and full, `qcow` is qcow2.
const POOLS: [(&str, &str); 3] =
    [("fast", "default = true"), ("full", "allocation = 'full'"), ("qcow", "format = 'qcow2'")];

/// A VM's name, its number and its cluster.
type Vm = (&'static str, u8, &'static str);

/// Two VMs of one cluster, and one of another.
pub const USUAL: [Vm; 3] = [("a", 1, "dev"), ("b", 2, "dev"), ("c", 3, "prod")];

/// A daemon with the pools, these VMs and further settings, and all agents connected.
pub fn started(vms: &[Vm], settings: &str) -> Machines {
    let mut lab = Lab::new();
    for (name, rest) in POOLS {
        let path = text(&lab.path(&format!("pools/{name}")));
        lab = lab.set(&format!("[[pool]]\nname = '{name}'\npath = '{path}'\n{rest}"));
    }
    lab = lab.set(settings);
    let mut running = HashMap::new();
    for (name, number, cluster) in vms {
        let rest = format!(
            "unix-socket = '@{name}.sock'\nqmp = '@{name}.qmp'\n\
             cluster = '{cluster}'"
        );
        lab = lab.vm(name, *number, &rest);
        running.insert((*name).to_owned(), boot(&lab, name, *number));
    }
    let lab = lab.start();
    for (name, ..) in vms {
        lab.until_vm(name, |vm| vm["power"] == "running" && vm["callback"] == "open");
    }
    Machines { lab, vms: running }
}

fn boot(lab: &Lab, name: &str, number: u8) -> (Guest, Hypervisor) {
    let qemu = Hypervisor::start(&lab.path(&format!("{name}.qmp")), &["port1"]);
    let mut info = info(&uuid(number), "boot-1");
    info.capabilities.push("disks".to_owned());
    let path = lab.path(&format!("{name}.sock"));
    (Guest::start(&path, Door::Unix, Manner::Good, info), qemu)
}

impl Machines {
    pub fn guest(&self, vm: &str) -> &Guest {
        &self.vms[vm].0
    }

    pub fn qemu(&self, vm: &str) -> &Hypervisor {
        &self.vms[vm].1
    }

    /// Asks as the guest of this VM does.
    pub fn of(&self, vm: &str) -> Asking {
        Asking(self.guest(vm).client())
    }

    /// Ends a VM.
    pub fn end(&mut self, vm: &str) {
        drop(self.vms.remove(vm).unwrap());
        self.lab.until_vm(vm, |vm| vm["power"] == "off");
    }

    /// Starts a VM that has ended; its QEMU knows of no disks.
    pub fn boot(&mut self, vm: &str, number: u8) {
        let running = boot(&self.lab, vm, number);
        self.vms.insert(vm.to_owned(), running);
        self.lab.until_vm(vm, |vm| vm["power"] == "running" && vm["callback"] == "open");
    }

    /// The files in a pool, but for hidden ones.
    pub fn files(&self, pool: &str) -> Vec<String> {
        let folder = self.lab.path(&format!("pools/{pool}"));
        let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| !name.starts_with('.')).collect();
        names.sort();
        names
    }

    pub fn file(&self, pool: &str, id: &str, ending: &str) -> PathBuf {
        self.lab.path(&format!("pools/{pool}/{}.{ending}", serial(id)))
    }
}

/// How a guest knows a volume.
pub fn serial(id: &str) -> &str {
    id.rsplit_once('.').unwrap().1
}

/// A guest's end of the callback.
#[derive(Clone)]
pub struct Asking(Caller);

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

fn wait<T>(call: impl Future<Output = T>) -> T {
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
