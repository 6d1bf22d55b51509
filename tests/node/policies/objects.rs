//! Claims, `NetworkFilesystems` and load balancers, which the controller makes, changes and deletes.

use http::Method;
use serde_json::{Value, json};

use super::{Bench, Change, SPACE, claim, claims};
use crate::cluster::wait;
use crate::scratch::{MERGE, Who, path};

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

#[test]
fn the_controller_may_write_load_balancers_of_guest_clusters_only() {
    wait(async {
        let Some(bench) = Bench::start("the controller's policy for load balancers").await else { return };
        let balancer = |name: &str, spec: &Value| {
            json!({
                "apiVersion": "loadbalancer.harvesterhci.io/v1beta1",
                "kind": "LoadBalancer",
                "metadata": {
                    "namespace": SPACE, "name": name,
                    "labels": { "cloudprovider.harvesterhci.io/cluster": "dev" },
                    "annotations": { "loadbalancer.harvesterhci.io/cluster": "dev", "example.com/a": "1" },
                },
                "spec": spec,
            })
        };
        let of_cluster = json!({"workloadType": "cluster", "ipam": "pool"});
        let listener = json!({"name": "web", "port": 80, "protocol": "TCP", "backendPort": 80});
        let of_vms = json!({"workloadType": "vm", "ipam": "pool", "listeners": [listener]});
        let mut ours = balancer("ours", &of_cluster);
        let conditions = json!([{"type": "Ready", "status": "True"}]);
        let allocated = json!({"ip": "192.0.2.7", "ipPool": "lan"});
        ours["status"] = json!({"allocatedAddress": allocated, "conditions": conditions});
        let theirs = balancer("theirs", &of_vms);
        for balancer in [&ours, &theirs] {
            bench.scratch.apply(balancer).await;
        }
        let make = |name: &str, body: Value| {
            let path = path(&body).rsplit_once('/').unwrap().0.to_owned();
            Change { name: name.to_owned(), method: Method::POST, path, kind: "application/json", body }
        };
        let delete =
            |of: &Value| Change { method: Method::DELETE, ..Change::of(of, "delete", MERGE, Value::Null) };
        let change = |of: &Value, name: &str, body: Value| Change::of(of, name, MERGE, body);
        let wanted = json!({"metadata": {"annotations": {"guestlet.io/wanted": "{}"}}});
        let good = [
            make("make", balancer("new", &of_cluster)),
            change(&ours, "say what is wanted", wanted.clone()),
            change(&ours, "say its address", json!({"status": {"address": "192.0.2.7"}})),
            change(
                &ours,
                "as the webhook",
                json!({"metadata": {"annotations": {"loadbalancer.harvesterhci.io/project": ""}}}),
            ),
            delete(&ours),
        ];
        for change in &good {
            bench.admits(Who::Controller, change).await;
        }
        let mut nobodys = balancer("new", &of_cluster);
        nobodys["metadata"]["labels"] = json!({});
        let mut given = balancer("new", &of_cluster);
        given["status"] = json!({"allocatedAddress": {"ip": "192.0.2.9"}});
        let bad = [
            make("make one of VMs", balancer("new", &of_vms)),
            make("make one of no cluster", nobodys),
            make("give it an address", given),
            change(&ours, "another address", json!({"status": {"allocatedAddress": {"ip": "192.0.2.9"}}})),
            change(&ours, "a condition", json!({"status": {"conditions": []}})),
            change(&ours, "another pool", json!({"spec": {"ipPool": "theirs"}})),
            change(&ours, "make it one of VMs", json!({"spec": of_vms})),
            change(
                &ours,
                "another cluster",
                json!({"metadata": {"labels": {"cloudprovider.harvesterhci.io/cluster": "prod"}}}),
            ),
            change(&ours, "an annotation", json!({"metadata": {"annotations": {"example.com/a": "2"}}})),
            change(&ours, "a finalizer", json!({"metadata": {"finalizers": ["example.com/mine"]}})),
            change(&theirs, "a foreign one", wanted),
            change(&theirs, "take one over", json!({"spec": of_cluster})),
            delete(&theirs),
        ];
        for change in &bad {
            bench.refuses(Who::Controller, change).await;
        }
    });
}

#[test]
fn the_controller_may_write_what_snapshots_are_worth_and_nothing_else_of_them() {
    wait(async {
        let Some(bench) = Bench::start("the controller's policy for snapshots").await else { return };
        for (_, kind) in crate::snapshot_kinds::KINDS {
            bench.scratch.kind(&serde_saphyr::from_str(kind).unwrap()).await;
        }
        let of_claim = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshot",
            "metadata": {"namespace": SPACE, "name": "theirs", "annotations": {"example.com/a": "1"}},
            "spec": {"source": {"persistentVolumeClaimName": "theirs"}},
        });
        let of_vm = json!({
            "apiVersion": "snapshot.kubevirt.io/v1beta1",
            "kind": "VirtualMachineSnapshot",
            "metadata": {"namespace": SPACE, "name": "theirs", "annotations": {"example.com/a": "1"}},
            "spec": {"source": {"kind": "VirtualMachine", "name": "theirs"}},
        });
        let change = |of: &Value, name: &str, body: Value| Change::of(of, name, MERGE, body);
        let annotation = |key: &str| json!({"metadata": {"annotations": {key: "2"}}});
        for snapshot in [&of_claim, &of_vm] {
            bench.scratch.apply(snapshot).await;
            let said = change(snapshot, "say what it is worth", annotation("guestlet.io/receipt-level"));
            bench.admits(Who::Controller, &said).await;
            let delete = change(snapshot, "delete", Value::Null);
            for bad in [
                change(snapshot, "an annotation", annotation("example.com/a")),
                change(snapshot, "a new annotation", annotation("example.com/b")),
                change(snapshot, "another of guestlet's", annotation("guestlet.io/published")),
                change(snapshot, "a label", json!({"metadata": {"labels": {"a": "1"}}})),
                change(snapshot, "a finalizer", json!({"metadata": {"finalizers": ["example.com/mine"]}})),
                change(
                    snapshot,
                    "its source",
                    json!({"spec": {"source": {"name": "ours", "volumeSnapshotContentName": "x"}}}),
                ),
                Change { method: Method::DELETE, ..delete },
            ] {
                bench.refuses(Who::Controller, &bad).await;
            }
        }
    });
}
