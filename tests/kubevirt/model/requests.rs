//! virt-controller's part of hot-plugging: what a VM's spec, or a request to the VM, says of volumes comes to its instance.
//! Which of the two counts is a matter of feature gates.

use serde_json::{Value, json};

use super::objects::{Kind, is_deleted, is_hotpluggable, items, name, named, text};
use super::pace::Step;
use super::world::{Done, World};

/// How volumes are hot-plugged in this cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Plugging {
    /// By changes of the VM's spec.
    Declarative,
    /// By the subresources addvolume and removevolume alone.
    Requests,
    /// Not at all.
    No,
}

impl World {
    fn plugging(&self) -> Plugging {
        self.objects.of(Kind::KubeVirt).next().map_or(Plugging::No, plugging)
    }

    pub(super) fn has_gate(&self, gate: &str, open_from: u32) -> bool {
        self.objects.of(Kind::KubeVirt).next().is_some_and(|kubevirt| is_open(kubevirt, gate, open_from))
    }

    pub(super) async fn copy_volumes(&mut self, vm: &Value, instance: Option<&Value>) -> Done {
        match self.plugging() {
            Plugging::Declarative => match instance {
                Some(instance) => self.copy_spec(vm, instance).await,
                None => Ok(()),
            },
            Plugging::Requests => self.serve_requests(vm, instance).await,
            Plugging::No => Ok(()),
        }
    }

    async fn copy_spec(&mut self, vm: &Value, instance: &Value) -> Done {
        let runs = instance["status"]["phase"] == "Running" && !is_deleted(instance);
        if !runs || vm["spec"]["updateVolumesStrategy"] == "Migration" {
            return Ok(());
        }
        let (volumes, disks) = copied(&vm["spec"]["template"]["spec"], instance);
        if is_same(&volumes, &disks, instance) {
            return Ok(());
        }
        let id =
            format!("{}-{}", text(&instance["metadata"]["uid"]), text(&vm["metadata"]["resourceVersion"]));
        if !self.may(Step::Copy, name(vm), &id) {
            return Ok(());
        }
        self.set_volumes(instance, volumes, disks).await
    }

    /// Puts volumes and disks in the place of an instance's.
    pub(super) async fn set_volumes(
        &mut self,
        instance: &Value,
        volumes: Vec<Value>,
        disks: Vec<Value>,
    ) -> Done {
        let change = json!({ "spec": { "volumes": volumes, "domain": { "devices": { "disks": disks } } } });
        self.patch(Kind::Vmi, instance, &change).await.map(drop)
    }

    /// Does what the requests in a VM's status say, first to its instance, then to its spec; then it forgets them.
    async fn serve_requests(&mut self, vm: &Value, instance: Option<&Value>) -> Done {
        let requests = &vm["status"]["volumeRequests"];
        if items(requests).next().is_none() {
            return Ok(());
        }
        let id = format!("{}-requests", text(&vm["metadata"]["resourceVersion"]));
        if !self.may(Step::Copy, name(vm), &id) {
            return Ok(());
        }
        if let Some(instance) = instance.filter(|it| !is_deleted(it)) {
            // An instance that is not running takes no requests, and so the VM does not either.
            if instance["status"]["phase"] != "Running" {
                return Ok(());
            }
            let mut wanted = instance["spec"].clone();
            for request in items(requests) {
                let name = text(&request["addVolumeOptions"]["name"]);
                let is_there = named(&instance["spec"]["volumes"], name).is_some();
                if !is_there && named(&instance["status"]["volumeStatus"], name).is_some() {
                    // A volume of this name is still going.
                    return Ok(());
                }
                apply(request, &mut wanted);
            }
            let lists = lists(&wanted);
            if !is_same(&lists.0, &lists.1, instance) {
                self.set_volumes(instance, lists.0, lists.1).await?;
            }
        }
        let mut wanted = vm["spec"]["template"]["spec"].clone();
        items(requests).for_each(|request| apply(request, &mut wanted));
        let change = json!({ "spec": { "template": { "spec": {
            "volumes": wanted["volumes"],
            "domain": { "devices": { "disks": wanted["domain"]["devices"]["disks"] } },
        } } } });
        let vm = self.patch(Kind::Vm, vm, &change).await?;
        self.patch_status(Kind::Vm, &vm, &json!({ "volumeRequests": null })).await.map(drop)
    }
}

