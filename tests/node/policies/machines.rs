//! VirtualMachines, which the controller changes.

use guestlet::host::backends::kubevirt::hotplug::patch::{Disk, plug, unplug};
use guestlet::host::backends::kubevirt::names::Claim;
use guestlet::host::backends::kubevirt::objects::VirtualMachine;
use serde_json::{Value, json};

use super::{Bench, Change, SPACE};
use crate::cluster::wait;
use crate::scratch::{JSON_PATCH, Who};

const OURS: &str = "guestlet-disk-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f";
/// A claim of Harvester's CSI driver, and what that calls its volume.
const THEIRS: &str = "pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f";

/// A VM with volumes of its own, some of which are called like guestlet's, one of guestlet's, one that Harvester's driver has
/// plugged, and others that somebody else has.
fn machine(name: &str) -> Value {
    let expression = |key: &str| json!({"key": key, "operator": "In", "values": ["true"]});
    json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"namespace": SPACE, "name": name, "labels": {"a": "1"}, "annotations": {"a": "1"}},
        "spec": {"runStrategy": "Always", "template": {
            "metadata": {"labels": {"a": "1"}},
            "spec": {
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [expression("example.com/a"), expression("network.harvesterhci.io/mgmt")]},
                ]}}},
                "domain": {
                    "cpu": {"cores": 1},
                    "firmware": {"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"},
                    "machine": {"type": "q35"},
                    "devices": {"disks": [
                        {"name": "root", "bootOrder": 1, "disk": {"bus": "virtio"}},
                        {"name": OURS, "serial": &OURS[9..], "disk": {"bus": "scsi"}},
                        {"name": THEIRS, "disk": {"bus": "scsi"}},
                        {"name": "other", "disk": {"bus": "scsi"}},
                        {"name": "fixed", "disk": {"bus": "scsi"}},
                        {"name": "guestlet-seed", "disk": {"bus": "scsi"}},
                        {"name": "guestlet-disk-fixed", "disk": {"bus": "scsi"}},
                        {"name": "guestlet-disk-image", "disk": {"bus": "scsi"}},
                    ]},
                },
                "volumes": [
                    {"name": "root", "persistentVolumeClaim": {"claimName": "root"}},
                    {"name": OURS, "persistentVolumeClaim": {"claimName": "data", "hotpluggable": true}},
                    {"name": THEIRS, "persistentVolumeClaim": {"claimName": THEIRS, "hotpluggable": true}},
                    {"name": "other", "persistentVolumeClaim": {"claimName": "x", "hotpluggable": true}},
                    {"name": "fixed", "persistentVolumeClaim": {"claimName": "fixed"}},
                    {"name": "guestlet-seed", "cloudInitNoCloud": {"userData": "#cloud-config"}},
                    {"name": "guestlet-disk-fixed", "persistentVolumeClaim": {"claimName": "guestlet-disk-fixed"}},
                    {"name": "guestlet-disk-image", "containerDisk": {"image": "x"}},
                ],
            },
        }},
    })
}

/// The same without anything that could be missing.
fn bare() -> Value {
    let mut bare = machine("bare");
    bare["spec"]["template"]["spec"] = json!({"domain": {"devices": {}}});
    bare
}

const TEMPLATE: &str = "/spec/template/spec";

fn step(op: &str, path: &str, value: &Value) -> Value {
    json!([{"op": op, "path": path, "value": value}])
}

/// What the controller does, and what webhooks add to that.
fn plugging(vm: &Value) -> Vec<Change> {
    let read: VirtualMachine = serde_json::from_value(vm.clone()).unwrap();
    let disks = [false, true].map(|read_only| Disk {
        claim: Claim::of_name(SPACE, &format!("pvc-{read_only}")),
        read_only,
        as_is: false,
    });
    let change = |name: &str, steps: Value| Change::of(vm, name, JSON_PATCH, steps);
    let mut changes = vec![
        change("plug", plug(&read, &disks)),
        change("unplug", unplug(&read, &[OURS.to_owned()])),
        change("unplug what was adopted", unplug(&read, &[THEIRS.to_owned()])),
        change("unplug both", unplug(&read, &[OURS.to_owned(), THEIRS.to_owned()])),
    ];
    let network = json!({"key": "network.harvesterhci.io/other", "operator": "In", "values": ["true"]});
    let terms = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [network]},
    ]}});
    let mut added = vec![("resources", "/domain/resources", json!({}))];
    if vm["metadata"]["name"] == "bare" {
        added.extend([
            ("architecture", "/architecture", json!("amd64")),
            ("grace period", "/terminationGracePeriodSeconds", json!(120)),
            ("firmware", "/domain/firmware", json!({"uuid": "5d307ca9-b3ef-428c-8861-06e72d69f223"})),
            ("machine", "/domain/machine", json!({"type": "q35"})),
            ("affinity", "/affinity", json!({})),
            ("networks", "/affinity", json!({"nodeAffinity": terms})),
        ]);
    } else {
        let key = "/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchExpressions";
        added.push(("networks", key, json!([vm_expression(vm), network])));
    }
    changes.extend(added.iter().map(|(name, at, value)| {
        let mut steps = plug(&read, &disks);
        steps.as_array_mut().unwrap().push(step("add", &format!("{TEMPLATE}{at}"), value)[0].take());
        change(&format!("plug, and {name}"), steps)
    }));
    changes
}

fn vm_expression(vm: &Value) -> Value {
    let affinity = &vm["spec"]["template"]["spec"]["affinity"]["nodeAffinity"];
    affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]["matchExpressions"][0]
        .clone()
}

