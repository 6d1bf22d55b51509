//! The packaged roles: they suffice, and no verb of them is there for nothing.

use std::time::Duration;

use serde_json::{Value, json};

use crate::host::instance;
use crate::lab::{CLUSTER_ROLES, LEASE, Lab, ROLES, SERVICES, packaged, text, wait};

/// For what takes no longer while nothing is missing.
const LIMIT: Duration = Duration::from_secs(20);

/// Every verb of a role: the place of its rule, of its resource, and its own.
fn verbs(role: &Value) -> Vec<(usize, usize, usize)> {
    let mut all = Vec::new();
    for (rule, of) in role["rules"].as_array().unwrap().iter().enumerate() {
        for resource in 0..of["resources"].as_array().unwrap().len() {
            all.extend((0..of["verbs"].as_array().unwrap().len()).map(|verb| (rule, resource, verb)));
        }
    }
    all
}

/// The role without one verb, and what that was.
fn without(whole: &Value, (rule, resource, verb): (usize, usize, usize)) -> (Value, String) {
    let mut left = whole.clone();
    let of = &mut left["rules"][rule];
    let name = format!("{} {}", text(&of["verbs"][verb]), text(&of["resources"][resource]));
    let verbs = of["verbs"].as_array_mut().unwrap();
    verbs.remove(verb);
    if verbs.is_empty() {
        left["rules"].as_array_mut().unwrap().remove(rule);
    }
    (left, name)
}

/// All that the roles are for, once; what did not work.
async fn all(lab: &Lab, round: usize) -> Result<(), String> {
    lab.api.delete(LEASE).await;
    let lease = json!({
        "metadata": { "name": "cloud-controller-manager" },
        "spec": { "holderIdentity": "", "leaseDurationSeconds": 1 },
    });
    // It is made by the program in every other round, after it has waited for as long as one lasts that has gone.
    if round % 2 == 1 {
        lab.api.create(LEASE.rsplit_once('/').unwrap().0, &lease).await;
    }
    let replica = lab.replica(&format!("r{round}"));
    let (node, service, leak) = (format!("n{round}"), format!("web-{round}"), format!("leak-{round}"));
    lab.host.set(instance(&node, &node, "192.0.2.11"));
    lab.host.leak("default", &service, &leak);
    lab.join(&node, &format!("uuid-{node}")).await;
    let work = async {
        lab.initialised(&node).await;
        let made = lab.service(&service, json!({ "guestlet.io/announce": "none" })).await;
        lab.service_is(&service, "has an address", |one| !one["status"]["loadBalancer"]["ingress"].is_null())
            .await;
        lab.told(&service, "EnsuredLoadBalancer").await;
        let uid = crate::lab::uid(&made).to_owned();
        while lab.host.world().balancers.contains_key(&leak) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        // A second one, and a second Node, which are heard of only by who watches.
        let second = format!("{node}-b");
        lab.host.set(instance(&second, &second, "192.0.2.12"));
        lab.join(&second, &format!("uuid-{second}")).await;
        lab.initialised(&second).await;
        lab.api.delete(&format!("{SERVICES}/{service}")).await;
        while lab.host.world().balancers.contains_key(&uid) || lab.get(&service).await.is_some() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        for node in [&node, &second] {
            lab.host.withdraw(node, true);
            lab.report(node, false, &format!("uuid-{node}")).await;
            while lab.node(node).await.is_some() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    // Changes that are not watched are found by looking again and again, and that is told.
    let complaint = async {
        loop {
            let log = replica.log();
            if let Some(line) = log.lines().find(|line| line.contains("forbidden") || line.contains("cannot"))
            {
                return line.to_owned();
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        complaint = complaint => Err(complaint),
        outcome = tokio::time::timeout(LIMIT, work) => {
            outcome.map_err(|_| format!("it takes longer than {LIMIT:?}, and nothing is said"))
        }
    }
}

async fn clear(lab: &Lab, round: usize) {
    for node in [format!("n{round}"), format!("n{round}-b")] {
        lab.host.withdraw(&node, true);
        lab.api.delete(&format!("{}/{node}", crate::lab::NODES)).await;
    }
    let service = format!("{SERVICES}/web-{round}");
    lab.api.patch(&service, &json!({ "metadata": { "finalizers": null } })).await;
    lab.api.delete(&service).await;
    let mut world = lab.host.world();
    world.balancers.clear();
    world.requests.clear();
}

#[test]
fn the_roles_suffice_and_no_verb_of_them_is_there_for_nothing() {
    wait(async {
        let lab = Lab::start().await;
        for round in [0, 1] {
            assert_eq!(all(&lab, round).await, Ok(()));
            clear(&lab, round).await;
        }
        let mut for_nothing = Vec::new();
        let mut round = 1;
        for (kind, path) in [("ClusterRole", CLUSTER_ROLES), ("Role", ROLES)] {
            let whole = packaged(kind);
            for verb in verbs(&whole) {
                let (less, name) = without(&whole, verb);
                lab.put(path, &less).await;
                // What makes a Lease is missed where there is none.
                round += if name == "create leases" && round % 2 == 0 { 2 } else { 1 };
                tokio::time::sleep(Duration::from_millis(300)).await;
                if all(&lab, round).await.is_ok() {
                    for_nothing.push(name);
                }
                clear(&lab, round).await;
                lab.put(path, &whole).await;
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        }
        assert!(for_nothing.is_empty(), "{for_nothing:?}");
    });
}
