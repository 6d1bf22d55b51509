//! Many volumes at once, while everything that has to do with them is killed.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::cluster::{CLAIMS, CLASSES, Cluster, PODS, pod};
use crate::host::MOST_VOLUMES;
use crate::lab::{DRIVER, wait};
use crate::place::is_outside;
use crate::random::{Random, seed};
use crate::soak::steps;

/// At the same time.
const PODS_AT_ONCE: usize = 20;
/// Kills, each of the next thing.
const KILLS: usize = 6;
const KILLS_OF_A_SOAK: usize = 30;
/// The longest time between two of them.
const LONGEST: u32 = 1500;

#[test]
fn many_pods_get_their_volumes_while_all_is_killed() {
    if is_outside() {
        return;
    }
    let mut random = Random(seed());
    wait(async {
        MOST_VOLUMES.store(64, Ordering::Relaxed);
        let mut cluster = Cluster::start().await;
        let class = serde_json::json!({
            "metadata": { "name": "small" },
            "provisioner": DRIVER,
            "parameters": { "csi.storage.k8s.io/fstype": "ext4" },
            "volumeBindingMode": "WaitForFirstConsumer",
        });
        cluster.api().create(CLASSES, &class).await;
        let names: Vec<_> = (0..PODS_AT_ONCE).map(|number| format!("pod-{number}")).collect();
        let begun = Instant::now();
        for name in &names {
            cluster.claim_of("small", name, 32, "Filesystem").await;
            cluster.run(&pod(name, name, "Filesystem", &format!("echo {name} > /mnt/volume/file"))).await;
        }
        let kills = steps(KILLS, KILLS_OF_A_SOAK);
        for kill in 0..kills {
            tokio::time::sleep(Duration::from_millis(random.below(LONGEST).into())).await;
            match kill % 3 {
                0 => cluster.kill_agent().await,
                1 => cluster.nodes[0].break_channel(&cluster.half).await,
                _ => cluster.kill_kubelet(),
            }
        }
        for name in &names {
            let uid = cluster.runs(name).await;
            let file = cluster.published(&uid, &cluster.volume_of(name).await).join("file");
            assert_eq!(std::fs::read_to_string(file).unwrap().trim(), name);
        }
        println!("{PODS_AT_ONCE} pods run after {:.1} s", begun.elapsed().as_secs_f32());

        let begun = Instant::now();
        for name in &names {
            cluster.api().delete(&format!("{PODS}/{name}")).await;
            cluster.api().delete(&format!("{CLAIMS}/{name}")).await;
        }
        for kill in 0..kills / 2 {
            tokio::time::sleep(Duration::from_millis(random.below(LONGEST).into())).await;
            // A kubelet that ends between the two never comes back to what it has unpublished and not unstaged.
            match kill % 2 {
                0 => cluster.kill_agent().await,
                _ => cluster.nodes[0].break_channel(&cluster.half).await,
            }
        }
        cluster.is_empty().await;
        println!("nothing is left after {:.1} s", begun.elapsed().as_secs_f32());
    });
}
