//! What pods may want of their volumes beyond a file system at a place.

use std::os::unix::fs::MetadataExt as _;

use serde_json::json;

use crate::cluster::{CLAIMS, Cluster, PODS, pod, told, until};
use crate::lab::{DRIVER, wait};
use crate::place::is_outside;

#[test]
fn groups_parts_read_only_and_inline_volumes() {
    if is_outside() {
        return;
    }
    wait(async {
        let cluster = Cluster::start().await;
        cluster.claim("shared", 320, "Filesystem").await;
        let mut inline = pod("inline", "", "Filesystem", "true");
        inline["spec"]["volumes"][0] = json!({ "name": "volume", "csi": { "driver": DRIVER } });
        cluster.run(&inline).await;

        let mut grouped = pod("grouped", "shared", "Filesystem", "echo mine > /mnt/volume/file");
        grouped["spec"]["securityContext"] = json!({ "fsGroup": 2000 });
        cluster.run(&grouped).await;
        let uid = cluster.runs("grouped").await;
        let place = cluster.published(&uid, &cluster.volume_of("shared").await);
        let found = std::fs::metadata(&place).unwrap();
        assert_eq!((found.gid(), found.mode() & 0o2070), (2000, 0o2070));

        // Beside it, on the same node.
        let mut part = pod("part", "shared", "Filesystem", "echo part > /mnt/volume/file");
        part["spec"]["containers"][0]["volumeMounts"][0]["subPath"] = json!("below");
        let script = "grep -q mine /mnt/volume/file; ! touch /mnt/volume/other";
        let mut reader = pod("reader", "shared", "Filesystem", script);
        reader["spec"]["volumes"][0]["persistentVolumeClaim"]["readOnly"] = json!(true);
        for pod in [&part, &reader] {
            cluster.run(pod).await;
        }
        for name in ["part", "reader"] {
            cluster.runs(name).await;
        }
        let file = place.join("below/file");
        until("the part is written", async || (std::fs::read(&file).ok()? == b"part\n").then_some(())).await;
        assert!(!place.join("other").exists());

        // A volume that would end with its pod is refused in words.
        let message = told(&cluster, "inline", "FailedMount").await;
        assert!(message.contains("Ephemeral") && message.contains(DRIVER), "{message}");

        // One is deleted by force; its volume goes all the same, and the others keep theirs.
        cluster.api().delete(&format!("{PODS}/reader?gracePeriodSeconds=0")).await;
        let staged = |part: &str| cluster.mounts().iter().filter(|place| place.contains(part)).count();
        until("the reader's is gone", async || (staged("kubernetes.io~csi") == 2).then_some(())).await;
        for name in ["part", "grouped", "inline"] {
            cluster.end(name).await;
        }
        cluster.api().delete(&format!("{CLAIMS}/shared")).await;
        cluster.is_empty().await;
    });
}
