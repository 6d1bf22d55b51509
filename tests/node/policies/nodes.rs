//! Guests and Events, which nodes write.

use http::Method;
use serde_json::{Value, json};

use super::{Bench, Change, SPACE};
use crate::cluster::wait;
use crate::patience::until;
use crate::scratch::{APPLY, Who, path};

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