/// What the controller has no business with.
fn meddling(vm: &Value) -> Vec<Change> {
    let volume = |name: &str, source: Value| {
        let mut volume = source;
        volume["name"] = name.into();
        volume
    };
    let of = |at: &str| format!("{TEMPLATE}{at}");
    let fixed = volume("guestlet-disk-x", json!({"persistentVolumeClaim": {"claimName": "x"}}));
    let foreign = volume("data", json!({"persistentVolumeClaim": {"claimName": "x", "hotpluggable": true}}));
    // The name of a claim, as who plugs it by hand calls the volume.
    let by_hand = volume(
        "guestlet-x",
        json!({"persistentVolumeClaim": {"claimName": "guestlet-x", "hotpluggable": true}}),
    );
    let image = volume("guestlet-disk-x", json!({"containerDisk": {"image": "x"}}));
    let hotplugged = json!({"persistentVolumeClaim": {"claimName": "x", "hotpluggable": true}});
    let swapped = volume(OURS, json!({"containerDisk": {"image": "x"}}));
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "example.com/a", "operator": "In", "values": ["mine"]}]},
    ]}}});
    let read: VirtualMachine = serde_json::from_value(vm.clone()).unwrap();
    let serial = json!({"name": THEIRS, "serial": "x", "disk": {"bus": "scsi"}});
    let steps = [
        ("one of another name than its claim", unplug(&read, &["other".to_owned()])),
        ("one that is fixed", unplug(&read, &["fixed".to_owned()])),
        ("cloud-init", unplug(&read, &["guestlet-seed".to_owned()])),
        ("one that is fixed, and called like ours", unplug(&read, &["guestlet-disk-fixed".to_owned()])),
        ("an image that is called like ours", unplug(&read, &["guestlet-disk-image".to_owned()])),
        ("the disk of such an image", step("remove", &of("/domain/devices/disks/7"), &Value::Null)),
        ("an adopted one, and a foreign one", unplug(&read, &[THEIRS.to_owned(), "other".to_owned()])),
        ("an adopted one without its disk", step("remove", &of("/volumes/2"), &Value::Null)),
        ("the disk of an adopted one", step("remove", &of("/domain/devices/disks/2"), &Value::Null)),
        ("a serial number for an adopted one", step("replace", &of("/domain/devices/disks/2"), &serial)),
        (
            "the claim of an adopted one",
            step("replace", &of("/volumes/2/persistentVolumeClaim/claimName"), &json!("x")),
        ),
        ("a foreign volume added", step("add", &of("/volumes/-"), &foreign)),
        ("a volume that is called like its claim", step("add", &of("/volumes/-"), &by_hand)),
        ("a volume that is not hot-plugged", step("add", &of("/volumes/-"), &fixed)),
        ("an image", step("add", &of("/volumes/-"), &image)),
        (
            "a fixed one that is called like ours becomes a claim",
            step("replace", &of("/volumes/6"), &volume("guestlet-disk-fixed", hotplugged)),
        ),
        ("ours becomes an image", step("replace", &of("/volumes/1"), &swapped)),
        ("a foreign volume removed", step("remove", &of("/volumes/0"), &Value::Null)),
        ("another claim", step("replace", &of("/volumes/0/persistentVolumeClaim/claimName"), &json!("x"))),
        ("a foreign disk removed", step("remove", &of("/domain/devices/disks/0"), &Value::Null)),
        ("another boot order", step("replace", &of("/domain/devices/disks/0/bootOrder"), &json!(2))),
        ("our disk boots", step("add", &of("/domain/devices/disks/1/bootOrder"), &json!(1))),
        (
            "our disk is a LUN",
            step("replace", &of("/domain/devices/disks/1"), &json!({"name": OURS, "lun": {"bus": "scsi"}})),
        ),
        ("stopped", step("replace", "/spec/runStrategy", &json!("Halted"))),
        ("a label", step("replace", "/metadata/labels/a", &json!("2"))),
        ("a new label", step("add", "/metadata/labels/b", &json!("2"))),
        ("an annotation", step("remove", "/metadata/annotations", &Value::Null)),
        ("a finalizer", step("add", "/metadata/finalizers", &json!(["example.com/mine"]))),
        ("a label of the template", step("add", "/spec/template/metadata/labels/b", &json!("2"))),
        (
            "an annotation of the template",
            step("add", "/spec/template/metadata/annotations", &json!({"b": "2"})),
        ),
        ("the processors", step("replace", &of("/domain/cpu/cores"), &json!(64))),
        ("no processors", step("remove", &of("/domain/cpu"), &Value::Null)),
        ("the machine", step("replace", &of("/domain/machine/type"), &json!("pc"))),
        (
            "the firmware",
            step("replace", &of("/domain/firmware/uuid"), &json!("6d307ca9-b3ef-428c-8861-06e72d69f223")),
        ),
        ("another device", step("add", &of("/domain/devices/rng"), &json!({}))),
        ("the affinity", step("replace", &of("/affinity"), &affinity)),
        ("no affinity", step("remove", &of("/affinity"), &Value::Null)),
    ];
    steps.into_iter().map(|(name, steps)| Change::of(vm, name, JSON_PATCH, steps)).collect()
}

#[test]
fn the_controller_may_change_volumes_and_disks_of_vms_and_nothing_else() {
    wait(async {
        let Some(bench) = Bench::start("the controller's policy for VMs").await else { return };
        for vm in [machine("web"), bare()] {
            let vm = bench.scratch.apply(&vm).await;
            for change in plugging(&vm) {
                bench.admits(Who::Controller, &change).await;
            }
        }
        let vm = bench.scratch.apply(&machine("web")).await;
        for change in meddling(&vm) {
            bench.refuses(Who::Controller, &change).await;
        }
    });
}
