//! The Deployment of the manifests, run by two real kubelets: whatever becomes of the node whose replica is at work, the other
//! one takes over.

use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::cluster::{CLAIMS, Cluster, Layout, PODS, pod, until};
use crate::lab::wait;
use crate::place::is_outside;
use crate::sidecars::Role;
use crate::stand_in::LEASES;

const REPLICAS: &str = "/api/v1/namespaces/kube-system/pods";

/// The node of the replica that holds this sidecar's Lease.
async fn leader(cluster: &Cluster, role: Role) -> Option<usize> {
    let lease = cluster.api().get(&format!("{LEASES}/{}", role.lease())).await?;
    let holder = lease["spec"]["holderIdentity"].as_str()?;
    let pod = cluster.api().get(&format!("{REPLICAS}/{holder}")).await?;
    cluster.nodes.iter().position(|node| pod["spec"]["nodeName"] == node.who.name)
}

/// Whether all containers of the replica on this node run.
async fn is_up(cluster: &Cluster, number: usize) -> Option<()> {
    let replicas = cluster.api().list(REPLICAS).await;
    let name = cluster.nodes[number].who.name;
    let replica = replicas.iter().find(|pod| pod["spec"]["nodeName"] == name)?;
    let containers = replica["status"]["containerStatuses"].as_array()?;
    (containers.len() == 4 && containers.iter().all(|it| it["ready"] == true)).then_some(())
}

/// How often kubelet has started containers of the replica on this node again.
async fn restarts(cluster: &Cluster, number: usize) -> u64 {
    let replicas = cluster.api().list(REPLICAS).await;
    let name = cluster.nodes[number].who.name;
    let on_it = replicas.iter().filter(|pod| pod["spec"]["nodeName"] == name);
    let containers = on_it.flat_map(|pod| pod["status"]["containerStatuses"].as_array().unwrap());
    containers.map(|it| it["restartCount"].as_u64().unwrap()).sum()
}

/// Has a pod on this node want a volume, and waits until it has it: by then the claim is bound, and the volume attached.
async fn is_served(cluster: &Cluster, name: &str, number: usize, since: Instant) {
    cluster.claim(name, 320, "Filesystem").await;
    let mut pod = pod(name, name, "Filesystem", "echo served > /mnt/volume/file");
    pod["spec"]["nodeSelector"] = json!({ "kubernetes.io/hostname": cluster.nodes[number].who.name });
    cluster.run(&pod).await;
    until(&format!("{name} is bound"), async || {
        let claim: Value = cluster.api().get(&format!("{CLAIMS}/{name}")).await?;
        (claim["status"]["phase"] == "Bound").then_some(())
    })
    .await;
    let bound = since.elapsed();
    cluster.runs(name).await;
    println!(
        "{name}: bound after {:.1} s, runs after {:.1} s",
        bound.as_secs_f32(),
        since.elapsed().as_secs_f32()
    );
}

fn signal(cluster: &Cluster, number: usize, signal: Signal) {
    let agent = cluster.nodes[number].lab.agent.id();
    kill(Pid::from_raw(i32::try_from(agent).unwrap()), signal).unwrap();
}

/// Issue 17: the probes named a port of another container, so that nobody ever took over.
#[test]
fn the_other_replica_takes_over() {
    if is_outside() {
        return;
    }
    wait(async {
        let layout = Layout { is_double: true, is_deployed: true, ..Layout::default() };
        let mut cluster = Cluster::with(layout).await;
        for number in 0..2 {
            until("both nodes have a replica", async || is_up(&cluster, number).await).await;
        }
        let broken = until("somebody is at work", async || leader(&cluster, Role::Provisioner).await).await;
        let other = 1 - broken;
        is_served(&cluster, "first", other, Instant::now()).await;

        let (since, before) = (Instant::now(), restarts(&cluster, broken).await);
        cluster.nodes[broken].lab.leave();
        is_served(&cluster, "channel", other, since).await;
        assert_eq!(leader(&cluster, Role::Provisioner).await, Some(other));
        assert!(restarts(&cluster, broken).await > before, "kubelet's probes did nothing");
        let Cluster { nodes, half, .. } = &mut cluster;
        half.answer_for(nodes[broken].who.machine, &mut nodes[broken].lab).await;

        // Now it is the other way round.
        let (broken, other) = (other, broken);
        until("the replica is back", async || is_up(&cluster, other).await).await;
        let since = Instant::now();
        signal(&cluster, broken, Signal::SIGSTOP);
        is_served(&cluster, "stopped", other, since).await;
        assert_eq!(leader(&cluster, Role::Provisioner).await, Some(other));
        signal(&cluster, broken, Signal::SIGCONT);

        // And back again.
        let (broken, other) = (other, broken);
        until("the replica is back", async || is_up(&cluster, other).await).await;
        let since = Instant::now();
        cluster.nodes[broken].lose_power();
        is_served(&cluster, "power", other, since).await;
        assert_eq!(leader(&cluster, Role::Provisioner).await, Some(other));

        cluster.nodes[broken].boot(&cluster.half).await;
        for name in ["first", "channel", "stopped", "power"] {
            cluster.api().delete(&format!("{PODS}/{name}")).await;
            cluster.api().delete(&format!("{CLAIMS}/{name}")).await;
        }
        cluster.is_empty().await;
    });
}
