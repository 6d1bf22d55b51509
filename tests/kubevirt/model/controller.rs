//! virt-controller's part of VMs: their instances, and what is said of each in its VM.

use serde_json::{Value, json};

use super::objects::{Kind, is_deleted, items, name, namespace, text, uid};
use super::pace::Step;
use super::world::{Done, World};

const FINALIZER: &str = "kubevirt.io/virtualMachineControllerFinalize";
/// Keeps an instance until its pods are gone.
pub const KEEPS_INSTANCE: &str = "foregroundDeleteVirtualMachine";

impl World {
    pub(super) async fn vm(&mut self, key: &str) -> Done {
        let Some(vm) = self.get(Kind::Vm, key) else { return Ok(()) };
        let instance = self.get(Kind::Vmi, key);
        if is_deleted(&vm) {
            return match instance {
                Some(instance) if !is_deleted(&instance) => self.delete(Kind::Vmi, &instance, false).await,
                None if vm["metadata"]["finalizers"].is_array() => {
                    self.patch(Kind::Vm, &vm, &json!({ "metadata": { "finalizers": null } })).await.map(drop)
                }
                _ => Ok(()),
            };
        }
        let vm = self.complete(vm).await?;
        let is_final = |instance: &Value| is_final(instance) && !is_deleted(instance);
        match (is_to_run(&vm), &instance) {
            (true, None) if self.may(Step::Create, name(&vm), uid(&vm)) => {
                self.create(Kind::Vmi, &new_instance(&vm)).await?;
            }
            (false, Some(instance)) if !is_deleted(instance) => {
                return self.delete(Kind::Vmi, instance, false).await;
            }
            (true, Some(instance)) if is_final(instance) => {
                return self.delete(Kind::Vmi, instance, false).await;
            }
            _ => {}
        }
        self.copy_volumes(&vm, instance.as_ref()).await?;
        let Some(vm) = self.get(Kind::Vm, key) else { return Ok(()) };
        self.say(&vm).await
    }

    /// Gives a VM what each is given when it is made: a finalizer, and a UUID that it keeps.
    async fn complete(&mut self, vm: Value) -> Done<Value> {
        let finalizers = &vm["metadata"]["finalizers"];
        let firmware = &vm["spec"]["template"]["spec"]["domain"]["firmware"]["uuid"];
        if finalizers.is_array() && firmware.is_string() {
            return Ok(vm);
        }
        let mut change = json!({ "metadata": { "finalizers": [FINALIZER] } });
        if !firmware.is_string() {
            change["spec"]["template"]["spec"]["domain"]["firmware"]["uuid"] = json!(new_uuid());
        }
        self.patch(Kind::Vm, &vm, &change).await
    }

    /// Says in a VM's status how its instance is.
    async fn say(&mut self, vm: &Value) -> Done {
        let instance = self.get(Kind::Vmi, &super::objects::key(vm));
        let phase = instance.as_ref().map(|instance| text(&instance["status"]["phase"]));
        let is_ready = phase == Some("Running");
        let printable = match (phase, is_to_run(vm)) {
            _ if instance.as_ref().is_some_and(is_deleted) => "Stopping",
            (Some("Running"), _) if instance.as_ref().is_some_and(is_migrating) => "Migrating",
            (Some("Running"), _) => "Running",
            (Some(_), _) | (None, true) => "Starting",
            (None, false) => "Stopped",
        };
        let said = &vm["status"];
        let is_known = said["created"] == instance.is_some()
            && said["ready"] == is_ready
            && said["printableStatus"] == printable;
        if is_known {
            return Ok(());
        }
        let status =
            json!({ "created": instance.is_some(), "ready": is_ready, "printableStatus": printable });
        self.patch_status(Kind::Vm, vm, &status).await.map(drop)
    }
}

fn is_to_run(vm: &Value) -> bool {
    match vm["spec"]["runStrategy"].as_str() {
        Some(strategy) => matches!(strategy, "Always" | "RerunOnFailure" | "Once"),
        None => vm["spec"]["running"] == true,
    }
}

fn new_instance(vm: &Value) -> Value {
    let template = &vm["spec"]["template"];
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": name(vm),
            "namespace": namespace(vm),
            "labels": template["metadata"]["labels"],
            "annotations": template["metadata"]["annotations"],
            "finalizers": [KEEPS_INSTANCE],
            "ownerReferences": [owner(Kind::Vm, vm)],
        },
        "spec": template["spec"],
    })
}

/// A reference to the object that another belongs to.
pub fn owner(kind: Kind, object: &Value) -> Value {
    let (named, version) = kind.named();
    json!({
        "apiVersion": version,
        "kind": named,
        "name": name(object),
        "uid": uid(object),
        "controller": true,
        "blockOwnerDeletion": true,
    })
}

/// Whether an object belongs to the one of this UID.
pub fn is_owned_by(object: &Value, owner: &str) -> bool {
    items(&object["metadata"]["ownerReferences"]).any(|reference| reference["uid"] == owner)
}

pub fn is_final(instance: &Value) -> bool {
    matches!(text(&instance["status"]["phase"]), "Succeeded" | "Failed")
}

/// Whether an instance is being moved to another node.
pub fn is_migrating(instance: &Value) -> bool {
    let state = &instance["status"]["migrationState"];
    state["migrationUid"].is_string() && state["completed"] != true && state["failed"] != true
}

/// A random UUID, of the kernel's making.
pub fn new_uuid() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap().trim().to_owned()
}
