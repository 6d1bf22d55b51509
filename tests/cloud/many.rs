//! 200 Nodes and 500 Services: how long they take, what the program needs for them, and what it asks for while nothing happens.

use std::time::Instant;

use serde_json::json;
use tokio::task::JoinSet;

use crate::host::instance;
use crate::lab::{Lab, NODES, SERVICES, has_taint, quiet, text, wait};
use crate::patience::until;

const MANY_NODES: usize = 200;
const MANY_SERVICES: usize = 500;
/// More than it takes on a machine that does nothing else: the target is 20 s there.
const SECONDS: u64 = 90;
/// A build without optimisation, on which the target of 20 MB is not measured.
const MEBIBYTES: u64 = 40;

#[test]
fn two_hundred_nodes_and_five_hundred_services() {
    wait(async {
        let lab = Lab::start().await;
        let mut making = JoinSet::new();
        for number in 0..MANY_NODES {
            let address = format!("10.0.{}.{}", number / 200, number % 200 + 1);
            lab.host.set(instance(&number.to_string(), &format!("n{number}"), &address));
            let api = lab.api.clone();
            making.spawn(async move {
                let taint = json!({ "key": "node.cloudprovider.kubernetes.io/uninitialized", "effect": "NoSchedule" });
                let images: Vec<_> = (0..50).map(|image| json!({ "names": [format!("registry.example.org/{image}/{}", "x".repeat(80))] })).collect();
                let node = json!({ "metadata": { "name": format!("n{number}") }, "spec": { "taints": [taint] } });
                api.create(NODES, &node).await;
                let status = json!({ "status": { "images": images, "conditions": [{ "type": "Ready", "status": "True" }] } });
                api.patch(&format!("{NODES}/n{number}/status"), &status).await;
            });
            if making.len() >= 16 {
                making.join_next().await.unwrap().unwrap();
            }
        }
        for number in 0..MANY_SERVICES {
            let api = lab.api.clone();
            making.spawn(async move {
                let service = json!({
                    "metadata": { "name": format!("web-{number}"), "annotations": { "guestlet.io/announce": "host" } },
                    "spec": { "type": "LoadBalancer", "ports": [{ "port": 80, "protocol": "TCP" }] },
                });
                api.create(SERVICES, &service).await;
            });
            if making.len() >= 16 {
                making.join_next().await.unwrap().unwrap();
            }
        }
        while let Some(made) = making.join_next().await {
            made.unwrap();
        }
        let replica = lab.replica("a");
        let begun = Instant::now();
        until("all Nodes are initialised", async || {
            let nodes = lab.api.list(NODES).await;
            let waits = |node| has_taint(node, "node.cloudprovider.kubernetes.io/uninitialized");
            (nodes.len() == MANY_NODES && !nodes.iter().any(waits)).then_some(())
        })
        .await;
        let nodes = begun.elapsed();
        until("all Services have their addresses", async || {
            let services = lab.api.list(SERVICES).await;
            let has = |service: &&serde_json::Value| {
                !text(&service["status"]["loadBalancer"]["ingress"][0]["ip"]).is_empty()
            };
            (services.iter().filter(has).count() == MANY_SERVICES).then_some(())
        })
        .await;
        let all = begun.elapsed();
        // All requests name all Nodes in the end.
        until("all requests are the last ones", async || {
            let world = lab.host.world();
            world.requests.values().all(|request| request.backends.len() == MANY_NODES).then_some(())
        })
        .await;
        quiet(3).await;
        let calls = lab.host.world().calls.clone();
        let (now, most) = replica.memory();
        let (kilobytes, most) = (now / 1000, most / 1000);
        eprintln!(
            "{MANY_NODES} Nodes: {:.1} s; {MANY_SERVICES} Services: {:.1} s; resident {kilobytes} kB, at most {most} kB; calls: {calls:?}",
            nodes.as_secs_f32(),
            all.as_secs_f32(),
        );
        assert!(all.as_secs() <= SECONDS, "{all:?}");
        assert!(now <= MEBIBYTES << 20, "{now} bytes");
        // While nothing happens the API server is asked for nothing but the Lease.
        let changed = Instant::now();
        lab.patch("web-7", json!({ "spec": { "ports": [{ "port": 81, "protocol": "TCP" }] } })).await;
        until("the change is taken over", async || {
            let world = lab.host.world();
            world.requests.values().any(|request| request.ports[0].port == 81).then_some(())
        })
        .await;
        eprintln!("a changed Service: {:.2} s", changed.elapsed().as_secs_f32());
        let ensured = lab.host.calls("EnsureLoadBalancer");
        quiet(5).await;
        assert_eq!(lab.host.calls("EnsureLoadBalancer"), ensured);
    });
}
