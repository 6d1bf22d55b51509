//! 100 Services of a guest cluster at once (500 in `make soak`), through its agent, the node's program and the controller to Harvester's objects and back:
//! how long they take, how long a change takes, and what is asked of both API servers while nothing happens.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::api::Api;
use crate::balancers::allow;
use crate::ccm::{Managed, SERVICES, VIP, manage, service};
use crate::client::{JSON, Watch, call, list};
use crate::cluster::wait;
use crate::harvester::{BALANCERS, Harvester, pool};
use crate::model::objects::text;
use crate::patience::until;
use crate::soak::steps;
use crate::whole::Whole;

/// More than it takes on a machine that does nothing else, and with a build that is optimised: the target is 20 s there.
const SECONDS: u64 = 180;
const IDLE: Duration = Duration::from_secs(20);

/// Requests that were made of an API server so far for what guest clusters are told, by verb and resource.
async fn requests(api: &Api) -> BTreeMap<String, u64> {
    let (status, text) = call(api, Method::GET, "/metrics", JSON, None).await.unwrap();
    assert!(status.is_success(), "{status}");
    let mut all = BTreeMap::new();
    for line in text.as_str().unwrap().lines().filter(|line| line.starts_with("apiserver_request_total{")) {
        let (labels, count) = line.rsplit_once(' ').unwrap();
        let label = |name: &str| {
            let (_, rest) = labels.split_once(&format!("{name}=\""))?;
            Some(rest.split_once('"')?.0.to_owned())
        };
        let (verb, resource) = (label("verb").unwrap(), label("resource").unwrap_or_default());
        let is_of_these = [
            "services",
            "nodes",
            "events",
            "loadbalancers",
            "ippools",
            "guests",
            "virtualmachines",
            "virtualmachineinstances",
        ]
        .contains(&resource.as_str());
        // A watch that ends after some minutes is begun again, and the API server itself looks after its own Service.
        if is_of_these && verb != "WATCH" && (verb.as_str(), resource.as_str()) != ("GET", "services") {
            *all.entry(format!("{verb} {resource}")).or_default() += count.parse::<u64>().unwrap();
        }
    }
    all
}

#[test]
fn many_services_of_a_cluster_of_harvester() {
    let many = steps(100, 500);
    wait(async {
        let whole = Whole::start(1).await;
        allow(&whole).await;
        let host = &whole.cluster.api;
        let _harvester = Harvester::start(host);
        pool(host, "dev", "default/lan", "dev", ("10.0.0.2", "10.0.3.250")).await;
        let Managed { api: guest, manager, .. } = &manage(&whole).await;
        // One is there before, so that all are known to work.
        guest.create(SERVICES, &service("first")).await;
        let has = |one: &Value| one["metadata"]["annotations"][VIP].is_string();
        until("the first has its address", async || {
            guest.get(&format!("{SERVICES}/first")).await.filter(has).map(drop)
        })
        .await;

        let making_api = guest.keeping();
        let begun = Instant::now();
        let mut making = JoinSet::new();
        for number in 0..many {
            let guest = making_api.clone();
            making.spawn(async move { guest.create(SERVICES, &service(&format!("web-{number}"))).await });
            if making.len() >= 8 {
                making.join_next().await.unwrap().unwrap();
            }
        }
        while let Some(made) = making.join_next().await {
            made.unwrap();
        }
        let made = begun.elapsed();
        // A watch costs the API server less than to be asked again and again.
        let (listed, version) = list(guest, SERVICES).await.unwrap();
        let name = |one: &Value| text(&one["metadata"]["name"]).to_owned();
        let mut done: BTreeSet<String> = listed.iter().filter(|one| has(one)).map(name).collect();
        let mut watch = Watch::open(guest, SERVICES, &version).await.unwrap();
        while done.len() <= many {
            let rest = Duration::from_secs(SECONDS).saturating_sub(begun.elapsed());
            let Ok(event) = tokio::time::timeout(rest, watch.next()).await else {
                panic!("{} of {many} have their addresses after {SECONDS} s", done.len());
            };
            let event = event.unwrap().expect("the watch goes on");
            if has(&event["object"]) {
                done.insert(name(&event["object"]));
            }
        }
        let all = begun.elapsed();
        let asked = [requests(guest).await, requests(host).await];

        // A new one beside them, and one that changes.
        let begun = Instant::now();
        guest.create(SERVICES, &service("last")).await;
        until("it has its address", async || {
            guest.get(&format!("{SERVICES}/last")).await.filter(has).map(drop)
        })
        .await;
        let one = begun.elapsed();
        let begun = Instant::now();
        let ports = json!([{ "name": "http", "port": 81, "protocol": "TCP" }]);
        guest.patch(&format!("{SERVICES}/web-7"), &json!({ "spec": { "ports": ports } })).await.unwrap();
        until("the change is taken over", async || {
            let objects = host.list(BALANCERS).await;
            let is_so = |one: &&Value| {
                let wanted = one["metadata"]["annotations"]["guestlet.io/wanted"].as_str();
                wanted.is_some_and(|wanted| wanted.contains("\"port\":81"))
            };
            objects.iter().find(is_so).map(drop)
        })
        .await;
        let change = begun.elapsed();

        tokio::time::sleep(Duration::from_secs(10)).await;
        let before = [requests(guest).await, requests(host).await];
        tokio::time::sleep(IDLE).await;
        let after = [requests(guest).await, requests(host).await];
        let status = std::fs::read_to_string(format!("/proc/{}/status", manager.0.id())).unwrap();
        let resident = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap().to_owned();
        eprintln!(
            "asked until then: of the guest cluster {:?}, of the host cluster {:?}",
            asked[0], asked[1]
        );
        eprintln!(
            "{many} Services: made {:.1} s, addresses {:.1} s; one more {:.2} s; a change {:.2} s; guestlet-ccm {resident}",
            made.as_secs_f32(),
            all.as_secs_f32(),
            one.as_secs_f32(),
            change.as_secs_f32(),
        );
        assert_eq!(before[0], after[0], "the guest cluster's API server is asked while nothing happens");
        // The model of Harvester looks at everything again and again.
        let written = |all: &BTreeMap<String, u64>| {
            all.iter()
                .filter(|(what, _)| !what.starts_with("LIST") && !what.starts_with("GET"))
                .map(|(what, count)| (what.clone(), *count))
                .collect::<BTreeMap<_, _>>()
        };
        assert_eq!(written(&before[1]), written(&after[1]), "nothing is written while nothing happens");
    });
}
