//! The admission policies: what the accounts of guestlet need is admitted, and everything else is not. Opt-in, because the
//! gate's API server has no such policies: [`Scratch`].

use guestlet::host::backends::kubevirt::hotplug::patch::{Disk, plug, unplug};
use guestlet::host::backends::kubevirt::names::Claim;
use guestlet::host::backends::kubevirt::objects::VirtualMachine;
use http::Method;
use serde_json::{Value, json};

use crate::cluster::wait;
use crate::patience::until;
use crate::scratch::{APPLY, Answer, JSON_PATCH, MERGE, Scratch, Who, path};

const SPACE: &str = "guestlet-policies";
const OURS: &str = "guestlet-disk-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f";
/// A claim of Harvester's CSI driver, and what that calls its volume.
const THEIRS: &str = "pvc-6f0c2a0e-0b7a-4b8e-9a55-0a1b2c3d4e5f";
/// What a refusal names.
const POLICY: &str = "ValidatingAdmissionPolicy 'guestlet-";

/// A scratch cluster with the policies in force, and objects to be changed. Nothing of what the tests write there stays.
struct Bench {
    scratch: Scratch,
}

impl Bench {
    async fn start(test: &str) -> Option<Self> {
        let scratch = Scratch::of_the_environment(test).await?;
        scratch.install().await;
        scratch.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})).await;
        let bench = Self { scratch };
        // The API server hears of policies, and of roles, a little later.
        let claim = claim("theirs", &json!({}));
        until("the policies are in force", async || {
            let refused = bench.write(Who::Controller, Method::POST, &claims(), MERGE, &claim).await.err()?;
            refused.contains(POLICY).then_some(())
        })
        .await;
        Some(bench)
    }

    async fn write(&self, who: Who, method: Method, path: &str, kind: &str, body: &Value) -> Answer {
        let mark = if path.contains('?') { '&' } else { '?' };
        let path = format!("{path}{mark}dryRun=All&fieldManager=test");
        let kind = if method == Method::POST { "application/json" } else { kind };
        self.scratch.ask(who, method, &path, kind, body).await
    }

    async fn admits(&self, who: Who, change: &Change) {
        let Change { name, method, path, kind, body } = change;
        let answer = self.write(who, method.clone(), path, kind, body).await;
        assert!(answer.is_ok(), "{who:?}: {name}: {answer:?}");
    }

    /// A policy does not admit it, which an administrator could do.
    async fn refuses(&self, who: Who, change: &Change) {
        self.admits(Who::Administrator, change).await;
        let Change { name, method, path, kind, body } = change;
        let error = self.write(who, method.clone(), path, kind, body).await.expect_err(name);
        assert!(error.contains(POLICY) && !error.contains("resulted in error"), "{who:?}: {name}: {error}");
    }
}

/// A change that somebody would make.
struct Change {
    name: String,
    method: Method,
    path: String,
    kind: &'static str,
    body: Value,
}

impl Change {
    fn of(object: &Value, name: &str, kind: &'static str, body: Value) -> Self {
        Self { name: name.to_owned(), method: Method::PATCH, path: path(object), kind, body }
    }
}

fn claims() -> String {
    format!("/api/v1/namespaces/{SPACE}/persistentvolumeclaims")
}

fn claim(name: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"namespace": SPACE, "name": name, "labels": labels, "annotations": {"example.com/a": "1"}},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "volumeMode": "Block",
            "storageClassName": "guestlet-policies",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    })
}

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

