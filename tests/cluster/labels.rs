//! The Node's labels follow where the guest runs, by kubelet's credential and under the rules of `NodeRestriction`.

use guestlet::wire::proto::v1::Topology;
use serde_json::{Value, json};

use crate::cluster::{Cluster, until};
use crate::components::is_outside;
use crate::lab::wait;

const ZONE: &str = "topology.kubernetes.io/zone";
const REGION: &str = "topology.kubernetes.io/region";
const EVENTS: &str = "/api/v1/namespaces/default/events";

async fn tell(cluster: &Cluster, zone: &str, labels: &[(&str, &str)]) {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let (region, host) = ("eu".to_owned(), format!("h-{zone}"));
    cluster.lab.tell(Topology { region, zone: zone.to_owned(), host, labels }).await.unwrap();
}

async fn labels(cluster: &Cluster) -> Option<Value> {
    Some(cluster.node().await?["metadata"]["labels"].clone())
}

async fn is_in(cluster: &Cluster, zone: &str) {
    let has = async || (labels(cluster).await?[ZONE] == zone).then_some(());
    until(&format!("the Node is in zone {zone}"), has).await;
}

#[test]
fn the_node_follows_the_guest_whatever_ends_meanwhile() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut cluster = Cluster::start().await;
        tell(&cluster, "a", &[("example.com/rack", "r7")]).await;
        is_in(&cluster, "a").await;
        let found = labels(&cluster).await.unwrap();
        assert_eq!((&found[REGION], &found["example.com/rack"]), (&json!("eu"), &json!("r7")));

        tell(&cluster, "b", &[]).await;
        is_in(&cluster, "b").await;
        until("the cluster is told", async || {
            let mut events = cluster.api().list(EVENTS).await.into_iter();
            let is_told =
                |event: Value| event["message"].as_str().is_some_and(|it| it.contains("zone from a to b"));
            events.any(is_told).then_some(())
        })
        .await;
        assert!(labels(&cluster).await.unwrap()["example.com/rack"].is_null());

        // Others change what is the agent's, and what is theirs.
        cluster.edit_node(&json!({ "metadata": { "labels": { ZONE: "x", "theirs": "y" } } })).await;
        is_in(&cluster, "b").await;
        assert_eq!(labels(&cluster).await.unwrap()["theirs"], "y");

        cluster.plane.api_server.kill();
        cluster.plane.api_server.again();
        until("it is ready again", async || cluster.api().is_ready().await.then_some(())).await;
        tell(&cluster, "c", &[]).await;
        is_in(&cluster, "c").await;

        // The Node goes, and kubelet makes it anew, without what the agent knows.
        cluster.delete_node().await;
        cluster.kill_kubelet();
        is_in(&cluster, "c").await;
    });
}
