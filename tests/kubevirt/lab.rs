//! What a test begins with: a cluster of two hosts with a `KubeVirt` that plugs volumes, and short ways to ask for things.

use std::future::Future;
use std::sync::Arc;

use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::api::Api;
use crate::client::{JSON_PATCH, call};
use crate::model::Model;
use crate::model::domain::{Domain, Nothing};
use crate::model::objects::{Kind, items, named, text, uid};
use crate::model::storage::PROVISIONER;
use crate::patience::until;
use crate::pool;
use crate::turns::Turn;

/// The names of the hosts.
pub const HOSTS: [&str; 2] = ["host-1", "host-2"];
/// Where tests have their VMs if they have no reason to do otherwise.
pub const NAMESPACE: &str = "default";
/// The class whose volumes many nodes may have, the cluster's default; one whose volumes only one node may have at a time; and
/// one that never gives a volume.
pub const SHARED: &str = "shared";
pub const NEVER: &str = "never";

/// Runs a test.
pub fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(work)
}

/// The cluster. What is first here ends first.
pub struct Lab {
    pub model: Model,
    pub api: Api,
    pub turn: Turn,
}

impl Drop for Lab {
    fn drop(&mut self) {
        let faults = self.model.journal().faults;
        if !std::thread::panicking() {
            assert!(faults.is_empty(), "the model was refused: {faults:?}");
        }
    }
}

impl Lab {
    /// One in which hot-plugging is declarative.
    pub async fn start() -> Self {
        Self::with("v1.8.4", &["DeclarativeHotplugVolumes"], Arc::new(Nothing)).await
    }