#[test]
fn the_controller_may_write_claims_of_guestlet_only() {
    wait(async {
        let Some(bench) = Bench::start("the controller's policy for claims").await else { return };
        let class = json!({
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": "guestlet-policies"},
            "provisioner": "nobody.test",
            "allowVolumeExpansion": true,
        });
        bench.scratch.apply(&class).await;
        let labels = json!({"app.kubernetes.io/managed-by": "guestlet"});
        let (ours, theirs) = (claim("ours", &labels), claim("theirs", &json!({})));
        for claim in [&ours, &theirs] {
            bench.scratch.apply(claim).await;
            let bound = json!({"status": {"phase": "Bound"}});
            let status = path(claim) + "/status";
            bench.scratch.ask(Who::Administrator, Method::PATCH, &status, MERGE, &bound).await.unwrap();
        }
        let make = |name: &str, body: Value| {
            let (name, kind) = (name.to_owned(), "application/json");
            Change { name, method: Method::POST, path: claims(), kind, body }
        };
        let mut chosen = claim("new", &labels);
        chosen["spec"]["volumeName"] = "mine".into();
        let delete =
            |of: &Value| Change { method: Method::DELETE, ..Change::of(of, "delete", MERGE, Value::Null) };
        let change = |of: &Value, name: &str, body: Value| Change::of(of, name, MERGE, body);
        let published = json!({"metadata": {"annotations": {"guestlet.io/published": "{}"}}});
        let size = json!({"spec": {"resources": {"requests": {"storage": "2Gi"}}}});
        let good = [
            make("make", claim("new", &labels)),
            change(&ours, "publish", published.clone()),
            change(&ours, "grow", size.clone()),
            delete(&ours),
        ];
        for change in &good {
            bench.admits(Who::Controller, change).await;
        }
        let bad = [
            make("make a foreign one", claim("new", &json!({}))),
            make("choose its volume", chosen),
            change(&theirs, "publish a foreign one", published),
            change(&theirs, "grow a foreign one", size),
            delete(&theirs),
            change(&theirs, "take one over", json!({"metadata": {"labels": labels}})),
            change(
                &ours,
                "disown one",
                json!({"metadata": {"labels": {"app.kubernetes.io/managed-by": null}}}),
            ),
            change(&ours, "a label", json!({"metadata": {"labels": {"a": "1"}}})),
            change(&ours, "an annotation", json!({"metadata": {"annotations": {"example.com/a": "2"}}})),
            change(&ours, "a new annotation", json!({"metadata": {"annotations": {"example.com/b": "2"}}})),
            change(&ours, "a finalizer", json!({"metadata": {"finalizers": ["example.com/mine"]}})),
        ];
        for change in &bad {
            bench.refuses(Who::Controller, change).await;
        }
    });
}

#[test]
fn the_controller_may_write_network_filesystems_of_guestlet_only() {
    wait(async {
        let Some(bench) = Bench::start("the controller's policy for shares").await else { return };
        let share = |name: &str, labels: &Value| {
            json!({
                "apiVersion": "harvesterhci.io/v1beta1",
                "kind": "NetworkFilesystem",
                "metadata": {"namespace": "harvester-system", "name": name, "labels": labels},
                "spec": {"networkFSName": name, "desiredState": "Enabled"},
            })
        };
        let labels = json!({"app.kubernetes.io/managed-by": "guestlet"});
        let (ours, theirs) = (share("ours", &labels), share("theirs", &json!({})));
        for share in [&ours, &theirs] {
            bench.scratch.apply(share).await;
        }
        let make = |name: &str, body: Value| {
            let path = path(&body);
            let path = path.rsplit_once('/').unwrap().0.to_owned();
            Change { name: name.to_owned(), method: Method::POST, path, kind: "application/json", body }
        };
        let delete =
            |of: &Value| Change { method: Method::DELETE, ..Change::of(of, "delete", MERGE, Value::Null) };
        let change = |of: &Value, name: &str, body: Value| Change::of(of, name, MERGE, body);
        let wanted = json!({
            "metadata": {"annotations": {"guestlet.io/claim-version": "7"}},
            "spec": {"desiredState": "Disabled"},
        });
        let good =
            [make("make", share("new", &labels)), change(&ours, "end it", wanted.clone()), delete(&ours)];
        for change in &good {
            bench.admits(Who::Controller, change).await;
        }
        let mut other = share("new", &labels);
        other["spec"]["networkFSName"] = "theirs".into();
        let bad = [
            make("make a foreign one", share("new", &json!({}))),
            make("serve another volume", other),
            change(&theirs, "end a foreign one", wanted),
            change(&theirs, "take one over", json!({"metadata": {"labels": labels}})),
            delete(&theirs),
            change(&ours, "serve another volume", json!({"spec": {"networkFSName": "theirs"}})),
            change(&ours, "a finalizer", json!({"metadata": {"finalizers": ["example.com/mine"]}})),
            change(&ours, "an annotation", json!({"metadata": {"annotations": {"example.com/a": "2"}}})),
            change(
                &ours,
                "disown one",
                json!({"metadata": {"labels": {"app.kubernetes.io/managed-by": null}}}),
            ),
        ];
        for change in &bad {
            bench.refuses(Who::Controller, change).await;
        }
    });
}

/// A guest of this name that an instance of this UID owns.
fn guest(name: &str, uid: &Value) -> Value {
    let owner =
        json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": name, "uid": uid});
    json!({
        "apiVersion": "guestlet.io/v1alpha1",
        "kind": "Guest",
        "metadata": {"namespace": SPACE, "name": name, "ownerReferences": [owner]},
    })
}

