//! The life of volumes in a cluster.

use serde_json::json;

use crate::cluster::{ATTACHMENTS, CLAIMS, Cluster, PODS, pod, until};
use crate::lab::{NODE, wait};
use crate::place::is_outside;
use crate::sidecars::bytes;

/// Issue 17: kubelet never got to know the driver, which the tests' own kubelet did.
#[test]
fn a_claim_becomes_a_volume_that_a_pod_has_and_that_grows() {
    if is_outside() {
        return;
    }
    wait(async {
        let cluster = Cluster::start().await;
        let driver = cluster.driver().await.unwrap();
        assert_eq!((&driver["nodeID"], &driver["allocatable"]["count"]), (&json!(NODE), &json!(16)));

        cluster.claim("data", 320, "Filesystem").await;
        cluster.run(&pod("writer", "data", "Filesystem", "echo kept > /mnt/volume/file")).await;
        let uid = cluster.runs("writer").await;
        let volume = cluster.volume_of("data").await;
        let place = cluster.published(&uid, &volume);
        until("the pod writes", async || {
            (std::fs::read(place.join("file")).ok()? == b"kept\n").then_some(())
        })
        .await;
        assert_eq!(cluster.api().list(ATTACHMENTS).await.len(), 1);

        let path = format!("{CLAIMS}/data");
        let wanted = json!({ "spec": { "resources": { "requests": { "storage": "640Mi" } } } });
        cluster.api().patch(&path, &wanted).await.unwrap();
        until("kubelet says that it has grown", async || {
            let claim = cluster.api().get(&path).await.unwrap();
            (bytes(&claim["status"]["capacity"]["storage"]) == 640 << 20).then_some(())
        })
        .await;
        let size = nix::sys::statvfs::statvfs(&place).unwrap();
        assert!(size.blocks() * size.fragment_size() > 500 << 20, "{size:?}");

        // Another pod finds what the first one has left.
        cluster.end("writer").await;
        assert!(!place.exists());
        cluster.run(&pod("reader", "data", "Filesystem", "grep -q kept /mnt/volume/file")).await;
        cluster.runs("reader").await;
        cluster.end("reader").await;
        cluster.api().delete(&path).await;
        cluster.is_empty().await;
    });
}

/// Of a claim, its pod and how they are used.
const USES: [(&str, &str, &str); 4] = [
    ("one", "Filesystem", "echo one > /mnt/volume/file"),
    ("two", "Filesystem", "echo two > /mnt/volume/file"),
    ("three", "Filesystem", "echo three > /mnt/volume/file"),
    ("raw", "Block", "echo raw | dd of=/mnt/volume conv=notrunc status=none"),
];

#[test]
fn whatever_is_killed_on_the_way_pods_get_their_volumes_and_nothing_is_left() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut cluster = Cluster::start().await;
        for (name, mode, script) in USES {
            cluster.claim(name, 320, mode).await;
            cluster.run(&pod(name, name, mode, script)).await;
        }
        is_mounted(&cluster, "globalmount").await;
        cluster.kill_agent().await;
        is_mounted(&cluster, "kubernetes.io~csi").await;
        cluster.kill_kubelet();
        for (name, ..) in USES {
            cluster.runs(name).await;
        }
        // Another kubelet takes them as they are.
        cluster.kill_kubelet();
        cluster.kill_agent().await;
        assert!(cluster.half.all_are_attached());

        let before = cluster.mounts().len();
        for (name, ..) in USES {
            cluster.api().delete(&format!("{PODS}/{name}")).await;
        }
        until("kubelet takes a volume away", async || (cluster.mounts().len() < before).then_some(())).await;
        // Only the agent: a kubelet that ends between the two never comes back to what it has unpublished and not unstaged.
        cluster.kill_agent().await;
        for (name, ..) in USES {
            cluster.end(name).await;
            cluster.api().delete(&format!("{CLAIMS}/{name}")).await;
        }
        cluster.is_empty().await;
    });
}

/// Waits until a volume is mounted at a place like that.
async fn is_mounted(cluster: &Cluster, part: &str) {
    let has = || cluster.mounts().iter().any(|place| place.contains(part));
    until(&format!("a volume is at {part}"), async || has().then_some(())).await;
}
