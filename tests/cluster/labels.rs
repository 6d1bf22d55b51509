//! The Node's labels follow where the guest runs, by kubelet's credential and under the rules of `NodeRestriction`.

use guestlet::wire::proto::v1::Topology;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::cluster::{Cluster, NODE, NODES, until};
use crate::components::release;
use crate::disk::Machine;
use crate::host::host;
use crate::lab::{Lab, wait};
use crate::place::is_outside;
use crate::plane::ControlPlane;

const ZONE: &str = "topology.kubernetes.io/zone";
const REGION: &str = "topology.kubernetes.io/region";
/// What the machine of the agent calls itself.
const MINE: &str = "0a0a0a0a-0000-4000-8000-000000000001";
const EVENTS: &str = "/api/v1/namespaces/default/events";

/// Has the host half say that the guest runs in this zone.
async fn tell(lab: &Lab, zone: &str, labels: &[(&str, &str)]) {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let (region, host) = ("eu".to_owned(), format!("h-{zone}"));
    lab.tell(Topology { region, zone: zone.to_owned(), host, labels }).await.unwrap();
}

/// The Node, if there is one.
async fn node(api: &Api) -> Option<Value> {
    api.get(&format!("{NODES}/{NODE}")).await
}

async fn is_in(api: &Api, zone: &str) {
    let has = async || (node(api).await?["metadata"]["labels"][ZONE] == zone).then_some(());
    until(&format!("the Node is in zone {zone}"), has).await;
}

/// What the cluster is told of the Node in these words.
async fn event(api: &Api, words: &str) -> Value {
    until(&format!("the cluster is told: {words}"), async || {
        let mut events = api.list(EVENTS).await.into_iter();
        events.find(|event| event["message"].as_str().is_some_and(|message| message.contains(words)))
    })
    .await
}

/// Waits until the agent says this of its Node; why.
async fn state(lab: &Lab, state: &str) -> String {
    until(&format!("the Node's labels are {state}"), async || {
        let node = lab.topology()["node"].take();
        (node["state"] == state).then(|| node["reason"].as_str().unwrap_or_default().to_owned())
    })
    .await
}

#[test]
fn the_node_follows_the_guest_whatever_ends_meanwhile() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut cluster = Cluster::start().await;
        let api = cluster.api().clone();
        tell(cluster.lab(), "a", &[("example.com/rack", "r7")]).await;
        is_in(&api, "a").await;
        let found = node(&api).await.unwrap()["metadata"]["labels"].take();
        assert_eq!((&found[REGION], &found["example.com/rack"]), (&json!("eu"), &json!("r7")));
        state(cluster.lab(), "current").await;
        let known = cluster.lab().topology()["node"].take();
        assert_eq!(known["ready"], "True");
        let version = known["kubelet_version"].as_str().unwrap();
        assert!(version.starts_with(&format!("v1.{}.", release())), "{version}");
        assert_eq!(known["addresses"], json!(["InternalIP 192.0.2.1", "Hostname node-1"]));

        // What the host has no longer goes.
        tell(cluster.lab(), "b", &[]).await;
        is_in(&api, "b").await;
        let told = event(&api, "on h-b now: topology.kubernetes.io/zone from a to b").await;
        assert_eq!((&told["involvedObject"]["name"], &told["type"]), (&json!(NODE), &json!("Normal")));
        assert!(node(&api).await.unwrap()["metadata"]["labels"]["example.com/rack"].is_null());

        // Others change what is the agent's, take it away, and set what is theirs.
        let path = format!("{NODES}/{NODE}");
        for value in [json!("x"), Value::Null] {
            let labels = json!({ ZONE: value, "theirs": "y" });
            api.patch(&path, &json!({ "metadata": { "labels": labels } })).await.unwrap();
            is_in(&api, "b").await;
        }
        assert_eq!(node(&api).await.unwrap()["metadata"]["labels"]["theirs"], "y");

        cluster.plane.api_server.kill();
        state(cluster.lab(), "failed").await;
        tell(cluster.lab(), "c", &[]).await;
        cluster.plane.api_server.again();
        is_in(&api, "c").await;

        // The Node goes, and kubelet makes it anew, without what the agent knows.
        api.delete(&path).await;
        state(cluster.lab(), "waiting").await;
        cluster.kill_kubelet();
        is_in(&api, "c").await;
        assert!(node(&api).await.unwrap()["metadata"]["labels"]["theirs"].is_null());
    });
}