fn owned(name: &str, uid: &Value) -> Change {
    let guest = guest(name, uid);
    Change {
        path: path(&guest) + "?force=true",
        ..Change::of(&guest, &format!("make {name}"), APPLY, guest.clone())
    }
}

fn status(name: &str, host: &str) -> Change {
    let mut guest = guest(name, &Value::Null);
    let path = path(&guest) + "/status?force=true";
    guest["metadata"].as_object_mut().unwrap().remove("ownerReferences");
    guest["status"] = json!({"session": "Connected", "host": host});
    Change { path, ..Change::of(&guest, &format!("{name} on {host}"), APPLY, guest.clone()) }
}

#[test]
fn a_node_may_write_guests_that_run_on_it_only() {
    wait(async {
        let Some(bench) = Bench::start("the nodes' policy for guests").await else { return };
        let instance = |name: &str, node: &str| {
            json!({
                "apiVersion": "kubevirt.io/v1",
                "kind": "VirtualMachineInstance",
                "metadata": {"namespace": SPACE, "name": name, "labels": {"kubevirt.io/nodeName": node}},
                "spec": {"domain": {"devices": {}}},
                "status": {"phase": "Running", "nodeName": node},
            })
        };
        let mut uids = Vec::new();
        for (name, node) in [("web", "n1"), ("db", "n2")] {
            uids.push(bench.scratch.apply(&instance(name, node)).await["metadata"]["uid"].take());
        }
        let (web, db) = (&uids[0], &uids[1]);
        until("the policy has heard of them", async || {
            let change = owned("web", web);
            bench.write(Who::Node("n1"), Method::PATCH, &change.path, APPLY, &change.body).await.ok()
        })
        .await;
        for guest in [guest("web", web), guest("db", db)] {
            bench.scratch.apply(&guest).await;
        }
        bench.admits(Who::Node("n1"), &status("web", "n1")).await;
        bench.admits(Who::Node("n2"), &owned("db", db)).await;
        bench.admits(Who::Node("n2"), &status("db", "n2")).await;
        let bad = [
            (Who::Node("n2"), owned("web", web)),
            (Who::Node("n2"), status("web", "n2")),
            (Who::Node("n2"), status("web", "n1")),
            (Who::Node("n1"), status("web", "n2")),
            (Who::Node("n1"), owned("web", db)),
            (
                Who::Node("n1"),
                Change {
                    body: {
                        let mut guest = guest("gone", db);
                        guest["metadata"]["ownerReferences"] = json!([]);
                        guest
                    },
                    ..owned("gone", db)
                },
            ),
            (Who::Nowhere, owned("web", web)),
            (Who::Nowhere, status("web", "n1")),
            (Who::Node(""), status("web", "n1")),
        ];
        for (who, change) in &bad {
            bench.refuses(*who, change).await;
        }

        // It is migrated.
        bench.scratch.apply(&instance("web", "n2")).await;
        let change = status("web", "n2");
        until("the policy has heard of the migration", async || {
            bench.write(Who::Node("n2"), Method::PATCH, &change.path, APPLY, &change.body).await.ok()
        })
        .await;
        bench.refuses(Who::Node("n1"), &status("web", "n1")).await;
        bench.scratch.apply(&instance("web", "n1")).await;
    });
}

#[test]
fn a_node_may_write_events_in_its_own_name_only() {
    wait(async {
        let Some(bench) = Bench::start("the nodes' policy for events").await else { return };
        let event = |host: &str, component: &str, kind: &str| Change {
            name: format!("{component} on {host} of a {kind}"),
            method: Method::POST,
            path: format!("/api/v1/namespaces/{SPACE}/events"),
            kind: "application/json",
            body: json!({
                "metadata": {"namespace": SPACE, "generateName": "web."},
                "involvedObject": {"apiVersion": "kubevirt.io/v1", "kind": kind, "name": "web", "namespace": SPACE},
                "source": {"component": component, "host": host},
                "reason": "GuestFrozen",
                "type": "Normal",
            }),
        };
        let instance = "VirtualMachineInstance";
        bench.admits(Who::Node("n1"), &event("n1", "guestlet-host", instance)).await;
        let bad = [
            (Who::Node("n2"), event("n1", "guestlet-host", instance)),
            (Who::Node("n1"), event("n1", "kubelet", instance)),
            (Who::Node("n1"), event("n1", "guestlet-host", "Pod")),
            (Who::Nowhere, event("n1", "guestlet-host", instance)),
            (Who::Nowhere, event("", "guestlet-host", instance)),
        ];
        for (who, change) in &bad {
            bench.refuses(*who, change).await;
        }
    });
}
