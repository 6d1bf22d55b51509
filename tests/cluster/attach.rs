//! Volumes that pods on two nodes want, and nodes that lose their power.

use serde_json::{Value, json};

use crate::cluster::{CLAIMS, Cluster, Layout, NODES, PODS, pod, told, until};
use crate::half::Call;
use crate::lab::wait;
use crate::place::is_outside;

/// A pod that has to run on this node.
fn pod_on(cluster: &Cluster, number: usize, name: &str, claim: &str, script: &str) -> Value {
    let mut pod = pod(name, claim, "Filesystem", script);
    pod["spec"]["nodeSelector"] = json!({ "kubernetes.io/hostname": cluster.nodes[number].who.name });
    pod
}

/// What was done so far, as pairs of whether it was plugged and the number of the node.
fn steps(cluster: &Cluster) -> Vec<(bool, usize)> {
    let number = |machine| cluster.nodes.iter().position(|node| node.who.machine == machine).unwrap();
    let step = |call| match call {
        Call::Plugged { machine, .. } => (true, number(machine)),
        Call::Unplugged { machine, .. } => (false, number(machine)),
    };
    cluster.half.calls().into_iter().map(step).collect()
}

/// Waits until the cluster says that this pod cannot have its volume, because another node has it.
async fn has_to_wait(cluster: &Cluster, name: &str) {
    let message = told(cluster, name, "FailedAttachVolume").await;
    assert!(message.contains("Multi-Attach"), "{message}");
}

#[test]
fn one_node_has_a_volume_at_a_time_also_if_it_is_dead() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut cluster = Cluster::with(Layout { is_double: true, ..Layout::default() }).await;
        cluster.claim("data", 320, "Filesystem").await;
        cluster.run(&pod_on(&cluster, 0, "one", "data", "echo one > /mnt/volume/file")).await;
        cluster.runs("one").await;
        cluster.run(&pod_on(&cluster, 1, "two", "data", "grep -q one /mnt/volume/file")).await;
        has_to_wait(&cluster, "two").await;
        assert_eq!(steps(&cluster), [(true, 0)]);
        cluster.end("one").await;
        cluster.runs("two").await;
        let moved = [(true, 0), (false, 0), (true, 1)];
        assert_eq!(steps(&cluster), moved);

        // The node dies. Nobody takes its volume away because a pod was deleted that may still run there.
        cluster.nodes[1].lose_power();
        cluster.api().delete(&format!("{PODS}/two?gracePeriodSeconds=0")).await;
        cluster.run(&pod_on(&cluster, 0, "three", "data", "grep -q one /mnt/volume/file")).await;
        has_to_wait(&cluster, "three").await;
        assert_eq!(steps(&cluster), moved);
        // The controller goes on when the Node says that nothing is in use there, and after six minutes, which nobody waits
        // for here.
        let path = format!("{NODES}/{}/status", cluster.nodes[1].who.name);
        cluster.api().patch(&path, &json!({ "status": { "volumesInUse": null } })).await.unwrap();
        cluster.runs("three").await;
        assert_eq!(steps(&cluster), [moved.as_slice(), &[(false, 1), (true, 0)]].concat());

        cluster.nodes[1].boot(&cluster.half).await;
        cluster.is_ready(1).await;
        cluster.end("three").await;
        cluster.api().delete(&format!("{CLAIMS}/data")).await;
        cluster.is_empty().await;
        // Of a volume that is gone this kubelet forgets the empty directory that it was staged at.
        until("kubelet has removed the pod", async || {
            let left = cluster.nodes[1].left();
            (!left.iter().any(|path| path.parent().unwrap().ends_with("pods"))).then_some(())
        })
        .await;
    });
}

#[test]
fn a_node_that_starts_again_has_its_volumes_and_what_is_on_them() {
    if is_outside() {
        return;
    }
    wait(async {
        let mut cluster = Cluster::start().await;
        let uses = [
            ("files", "Filesystem", "echo started >> /mnt/volume/file"),
            (
                "raw",
                "Block",
                "dd if=/mnt/volume count=1 status=none | grep -q raw || echo raw | dd of=/mnt/volume conv=notrunc",
            ),
        ];
        for (name, mode, script) in uses {
            cluster.claim(name, 320, mode).await;
            cluster.run(&pod(name, name, mode, script)).await;
        }
        let uid = cluster.runs("files").await;
        cluster.runs("raw").await;
        let file = cluster.published(&uid, &cluster.volume_of("files").await).join("file");
        let has = async |starts: usize| {
            until(&format!("the pod has started {starts} times"), async || {
                let lines = std::fs::read_to_string(&file).ok()?;
                (lines == "started\n".repeat(starts)).then_some(())
            })
            .await;
        };
        has(1).await;

        cluster.nodes[0].lose_power();
        assert!(cluster.mounts().is_empty(), "{:?}", cluster.mounts());
        cluster.nodes[0].boot(&cluster.half).await;
        has(2).await;
        for (name, ..) in uses {
            until(&format!("{name} runs again"), async || {
                let pod = cluster.api().get(&format!("{PODS}/{name}")).await.unwrap();
                let container = &pod["status"]["containerStatuses"][0];
                (container["ready"] == true && container["restartCount"] == 1).then_some(())
            })
            .await;
        }
        for (name, ..) in uses {
            cluster.end(name).await;
            cluster.api().delete(&format!("{CLAIMS}/{name}")).await;
        }
        cluster.is_empty().await;
        until("kubelet leaves nothing", async || cluster.nodes[0].left().is_empty().then_some(())).await;
    });
}
