//! Changes of a VM's spec, as JSON patches that fail if the VM has been changed since it was read. Pure.

use serde_json::{Value, json};

use super::super::objects::VirtualMachine;
use crate::host::backends::kubevirt::names::Claim;

/// JSON pointers to the volumes in a VM's spec, and to the disks that they back.
const VOLUMES: &str = "/spec/template/spec/volumes";
const DISKS: &str = "/spec/template/spec/domain/devices/disks";

/// Disk to plug or unplug.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// Claim that backs it, in the VM's namespace.
    pub claim: Claim,
    /// True if the guest may not write.
    pub read_only: bool,
    /// True if another program plugged it, with a volume named after the claim. guestlet itself never plugs a disk
    /// this way.
    pub as_is: bool,
}

impl Disk {
    /// Returns the name of its volume in the VM.
    pub fn volume(&self) -> String {
        if self.as_is { self.claim.name.clone() } else { self.claim.volume() }
    }

    /// Returns the disk entry for the domain's devices.
    pub fn device(&self) -> Value {
        let mut target = json!({"bus": "scsi"});
        if self.read_only {
            target["readonly"] = true.into();
        }
        json!({"name": self.volume(), "serial": self.claim.serial(), "disk": target})
    }

    /// Returns the source of its volume.
    pub fn source(&self) -> Value {
        let mut claim = json!({"claimName": self.claim.name, "hotpluggable": true});
        if self.read_only {
            claim["readOnly"] = true.into();
        }
        json!({"persistentVolumeClaim": claim})
    }
}

/// Builds the patch that adds disks to a VM's spec.
pub fn plug(vm: &VirtualMachine, disks: &[Disk]) -> Value {
    let spec = &vm.spec.template.spec;
    let mut steps = vec![unchanged(vm)];
    for (path, is_empty) in
        [(VOLUMES, spec.volumes.is_empty()), (DISKS, spec.domain.devices.disks.is_empty())]
    {
        // The path "…/-" of an "add" requires an existing list.
        if is_empty {
            steps.push(json!({"op": "add", "path": path, "value": []}));
        }
    }
    for disk in disks {
        let mut volume = disk.source();
        volume["name"] = disk.volume().into();
        steps.push(json!({"op": "add", "path": format!("{VOLUMES}/-"), "value": volume}));
        steps.push(json!({"op": "add", "path": format!("{DISKS}/-"), "value": disk.device()}));
    }
    steps.into()
}

/// Builds the patch that removes the volumes with these names, and their disks, from a VM's spec.
pub fn unplug(vm: &VirtualMachine, names: &[String]) -> Value {
    let spec = &vm.spec.template.spec;
    let mut steps = vec![unchanged(vm)];
    let volumes = spec.volumes.iter().map(|volume| &volume.name).collect::<Vec<_>>();
    let disks = spec.domain.devices.disks.iter().map(|disk| &disk.name).collect::<Vec<_>>();
    for (path, listed) in [(VOLUMES, volumes), (DISKS, disks)] {
        // Remove in descending order, so that the remaining indexes stay valid.
        for (at, name) in listed.iter().enumerate().rev().filter(|(_, name)| names.contains(name)) {
            let path = format!("{path}/{at}");
            steps.push(json!({"op": "test", "path": format!("{path}/name"), "value": name}));
            steps.push(json!({"op": "remove", "path": path}));
        }
    }
    steps.into()
}

fn unchanged(vm: &VirtualMachine) -> Value {
    json!({"op": "test", "path": "/metadata/resourceVersion", "value": vm.metadata.resource_version})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str) -> Disk {
        let claim = Claim { namespace: "dev".to_owned(), name: name.to_owned() };
        Disk { claim, read_only: false, as_is: false }
    }

    fn applied(mut vm: Value, steps: Value) -> Value {
        let patch: json_patch::Patch = serde_json::from_value(steps).unwrap();
        json_patch::patch(&mut vm, &patch).unwrap();
        vm
    }

    #[test]
    fn what_is_plugged_and_unplugged_leaves_everything_else_as_it_was() {
        let others = json!({
            "metadata": {"name": "a", "resourceVersion": "7"},
            "spec": {"template": {"spec": {
                "volumes": [{"name": "root", "containerDisk": {"image": "x"}}],
                "domain": {"devices": {"disks": [{"name": "root", "bootOrder": 1, "disk": {}}], "rng": {}}},
            }}},
        });
        let bare = json!({
            "metadata": {"name": "a", "resourceVersion": "7"},
            "spec": {"template": {"spec": {"domain": {"devices": {}}}}},
        });
        for vm in [others, bare] {
            let read = |vm: &Value| serde_json::from_value::<VirtualMachine>(vm.clone()).unwrap();
            let disks = [disk("one"), disk("two"), Disk { read_only: true, ..disk("three") }];
            let with = applied(vm.clone(), plug(&read(&vm), &disks));
            let spec = &with["spec"]["template"]["spec"];
            let last = |list: &Value| list.as_array().unwrap().last().cloned().unwrap();
            let name = disks[2].claim.volume();
            let source = json!({"claimName": "three", "hotpluggable": true, "readOnly": true});
            assert_eq!(last(&spec["volumes"]), json!({"name": name, "persistentVolumeClaim": source}));
            let serial = disks[2].claim.serial();
            let device = json!({"name": name, "serial": serial, "disk": {"bus": "scsi", "readonly": true}});
            assert_eq!(last(&spec["domain"]["devices"]["disks"]), device);

            let names = [disks[2].claim.volume(), disks[0].claim.volume()];
            let fewer = applied(with.clone(), unplug(&read(&with), &names));
            let left = fewer["spec"]["template"]["spec"]["volumes"].as_array().unwrap().len();
            let before = vm["spec"]["template"]["spec"]["volumes"].as_array().map_or(0, Vec::len);
            assert_eq!(left, before + 1);
            let none = applied(fewer.clone(), unplug(&read(&fewer), &[disks[1].claim.volume()]));
            let listed = |vm: &Value| read(vm).spec.template.spec;
            assert_eq!(listed(&none), listed(&vm));
        }
    }

    #[test]
    fn a_vm_that_has_changed_is_left_alone() {
        let vm = VirtualMachine {
            metadata: serde_json::from_value(json!({"resourceVersion": "7"})).unwrap(),
            ..VirtualMachine::default()
        };
        let patch: json_patch::Patch = serde_json::from_value(plug(&vm, &[disk("one")])).unwrap();
        let mut changed = json!({"metadata": {"resourceVersion": "8"}, "spec": {"template": {"spec": {"domain": {"devices": {}}}}}});
        assert!(json_patch::patch(&mut changed, &patch).is_err());
    }
}