    /// The same with this version of `KubeVirt` and these feature gates, and where disks are plugged into domains of the
    /// test's.
    pub async fn with(version: &str, gates: &[&str], domain: Arc<dyn Domain>) -> Self {
        let turn = pool::take().await;
        let api = Api::read(turn.plane().folder.path(), "test");
        api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": "kubevirt" } })).await;
        let kubevirt = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "KubeVirt",
            "metadata": { "name": "kubevirt" },
            "spec": { "configuration": { "developerConfiguration": { "featureGates": gates } } },
        });
        api.create(&Kind::KubeVirt.within("kubevirt"), &kubevirt).await;
        let status = json!({ "status": { "phase": "Deployed", "observedKubeVirtVersion": version } });
        api.patch(&(Kind::KubeVirt.path("kubevirt/kubevirt") + "/status"), &status).await;
        for (class, provisioner) in [(SHARED, PROVISIONER), (NEVER, "nobody.test")] {
            let is_default = (class == SHARED).to_string();
            let class = json!({
                "metadata": {
                    "name": class,
                    "annotations": { "storageclass.kubernetes.io/is-default-class": is_default },
                },
                "provisioner": provisioner,
                "allowVolumeExpansion": true,
            });
            api.create(&Kind::Class.all(), &class).await;
        }
        let model = Model::start(turn.plane(), domain).await;
        let lab = Self { model, api, turn };
        for (number, host) in (1..).zip(HOSTS) {
            lab.host(host, &format!("zone-{number}")).await;
        }
        lab
    }

    /// Adds a host in a zone.
    pub async fn host(&self, name: &str, zone: &str) {
        let labels = json!({
            "kubernetes.io/hostname": name,
            "topology.kubernetes.io/region": "region",
            "topology.kubernetes.io/zone": zone,
        });
        self.api.create(&Kind::Node.all(), &json!({ "metadata": { "name": name, "labels": labels } })).await;
        self.model.restore_node(name).await;
    }

    /// Changes which feature gates are listed.
    pub async fn set_gates(&self, gates: &[&str]) {
        let settings = json!({ "developerConfiguration": { "featureGates": gates } });
        let change = json!({ "spec": { "configuration": settings } });
        self.api.patch(&Kind::KubeVirt.path("kubevirt/kubevirt"), &change).await.unwrap();
    }

    /// Asks for a volume of so many MiB that many nodes may have.
    pub async fn claim(&self, name: &str, mebibytes: u64) {
        self.claim_of(SHARED, name, mebibytes, "ReadWriteMany").await;
    }

    /// The same of another class and with another access mode.
    pub async fn claim_of(&self, class: &str, name: &str, mebibytes: u64, mode: &str) {
        let claim = json!({
            "metadata": { "name": name },
            "spec": {
                "storageClassName": class,
                "accessModes": [mode],
                "volumeMode": "Block",
                "resources": { "requests": { "storage": format!("{mebibytes}Mi") } },
            },
        });
        self.api.create(&Kind::Claim.within(NAMESPACE), &claim).await;
    }

    /// Makes a VM that runs.
    pub async fn vm(&self, name: &str) -> Value {
        self.vm_with(name, |_| ()).await
    }

    /// The same with another spec.
    pub async fn vm_with(&self, name: &str, change: impl FnOnce(&mut Value)) -> Value {
        let mut vm = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachine",
            "metadata": { "name": name },
            "spec": {
                "runStrategy": "Always",
                "template": {
                    "metadata": { "labels": { "app": name } },
                    "spec": {
                        "domain": {
                            "devices": { "disks": [{ "name": "root", "disk": { "bus": "virtio" } }] },
                            "memory": { "guest": "1Gi" },
                        },
                        "volumes": [{ "name": "root", "containerDisk": { "image": "registry.test/root" } }],
                    },
                },
            },
        });
        change(&mut vm);
        self.api.create(&Kind::Vm.within(NAMESPACE), &vm).await
    }

    /// Makes a VM, and waits until it runs; its instance.
    pub async fn running(&self, name: &str) -> Value {
        self.vm(name).await;
        self.runs(name).await
    }

    /// Waits until a VM runs; its instance.
    pub async fn runs(&self, name: &str) -> Value {
        until(&format!("{name} runs"), async || {
            let instance = self.instance(name).await?;
            let runs = instance["status"]["phase"] == "Running"
                && instance["metadata"]["deletionTimestamp"].is_null();
            runs.then_some(instance)
        })
        .await
    }

    /// Waits until a VM runs in another instance than this; that.
    pub async fn until_other(&self, name: &str, before: &Value) -> Value {
        until(&format!("{name} runs again"), async || {
            let instance = self.runs(name).await;
            (uid(&instance) != uid(before)).then_some(instance)
        })
        .await
    }

    pub async fn instance(&self, name: &str) -> Option<Value> {
        self.api.get(&Kind::Vmi.path(&format!("{NAMESPACE}/{name}"))).await
    }

    /// A claim as Harvester's CSI driver makes it for a guest cluster, which is not given to guestlet.
    pub async fn harvester_claim(&self, name: &str, mebibytes: u64, cluster: &str) {
        self.claim(name, mebibytes).await;
        self.label(name, "guestcluster.harvesterhci.io/name", Some(cluster)).await;
    }

    /// Gives a claim to guestlet.
    pub async fn give(&self, claim: &str) {
        self.label(claim, "app.kubernetes.io/managed-by", Some("guestlet")).await;
    }

    /// Writes a label of a claim, or takes it away.
    pub async fn label(&self, claim: &str, key: &str, value: Option<&str>) {
        let change = json!({ "metadata": { "labels": { key: value } } });
        self.api.patch(&Kind::Claim.path(&format!("{NAMESPACE}/{claim}")), &change).await.unwrap();
    }

    /// Plugs a claim into a VM as virtctl does, by a change of its spec: the volume's name is the claim's, and so is the disk's
    /// serial number.
    pub async fn plug(&self, vm: &str, claim: &str) {
        self.plug_as(vm, claim, claim, json!({ "disk": { "bus": "scsi" }, "serial": claim })).await;
    }

    /// The same as Harvester's CSI driver does: the disk has no serial number.
    pub async fn harvester_plugs(&self, vm: &str, claim: &str) {
        self.plug_as(vm, claim, claim, json!({ "disk": { "bus": "scsi" } })).await;
    }

    /// Plugs a claim into a VM as a volume of this name, as a disk like this.
    pub async fn plug_as(&self, vm: &str, volume: &str, claim: &str, mut disk: Value) {
        disk["name"] = volume.into();
        let volume = json!({
            "name": volume,
            "persistentVolumeClaim": { "claimName": claim, "hotpluggable": true },
        });
        let change = json!([
            { "op": "add", "path": "/spec/template/spec/volumes/-", "value": volume },
            { "op": "add", "path": "/spec/template/spec/domain/devices/disks/-", "value": disk },
        ]);
        let path = Kind::Vm.path(&format!("{NAMESPACE}/{vm}"));
        let (status, answer) =
            call(&self.api, Method::PATCH, &path, JSON_PATCH, Some(&change)).await.unwrap();
        assert_eq!(status, StatusCode::OK, "{answer}");
    }

    /// Takes volumes out of a VM's spec, all at once.
    pub async fn unplug(&self, vm: &str, volumes: &[&str]) {
        let path = Kind::Vm.path(&format!("{NAMESPACE}/{vm}"));
        until(&format!("{volumes:?} are out of the spec of {vm}"), async || {
            let mut object = self.api.get(&path).await?;
            let spec = &mut object["spec"]["template"]["spec"];
            let is_kept = |item: &Value| !volumes.contains(&text(&item["name"]));
            for at in ["/volumes", "/domain/devices/disks"] {
                spec.pointer_mut(at)?.as_array_mut()?.retain(is_kept);
            }
            self.api.replace(&path, &object).await
        })
        .await;
    }

    /// What an instance's status says of a volume.
    pub async fn entry(&self, vm: &str, volume: &str) -> Option<Value> {
        named(&self.instance(vm).await?["status"]["volumeStatus"], volume).cloned()
    }

    /// Waits until a volume is in this phase; its entry.
    pub async fn is_in(&self, vm: &str, volume: &str, phase: &str) -> Value {
        until(&format!("{volume} of {vm} is {phase}"), async || {
            self.entry(vm, volume).await.filter(|entry| entry["phase"] == phase)
        })
        .await
    }

    /// Waits until an instance's status says nothing of a volume.
    pub async fn has_left(&self, vm: &str, volume: &str) {
        until(&format!("{volume} is no volume of {vm}"), async || {
            self.entry(vm, volume).await.is_none().then_some(())
        })
        .await;
    }

    /// The attachment pods that there are.
    pub async fn attachers(&self) -> Vec<Value> {
        let mut pods = self.api.list(&Kind::Pod.within(NAMESPACE)).await;
        pods.retain(|pod| pod["metadata"]["labels"]["kubevirt.io"] == "hotplug-disk");
        pods
    }

    /// The nodes to which the volume of a claim is attached, or is to be.
    pub async fn attached(&self, claim: &str) -> Vec<String> {
        let claim = self.api.get(&Kind::Claim.path(&format!("{NAMESPACE}/{claim}"))).await.unwrap();
        let volume = &claim["spec"]["volumeName"];
        let all = self.api.list(&Kind::Attachment.all()).await;
        let of_it = all.iter().filter(|it| it["spec"]["source"]["persistentVolumeName"] == *volume);
        of_it.map(|it| text(&it["spec"]["nodeName"]).to_owned()).collect()
    }

    /// Waits until the volume of a claim is attached to the node of this VM, and to no other.
    pub async fn is_attached_for(&self, claim: &str, vm: &str) {
        until(&format!("{claim} is attached for {vm} alone"), async || {
            let node = text(&self.instance(vm).await?["status"]["nodeName"]).to_owned();
            (self.attached(claim).await == [node]).then_some(())
        })
        .await;
    }

    /// Waits until the cluster is told something of an object, for this reason; what.
    pub async fn told(&self, object: &str, reason: &str) -> String {
        until(&format!("{reason} is told of {object}"), async || {
            let events = self.api.list(&format!("/api/v1/namespaces/{NAMESPACE}/events")).await;
            let is_meant =
                |event: &&Value| event["involvedObject"]["name"] == object && event["reason"] == reason;
            events.iter().find(is_meant).map(|event| text(&event["message"]).to_owned())
        })
        .await
    }

    /// Calls a subresource of a VM.
    pub async fn call(&self, vm: &str, verb: &str, options: &Value) -> (StatusCode, Value) {
        let path =
            format!("/apis/subresources.kubevirt.io/v1/namespaces/{NAMESPACE}/virtualmachines/{vm}/{verb}");
        call(&self.api, Method::PUT, &path, crate::client::JSON, Some(options)).await.unwrap()
    }
}

/// The names of the volumes of a pod.
pub fn volumes_of(pod: &Value) -> Vec<&str> {
    items(&pod["spec"]["volumes"]).map(|volume| text(&volume["name"])).collect()
}
