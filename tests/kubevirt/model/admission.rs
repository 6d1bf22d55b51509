//! virt-api's part as a validating webhook: what `KubeVirt` refuses although its schemas allow it. And Harvester's, of load balancers.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::objects::{Kind, claim_of, is_hotpluggable, items, named, namespace, text};
use super::requests::is_open;
use crate::api::Api;

pub const PATH: &str = "/validate";
pub const WEBHOOKS: &str = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
/// The account of `KubeVirt` itself: the model's.
const ITSELF: &str = "test";
const MOST_VOLUMES: usize = 256;
const LONGEST_SERIAL: usize = 256;

/// Has the API server ask at this URL before a VM or an instance is made or changed.
pub async fn announce(api: &Api, url: &str, authority: &str) {
    let bundle = base64_simd::STANDARD.encode_to_string(authority);
    let rule = json!({
        "apiGroups": ["kubevirt.io"],
        "apiVersions": ["v1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["virtualmachines", "virtualmachineinstances"],
        "scope": "Namespaced",
    });
    let of_balancers = json!({
        "apiGroups": ["loadbalancer.harvesterhci.io"],
        "apiVersions": ["v1beta1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": ["loadbalancers"],
        "scope": "Namespaced",
    });
    for (name, full, rule) in [
        ("virt-api-validator", "validator.kubevirt.io", rule),
        (
            "harvester-load-balancer-webhook",
            "validator.harvester-system.harvester-load-balancer-webhook",
            of_balancers,
        ),
    ] {
        let webhook = json!({
            "metadata": { "name": name },
            "webhooks": [{
                "name": full,
                "rules": [rule],
                "clientConfig": { "url": url, "caBundle": bundle },
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "failurePolicy": "Fail",
            }],
        });
        api.create(WEBHOOKS, &webhook).await;
    }
}

/// Answers a review.
pub async fn review(api: &Api, review: &Value) -> Value {
    let request = &review["request"];
    if request["kind"]["kind"] == "LoadBalancer" {
        return answer(request, of_balancer(api, request).await, (500, "InternalError"));
    }
    let kubevirts = api.list(&Kind::KubeVirt.all()).await;
    let has_vsock = kubevirts.first().is_some_and(|kubevirt| is_open(kubevirt, "VSOCK", 10));
    answer(request, judge(request, has_vsock), (422, "Invalid"))
}

fn answer(request: &Value, judged: Result<(), String>, (code, reason): (u16, &str)) -> Value {
    let answer = match judged {
        Ok(()) => json!({ "uid": request["uid"], "allowed": true }),
        Err(message) => json!({
            "uid": request["uid"],
            "allowed": false,
            "status": { "code": code, "reason": reason, "message": message },
        }),
    };
    json!({ "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "response": answer })
}

/// Whether a request may be done; else why not.
fn judge(request: &Value, has_vsock: bool) -> Result<(), String> {
    let (new, old) = (&request["object"], &request["oldObject"]);
    if new["metadata"]["deletionTimestamp"].is_string() {
        return Ok(());
    }
    let is_vm = request["kind"]["kind"] == "VirtualMachine";
    let spec_of = |object| if is_vm { at(object, "/spec/template/spec") } else { at(object, "/spec") };
    let (spec, before) = (spec_of(new), spec_of(old));
    if *spec == *before {
        return Ok(());
    }
    if !is_vm && old.is_object() && request["userInfo"]["username"] != ITSELF {
        return Err("the spec of an instance is changed by KubeVirt alone".to_owned());
    }
    if spec["domain"]["devices"]["autoattachVSOCK"] == true && !has_vsock {
        return Err("the feature gate VSOCK is not open".to_owned());
    }
    volumes(spec)?;
    items(&spec["domain"]["devices"]["disks"]).try_for_each(|disk| self::disk(spec, disk))?;
    if is_vm { Ok(()) } else { unchanged(spec, before) }
}

/// Whether Harvester lets a load balancer of a guest cluster be: it may not change what it is, and is not made for a cluster that is
/// being removed.
async fn of_balancer(api: &Api, request: &Value) -> Result<(), String> {
    let (new, old) = (&request["object"], &request["oldObject"]);
    let (space, name) = (namespace(new), text(&new["metadata"]["name"]));
    if new["metadata"]["deletionTimestamp"].is_string() || new["spec"]["workloadType"] != "cluster" {
        return Ok(());
    }
    if old.is_object() {
        for (field, what) in [("ipam", "IPAM"), ("workloadType", "WorkloadType")] {
            let (before, after) = (text(&old["spec"][field]), text(&new["spec"][field]));
            if before != after {
                let why = format!("can't change the {what} from {before} to {after}");
                return Err(format!(
                    "Internal error occurred: update loadbalancer {space}/{name} failed: {why}"
                ));
            }
        }
        return Ok(());
    }
    let cluster = text(&new["metadata"]["labels"]["cloudprovider.harvesterhci.io/cluster"]);
    let vms = api.list(&Kind::Vm.within(space)).await;
    let is_going = |vm: &&Value| {
        let (labels, annotations) = (&vm["metadata"]["labels"], &vm["metadata"]["annotations"]);
        labels["guestcluster.harvesterhci.io/name"] == cluster
            && labels["harvesterhci.io/creator"] == "docker-machine-driver-harvester"
            && annotations["harvesterhci.io/removeAllPersistentVolumeClaims"] == "true"
    };
    match vms.iter().find(is_going) {
        None => Ok(()),
        Some(vm) => Err(format!(
            "Internal error occurred: create loadbalancer {space}/{name} failed with guest cluster check: the vm {space}/{} shows \
             guest cluster {cluster} is being removed",
            text(&vm["metadata"]["name"])
        )),
    }
}

fn at<'v>(object: &'v Value, path: &str) -> &'v Value {
    object.pointer(path).unwrap_or(&Value::Null)
}

fn volumes(spec: &Value) -> Result<(), String> {
    let (mut names, mut count) = (BTreeSet::new(), 0);
    for volume in items(&spec["volumes"]) {
        let name = text(&volume["name"]);
        count += 1;
        if !names.insert(name) {
            return Err(format!("two volumes have the name {name}"));
        }
        if claim_of(volume).is_some_and(str::is_empty) {
            return Err(format!("the volume {name} has no claim"));
        }
        if is_hotpluggable(volume) && named(&spec["domain"]["devices"]["disks"], name).is_none() {
            return Err(format!("the volume {name} has no disk"));
        }
    }
    if count > MOST_VOLUMES {
        return Err(format!("there are more than {MOST_VOLUMES} volumes"));
    }
    Ok(())
}

fn disk(spec: &Value, disk: &Value) -> Result<(), String> {
    let name = text(&disk["name"]);
    let Some(volume) = named(&spec["volumes"], name) else {
        return Err(format!("the disk {name} has no volume"));
    };
    if items(&spec["domain"]["devices"]["disks"]).filter(|other| other["name"] == name).count() > 1 {
        return Err(format!("two disks have the name {name}"));
    }
    let serial = text(&disk["serial"]);
    let is_known = |letter: char| letter.is_ascii_alphanumeric() || "_.+-".contains(letter);
    if serial.len() > LONGEST_SERIAL || !serial.chars().all(is_known) {
        return Err(format!("the disk {name} has a serial that is too long or has other characters"));
    }
    if is_hotpluggable(volume) {
        let bus = disk["disk"]["bus"].as_str();
        let is_fit = if disk["lun"].is_object() {
            disk["lun"]["bus"].as_str().is_none_or(|bus| bus == "scsi")
        } else {
            bus.is_none_or(|bus| bus == "scsi" || bus == "virtio")
        };
        if !is_fit {
            return Err(format!("the disk {name} cannot be hot-plugged on its bus"));
        }
    }
    Ok(())
}

/// A volume or disk of a running instance comes or goes as a whole.
fn unchanged(spec: &Value, before: &Value) -> Result<(), String> {
    for volume in items(&before["volumes"]) {
        let name = text(&volume["name"]);
        let Some(now) = named(&spec["volumes"], name) else {
            if is_hotpluggable(volume) {
                continue;
            }
            return Err(format!("the volume {name} cannot be unplugged"));
        };
        let disk = |spec: &Value| named(&spec["domain"]["devices"]["disks"], name).cloned();
        if now != volume || disk(spec) != disk(before) {
            return Err(format!("the volume {name} cannot be changed"));
        }
    }
    Ok(())
}