/// What a KubeVirt object says of hot-plugging. `HotplugVolumes` wins where it is listed; `DeclarativeHotplugVolumes` is on by
/// itself from 1.9.
pub fn plugging(kubevirt: &Value) -> Plugging {
    let listed = &kubevirt["spec"]["configuration"]["developerConfiguration"]["featureGates"];
    if items(listed).any(|gate| gate == "HotplugVolumes") {
        Plugging::Requests
    } else if is_open(kubevirt, "DeclarativeHotplugVolumes", 9) {
        Plugging::Declarative
    } else {
        Plugging::No
    }
}

/// Whether a gate is open: it is listed, or it is open by itself from this minor version of KubeVirt on and not turned off.
pub fn is_open(kubevirt: &Value, gate: &str, from: u32) -> bool {
    let settings = &kubevirt["spec"]["configuration"]["developerConfiguration"];
    let version = text(&kubevirt["status"]["observedKubeVirtVersion"]);
    let minor = version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok()).unwrap_or(0);
    let is_off = items(&settings["disabledFeatureGates"]).any(|off| off == gate);
    items(&settings["featureGates"]).any(|listed| listed == gate) || (minor >= from && !is_off)
}

/// The volumes and disks of a running instance that follows the spec of its VM: those that are not hot-plugged stay as they are,
/// and a new one has to wait until there is nothing left of another of its name.
fn copied(wanted: &Value, instance: &Value) -> (Vec<Value>, Vec<Value>) {
    let (spec, status) = (&instance["spec"], &instance["status"]["volumeStatus"]);
    let mut volumes: Vec<Value> = Vec::new();
    for volume in items(&spec["volumes"]) {
        let is_kept = !is_hotpluggable(volume) || items(&wanted["volumes"]).any(|it| it == volume);
        if is_kept {
            volumes.push(volume.clone());
        }
    }
    for volume in items(&wanted["volumes"]).filter(|volume| is_hotpluggable(volume)) {
        let name = text(&volume["name"]);
        if named(&spec["volumes"], name).is_none() && named(status, name).is_none() {
            volumes.push(volume.clone());
        }
    }
    let mut disks: Vec<Value> = Vec::new();
    for volume in &volumes {
        let name = text(&volume["name"]);
        let known = named(&spec["domain"]["devices"]["disks"], name);
        disks.extend(known.or_else(|| named(&wanted["domain"]["devices"]["disks"], name)).cloned());
    }
    (volumes, disks)
}

fn lists(spec: &Value) -> (Vec<Value>, Vec<Value>) {
    let disks = &spec["domain"]["devices"]["disks"];
    (items(&spec["volumes"]).cloned().collect(), items(disks).cloned().collect())
}

fn is_same(volumes: &[Value], disks: &[Value], instance: &Value) -> bool {
    let (known, known_disks) = lists(&instance["spec"]);
    let names = |list: &[Value]| {
        let mut names: Vec<_> = list.iter().map(|it| text(&it["name"]).to_owned()).collect();
        names.sort();
        names
    };
    volumes == known && names(disks) == names(&known_disks)
}

/// Adds a volume to a spec of an instance, or takes it out, as a request says; nothing if that is done.
pub fn apply(request: &Value, spec: &mut Value) {
    let add = &request["addVolumeOptions"];
    let (mut volumes, mut disks) = lists(spec);
    if add.is_object() {
        if named(&spec["volumes"], text(&add["name"])).is_some() {
            return;
        }
        let mut volume = add["volumeSource"].clone();
        for source in ["persistentVolumeClaim", "dataVolume"] {
            if volume[source].is_object() {
                volume[source]["hotpluggable"] = json!(true);
            }
        }
        volume["name"] = add["name"].clone();
        if volume["persistentVolumeClaim"].is_null() {
            volume.as_object_mut().expect("a volume").remove("persistentVolumeClaim");
        }
        if volume["dataVolume"].is_null() {
            volume.as_object_mut().expect("a volume").remove("dataVolume");
        }
        let mut disk = add["disk"].clone();
        disk["name"] = add["name"].clone();
        volumes.push(volume);
        disks.push(disk);
    } else {
        let gone = text(&request["removeVolumeOptions"]["name"]);
        volumes.retain(|volume| volume["name"] != gone);
        disks.retain(|disk| disk["name"] != gone);
    }
    spec["volumes"] = Value::Array(volumes);
    spec["domain"]["devices"]["disks"] = Value::Array(disks);
}
