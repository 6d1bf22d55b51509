//! What kubelet tells the cluster of the driver follows the guest.

use std::sync::atomic::Ordering;

use serde_json::json;

use crate::cluster::{CLAIMS, Cluster, Layout, pod, until};
use crate::host::MOST_VOLUMES;
use crate::lab::wait;
use crate::place::is_outside;

const HOST: &str = "guestlet.io/host";

/// Waits until the Node has this place, and kubelet has registered the driver so often.
async fn is_on(cluster: &Cluster, host: &str, times: usize) {
    until(&format!("the driver is registered on {host}"), async || {
        let is_there = cluster.node().await?["metadata"]["labels"][HOST] == host;
        let is_registered = cluster.lab().log().matches("kubelet has registered the driver").count() >= times;
        (is_there && is_registered && cluster.driver().await?["topologyKeys"] == json!([HOST])).then_some(())
    })
    .await;
}

/// Issue 17: kubelet dropped a driver that named another host than the Node's label ("topology value collision"), and was
/// told for good how many volumes there could be.
#[test]
fn place_and_number_of_volumes_follow_the_guest() {
    if is_outside() {
        return;
    }
    wait(async {
        let cluster = Cluster::with(Layout { host: Some("h-a"), ..Layout::default() }).await;
        is_on(&cluster, "h-a", 1).await;
        assert_eq!(cluster.driver().await.unwrap()["allocatable"]["count"], 16);
        cluster.lab().runs_on("h-b").await;
        is_on(&cluster, "h-b", 2).await;

        // The agent asks again when a disk comes.
        MOST_VOLUMES.store(15, Ordering::Relaxed);
        cluster.claim("data", 320, "Filesystem").await;
        cluster.run(&pod("one", "data", "Filesystem", "true")).await;
        cluster.runs("one").await;
        until("kubelet tells the cluster", async || {
            (cluster.driver().await?["allocatable"]["count"] == 15).then_some(())
        })
        .await;
        cluster.end("one").await;
        cluster.api().delete(&format!("{CLAIMS}/data")).await;
        cluster.is_empty().await;
    });
}