/// An agent with further settings of `[topology]`, whose guest runs in zone `a`.
async fn agent(plane: &ControlPlane, settings: &str) -> Lab {
    let kubeconfig = plane.kubelet_config(NODE);
    let mut lab = Lab::unknown(&format!("[topology]\nkubeconfig = '{}'\n{settings}", kubeconfig.display()));
    lab.introduce_by(host("one", CancellationToken::new())).await;
    tell(&lab, "a", &[]).await;
    lab
}

#[test]
fn settings_keep_zones_report_and_name_the_provider() {
    if is_outside() {
        return;
    }
    wait(async {
        let plane = ControlPlane::start().await;
        let (api, path) = (&plane.api, format!("{NODES}/{NODE}"));
        let blank = json!({ "metadata": { "name": NODE } });

        let lab = agent(&plane, "zone-change = 'report'").await;
        api.create(NODES, &blank).await;
        is_in(api, "a").await;
        tell(&lab, "b", &[]).await;
        let reason = state(&lab, "kept").await;
        assert!(reason.contains("topology.kubernetes.io/zone=a"), "{reason}");
        let found = node(api).await.unwrap()["metadata"].take();
        assert_eq!(found["labels"][ZONE], "a");
        assert_eq!(found["annotations"]["guestlet.io/runs-in"], "region=eu,zone=b,host=h-b");
        assert_eq!(event(api, "zone").await["type"], "Warning");
        drop(lab);

        api.delete(&path).await;
        api.create(NODES, &blank).await;
        let lab = agent(&plane, "report-only = true").await;
        state(&lab, "reported").await;
        assert!(node(api).await.unwrap()["metadata"]["labels"][ZONE].is_null());
        drop(lab);

        // Harvester's cloud provider has this Node.
        api.delete(&path).await;
        let theirs = json!({ "metadata": { "name": NODE }, "spec": { "providerID": "harvester://1" } });
        api.create(NODES, &theirs).await;
        let lab = agent(&plane, "provider-id = true").await;
        let reason = state(&lab, "reported").await;
        assert!(reason.contains("Harvester"), "{reason}");
        let found = node(api).await.unwrap();
        assert_eq!(found["spec"]["providerID"], "harvester://1");
        assert!(found["metadata"]["labels"][ZONE].is_null());
        // Nobody has the next one.
        api.delete(&path).await;
        api.create(NODES, &blank).await;
        is_in(api, "a").await;
        let named = format!("guestlet://{}", crate::lab::NODE);
        until("it has the provider's id", async || {
            (node(api).await?["spec"]["providerID"] == named.as_str()).then_some(())
        })
        .await;
    });
}

/// As after a machine was copied with its kubelet's credential.
#[test]
fn the_node_of_another_machine_is_left_alone() {
    if is_outside() {
        return;
    }
    let machine = Machine::new();
    std::fs::create_dir_all(machine.tree().join("class/dmi/id")).unwrap();
    std::fs::write(machine.tree().join("class/dmi/id/product_uuid"), MINE).unwrap();
    wait(async {
        let plane = ControlPlane::start().await;
        let (api, path) = (&plane.api, format!("{NODES}/{NODE}"));
        api.create(NODES, &json!({ "metadata": { "name": NODE, "labels": { ZONE: "theirs" } } })).await;
        let is_of = async |uuid: &str| {
            let status = json!({ "status": { "nodeInfo": { "systemUUID": uuid } } });
            api.patch(&format!("{path}/status"), &status).await.unwrap()
        };
        is_of("0c0c0c0c-0000-4000-8000-000000000002").await;
        let lab = agent(&plane, "provider-id = true").await;
        let reason = state(&lab, "failed").await;
        assert!(reason.contains("the Node of another machine"), "{reason}");
        tell(&lab, "b", &[("example.com/rack", "r7")]).await;
        assert_eq!(state(&lab, "failed").await, reason);
        let found = node(api).await.unwrap();
        assert_eq!(found["metadata"]["labels"], json!({ ZONE: "theirs" }), "{found}");
        assert!(found["metadata"]["annotations"]["guestlet.io/runs-in"].is_null(), "{found}");
        assert!(found["spec"]["providerID"].is_null(), "{found}");

        // It is this one's after all.
        api.patch(&path, &json!({ "metadata": { "labels": { ZONE: null } } })).await.unwrap();
        is_of(&MINE.to_uppercase()).await;
        is_in(api, "b").await;
        state(&lab, "current").await;
    });
}
