//! Load balancers of guest clusters on Harvester: from a guest through its node and the controller to the API of the host cluster,
//! where a model of Harvester's controller gives addresses.

mod alone;
mod checked;
mod left;

use std::time::Duration;

use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{
    self, EnsureLoadBalancerRequest, ListLoadBalancersRequest, LoadBalancer, ReleaseLoadBalancerRequest,
    ServiceReference, WatchBounds, WatchLoadBalancersRequest,
};
use serde_json::{Value, json};
use tonic::{Code, Status};

use crate::api::collection;
use crate::cluster::wait;
use crate::clusters::{Calls, vm};
use crate::harvester::{BALANCERS, Harvester, of_pool, path, pool};
use crate::model::objects::Kind;
use crate::patience::until;
use crate::sidecar::refused;
use crate::whole::{Vm, Whole};

const ROLE: &str =
    include_str!("../../packaging/kubernetes/host/overlays/harvester/controller-balancers-role.yaml");
const LAN: &str = "default/lan";

/// What a test begins with: VMs of two clusters, a pool for each, and Harvester.
struct Site {
    dev: Calls,
    prod: Calls,
    harvester: Harvester,
    whole: Whole,
    vms: [Vm; 2],
}

impl Site {
    async fn start() -> Self {
        let whole = Whole::start(1).await;
        allow(&whole).await;
        Self::of(whole).await
    }

    async fn of(whole: Whole) -> Self {
        let api = &whole.cluster.api;
        let harvester = Harvester::start(api);
        pool(api, "dev", LAN, "dev", ("192.0.2.11", "192.0.2.13")).await;
        pool(api, "prod", "default/wan", "prod", ("198.51.100.1", "198.51.100.9")).await;
        let vms = [
            vm(&whole, "web", "dev", LAN, "web").await,
            vm(&whole, "other", "prod", "default/wan", "other").await,
        ];
        let [dev, prod] = [Calls::of(&vms[0]).await, Calls::of(&vms[1]).await];
        let site = Self { dev, prod, harvester, whole, vms };
        for calls in [&site.dev, &site.prod] {
            // The controller learns of the kinds, and of its rights, a little later.
            until("load balancers are told", async || calls.all().await.ok()).await;
        }
        site
    }

    /// The objects that there are.
    async fn objects(&self) -> Vec<Value> {
        self.whole.cluster.api.list(BALANCERS).await
    }
}

/// Gives the controller its rights to Harvester's load balancers.
pub async fn allow(whole: &Whole) {
    for object in serde_saphyr::from_multiple::<Value>(ROLE).unwrap() {
        whole.cluster.api.ensure(&collection(&object), &object).await;
    }
}

impl Calls {
    async fn ensure(&self, request: EnsureLoadBalancerRequest) -> Result<LoadBalancer, Status> {
        self.ensure_load_balancer(request).await.map(|answer| answer.load_balancer.unwrap())
    }

    async fn release(&self, service: ServiceReference) -> Result<bool, Status> {
        let request = ReleaseLoadBalancerRequest { service: Some(service) };
        self.release_load_balancer(request).await.map(|answer| answer.released)
    }

    async fn all(&self) -> Result<Vec<LoadBalancer>, Status> {
        self.list_load_balancers(ListLoadBalancersRequest {}).await.map(|answer| answer.load_balancers)
    }

    async fn news(&self, position: &str) -> v1::WatchLoadBalancersResponse {
        let bounds = Some(WatchBounds { position: position.into(), wait_seconds: 20 });
        self.watch_load_balancers(WatchLoadBalancersRequest { bounds }).await.unwrap()
    }

    /// Waits for news until a Service's load balancer is so.
    async fn becomes(&self, uid: &str, what: &str, is: impl Fn(&LoadBalancer) -> bool) -> LoadBalancer {
        let begun = std::time::Instant::now();
        let mut position = String::new();
        loop {
            let news = self.news(&position).await;
            let of = |one: &&LoadBalancer| one.service.as_ref().is_some_and(|of| of.uid == uid) && is(one);
            if let Some(found) = news.load_balancers.iter().find(of) {
                return found.clone();
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "never: {uid} {what}: {news:?}");
            position = news.position;
        }
    }

    async fn ready(&self, uid: &str) -> String {
        let told = self.becomes(uid, "is ready", |one| one.state() == State::Ready).await;
        told.addresses[0].address.clone()
    }
}

fn service(name: &str, uid: &str) -> ServiceReference {
    ServiceReference { namespace: "shop".into(), name: name.into(), uid: uid.into() }
}

/// What a Service with a TCP port asks for.
fn wanted(name: &str, uid: &str, port: u32) -> EnsureLoadBalancerRequest {
    let port = v1::ServicePort { name: String::new(), protocol: "TCP".into(), port, node_port: 30000 + port };
    EnsureLoadBalancerRequest {
        service: Some(service(name, uid)),
        families: vec![v1::IpFamily::Ipv4.into()],
        ports: vec![port],
        announcing: v1::Announcing::KubeVip.into(),
        ..EnsureLoadBalancerRequest::default()
    }
}

/// harvester/harvester#8318, #5918: addresses of Services that were deleted before they were announced leaked.
#[test]
fn a_service_gets_an_address_and_gives_it_back_however_far_it_has_come() {
    wait(async {
        let site = Site::start().await;
        let dev = &site.dev;
        site.harvester.hold(true);
        let told = dev.ensure(wanted("web", "u1", 80)).await.unwrap();
        assert_eq!((told.state(), told.addresses.len()), (State::Pending, 0), "it is answered at once");
        site.harvester.hold(false);
        assert_eq!(dev.ready("u1").await, "192.0.2.12", "the first one was the last that was given");
        let told = dev.ensure(wanted("web", "u1", 80)).await.unwrap();
        assert_eq!((told.state(), told.network.as_str()), (State::Ready, LAN), "Harvester has chosen it");
        // As people, and Harvester's cloud provider, look for it.
        let object = until("it says its address", async || {
            site.objects().await.into_iter().find(|one| one["status"]["address"] == "192.0.2.12")
        })
        .await;
        let labels = &object["metadata"]["labels"];
        assert_eq!(labels["cloudprovider.harvesterhci.io/cluster"], "dev");
        assert_eq!(labels["cloudprovider.harvesterhci.io/serviceName"], "web");
        assert_eq!(object["spec"], json!({ "workloadType": "cluster", "ipam": "pool" }));

        // The pool has two more, and the next one is told why it has none, until one is given back.
        for uid in ["u2", "u3", "u4"] {
            dev.ensure(wanted(uid, uid, 80)).await.unwrap();
        }
        let is_short = |one: &LoadBalancer| one.state() == State::Failed;
        let short = loop {
            let all = dev.all().await.unwrap();
            if let Some(short) = all.into_iter().find(is_short) {
                break short;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        assert_eq!(short.reason, "AddressNotAllocated");
        assert!(short.message.contains("no IP addresses available in range set"), "{}", short.message);
        let short = short.service.unwrap().uid;
        assert!(!dev.release(service("web", "u1")).await.unwrap(), "its address is being given back");
        assert_eq!(dev.ready(&short).await, "192.0.2.12");
        until("nothing is left of it", async || dev.release(service("web", "u1")).await.ok()?.then_some(()))
            .await;

        // One that never had an address goes as well, and is told to be gone.
        for uid in ["u2", "u3", "u4"] {
            dev.release(service(uid, uid)).await.unwrap();
        }
        until("all are gone", async || site.objects().await.is_empty().then_some(())).await;
        site.harvester.hold(true);
        dev.ensure(wanted("web", "u5", 80)).await.unwrap();
        let mut position = dev.news("").await.position;
        assert!(!dev.release(service("web", "u5")).await.unwrap(), "it may be reserving an address just now");
        site.harvester.hold(false);
        loop {
            let news = dev.news(&position).await;
            if news.gone == [service("web", "u5")] {
                break;
            }
            position = news.position;
        }
        let pool = of_pool(&site.whole.cluster.api, "dev").await;
        assert_eq!(pool["status"]["available"], 3, "{pool}");
        assert_eq!(dev.all().await.unwrap(), []);
    });
}

/// harvester/harvester#8318: Harvester reserves an address first, and only then sees to it that it hears of the end of its load balancer.
#[test]
fn an_address_is_given_back_however_soon_its_service_goes() {
    wait(async {
        let site = Site::start().await;
        let api = &site.whole.cluster.api;
        pool(api, "more", LAN, "dev", ("203.0.113.10", "203.0.113.200")).await;
        for number in 0..40u64 {
            let uid = format!("u{number}");
            let told = site.dev.ensure(wanted(&uid, &uid, 80)).await.unwrap();
            assert_ne!(told.state(), State::Failed, "{told:?}");
            tokio::time::sleep(Duration::from_millis(number * 7 % 61)).await;
            site.dev.release(service(&uid, &uid)).await.unwrap();
        }
        until("all are gone", async || site.objects().await.is_empty().then_some(())).await;
        // What is reserved for an object that is gone stays reserved.
        tokio::time::sleep(Duration::from_secs(1)).await;
        for name in ["dev", "more"] {
            let pool = of_pool(api, name).await;
            let taken = pool["status"]["allocated"].as_object().map_or(0, serde_json::Map::len);
            assert_eq!(taken, 0, "{pool}");
        }
    });
}

/// harvester/harvester#10905: a cluster could name another's network. It sees and touches nothing of another.
#[test]
fn nothing_of_another_cluster_can_be_had_seen_or_touched() {
    wait(async {
        let site = Site::start().await;
        let theirs = site.prod.ensure(wanted("web", "u1", 80)).await.unwrap();
        assert_eq!(site.prod.ready("u1").await, "198.51.100.2");
        for network in ["default/wan", "default/none"] {
            let request = EnsureLoadBalancerRequest { network: network.into(), ..wanted("web", "u1", 80) };
            let told = site.dev.ensure(request).await.unwrap();
            let words = format!("no VM of this cluster is attached to a network {network:?}");
            assert_eq!((told.state(), told.reason.as_str()), (State::Failed, "UnknownNetwork"));
            assert_eq!(told.message, words, "whether there is one is not said");
        }
        assert_eq!(site.objects().await.len(), 1);
        assert!(site.dev.release(service("web", "u1")).await.unwrap(), "it has none");
        assert_eq!(site.dev.all().await.unwrap(), []);
        let shared =
            EnsureLoadBalancerRequest { share_with: Some(service("web", "u1")), ..wanted("db", "u2", 5432) };
        assert_eq!(site.dev.ensure(shared).await.unwrap().reason, "NoPrimary");
        // The same name and UID are another Service's in another cluster.
        site.dev.ensure(wanted("web", "u1", 80)).await.unwrap();
        assert_eq!(site.dev.ready("u1").await, "192.0.2.12");
        // What could not be had before is had as soon as it can be.
        assert_eq!(site.dev.ready("u2").await, "192.0.2.12");
        assert!(site.dev.release(service("db", "u2")).await.unwrap());
        assert!(!site.dev.release(service("web", "u1")).await.unwrap());
        let left = site.prod.all().await.unwrap();
        assert_eq!((left.len(), left[0].name.clone(), left[0].state()), (1, theirs.name, State::Ready));
    });
}

/// One as Harvester's cloud provider makes it.
async fn harvesters(site: &Site, name: &str, of: &str) -> Value {
    harvesters_of(site, "dev", name, of).await
}

/// The same of this cluster.
async fn harvesters_of(site: &Site, cluster: &str, name: &str, of: &str) -> Value {
    let object = json!({
        "apiVersion": "loadbalancer.harvesterhci.io/v1beta1",
        "kind": "LoadBalancer",
        "metadata": {
            "name": name, "namespace": "default",
            "labels": {
                "cloudprovider.harvesterhci.io/cluster": cluster,
                "cloudprovider.harvesterhci.io/serviceNamespace": "shop",
                "cloudprovider.harvesterhci.io/serviceName": of,
            },
            "annotations": { "loadbalancer.harvesterhci.io/cluster": cluster },
        },
        "spec": { "workloadType": "cluster", "ipam": "pool" },
    });
    let made = site.whole.cluster.api.create(path(&object).rsplit_once('/').unwrap().0, &object).await;
    until("it has an address", async || {
        let now = site.whole.cluster.api.get(&path(&made)).await?;
        now["status"]["allocatedAddress"]["ip"].is_string().then_some(now)
    })
    .await
}

/// harvester/harvester#11345: what a Service that was made again under another UID has left stayed for ever.
#[test]
fn what_harvesters_cloud_provider_has_made_is_taken_over_and_what_it_has_left_is_given_back() {
    wait(async {
        let site = Site::start().await;
        let uid = "3f1c9a52-5c0f-4a8e-9d1b-0d7a2f3b4c5d";
        // The names are made by another program: see the test of them.
        let kept = harvesters(&site, "dev-shop-web-68001ae6", "web").await;
        let left = harvesters(&site, "dev-shop-web-00000000", "web").await;
        until("both are told", async || (site.dev.all().await.ok()?.len() == 2).then_some(())).await;
        let told = site.dev.ensure(wanted("web", uid, 80)).await.unwrap();
        let address = kept["status"]["allocatedAddress"]["ip"].as_str().unwrap();
        assert_eq!((told.state(), told.name.as_str()), (State::Ready, "dev-shop-web-68001ae6"));
        assert_eq!(told.addresses[0].address, address, "its address stays");
        let all = site.dev.all().await.unwrap();
        let uids: Vec<_> = all.iter().map(|one| one.service.clone().unwrap().uid).collect();
        assert!(
            uids.contains(&uid.to_owned()) && uids.contains(&String::new()) && uids.len() == 2,
            "{all:?}"
        );
        // It is no Service's any more, as guestlet-ccm finds out.
        assert!(!site.dev.release(service("web", "")).await.unwrap());
        until("it is gone", async || site.whole.cluster.api.get(&path(&left)).await.is_none().then_some(()))
            .await;
        assert!(site.dev.release(service("web", "")).await.unwrap());
        assert_eq!(site.dev.all().await.unwrap().len(), 1);
        let changed = EnsureLoadBalancerRequest { ipam: v1::Ipam::Dhcp.into(), ..wanted("web", uid, 80) };
        let words = "its address comes from ipam pool, which cannot become dhcp";
        refused(site.dev.ensure(changed).await, Code::FailedPrecondition, words);
    });
}

/// Harvester's webhooks answer 500 where they do not let something be, which once was told as an API that cannot be asked.
#[test]
fn what_harvester_does_not_let_be_is_told_in_its_words_and_had_once_it_may_be() {
    wait(async {
        let site = Site::start().await;
        let api = &site.whole.cluster.api;
        // As Rancher marks the VMs of a cluster that it removes.
        let mark = |value: Value| {
            json!({ "metadata": {
                "labels": {
                    "guestcluster.harvesterhci.io/name": "dev",
                    "harvesterhci.io/creator": "docker-machine-driver-harvester",
                },
                "annotations": { "harvesterhci.io/removeAllPersistentVolumeClaims": value },
            } })
        };
        let vm = Kind::Vm.path("default/web");
        api.patch(&vm, &mark(json!("true"))).await.unwrap();
        let told = until("it is refused", async || {
            let told = site.dev.ensure(wanted("web", "u1", 80)).await.unwrap();
            if told.state() != State::Failed {
                // The webhook has heard of the mark a little later.
                site.dev.release(service("web", "u1")).await.unwrap();
            }
            (told.state() == State::Failed).then_some(told)
        })
        .await;
        assert_eq!(told.reason, "RefusedByHost");
        assert!(told.message.contains("shows guest cluster dev is being removed"), "{}", told.message);
        // Another cluster's are none of its business.
        site.prod.ensure(wanted("web", "u1", 80)).await.unwrap();
        assert_eq!(site.prod.ready("u1").await, "198.51.100.2");
        api.patch(&vm, &mark(Value::Null)).await.unwrap();
        until("it is let be", async || {
            let told = site.dev.ensure(wanted("web", "u1", 80)).await.unwrap();
            (told.state() != State::Failed).then_some(())
        })
        .await;
        assert!(site.dev.ready("u1").await.starts_with("192.0.2."));
    });
}

#[test]
fn services_share_an_address_and_some_get_theirs_by_dhcp() {
    wait(async {
        let site = Site::start().await;
        let dev = &site.dev;
        dev.ensure(wanted("web", "u1", 80)).await.unwrap();
        let sharing = |port: u32, with: &str| EnsureLoadBalancerRequest {
            share_with: Some(service(with, &format!("u-{with}"))),
            ..wanted("db", "u2", port)
        };
        let with = |mut request: EnsureLoadBalancerRequest, uid: &str| {
            request.share_with.as_mut().unwrap().uid = uid.into();
            request
        };
        // It is had as soon as the other has one, without being asked for again.
        let clash = dev.ensure(with(sharing(80, "web"), "u1")).await.unwrap();
        assert_eq!(clash.state(), State::Failed);
        dev.ready("u1").await;
        dev.ensure(with(sharing(5432, "web"), "u1")).await.unwrap();
        assert_eq!(dev.ready("u2").await, "192.0.2.12");
        let clash = dev.ensure(with(sharing(80, "web"), "u1")).await.unwrap();
        assert_eq!((clash.reason.as_str(), clash.addresses.len()), ("PortInUse", 1), "what it had stays");
        refused(dev.release(service("web", "u1")).await, Code::FailedPrecondition, "shop/db");
        assert!(dev.release(service("db", "u2")).await.unwrap());
        assert!(!dev.release(service("web", "u1")).await.unwrap());

        let request = EnsureLoadBalancerRequest { ipam: v1::Ipam::Dhcp.into(), ..wanted("ftp", "u3", 21) };
        dev.ensure(request).await.unwrap();
        assert_eq!(dev.ready("u3").await, "0.0.0.0");
        // People see them all, and give one back.
        let leader = &site.whole.controllers[0];
        let shown = leader.words(&["lb", "ls"]);
        assert!(shown.contains("shop/ftp") && shown.contains("default/dev"), "{shown}");
        assert!(leader.words(&["pools"]).contains("192.0.2.11-192.0.2.13"), "{}", leader.words(&["pools"]));
        let removed = leader.ctl(&["lb", "rm", "u3", "--cluster", "default/dev"]);
        assert!(removed.status.success(), "{removed:?}");
        until("all are gone", async || site.objects().await.is_empty().then_some(())).await;
    });
}

#[test]
fn without_harvester_vms_are_told_and_load_balancers_refused_with_what_to_do() {
    wait(async {
        let whole = Whole::start(1).await;
        let web = vm(&whole, "web", "dev", LAN, "web").await;
        let calls = Calls::of(&web).await;
        let words = until("it is known that there are none", async || match calls.all().await {
            Err(status) if status.code() == Code::Unimplemented => Some(status.message().to_owned()),
            Err(status) if status.code() == Code::Unavailable => None,
            other => panic!("{other:?}"),
        })
        .await;
        assert!(words.contains("which Harvester installs") && words.contains("MetalLB"), "{words}");
        refused(calls.ensure(wanted("web", "u1", 80)).await, Code::Unimplemented, "no LoadBalancer");
        refused(calls.release(service("web", "u1")).await, Code::Unimplemented, "no LoadBalancer");
        let bounds = Some(WatchBounds::default());
        let told = calls.watch_instances(v1::WatchInstancesRequest { bounds }).await.unwrap();
        assert_eq!(told.instances.len(), 1);
    });
}

#[test]
fn what_is_under_way_when_the_leader_is_killed_is_done_once() {
    wait(async {
        let whole = Whole::start(2).await;
        allow(&whole).await;
        let mut site = Site::of(whole).await;
        pool(&site.whole.cluster.api, "more", "default/wan", "prod", ("203.0.113.1", "203.0.113.60")).await;
        let first = site.whole.leader().await;
        let calls: Vec<_> = (0..12)
            .map(|number| {
                let (prod, uid) = (site.prod.clone(), format!("u{number}"));
                tokio::spawn(async move { prod.ensure(wanted(&uid, &uid, 80)).await })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(30)).await;
        site.whole.controllers[first].kill();
        for call in calls {
            if let Err(status) = call.await.unwrap() {
                assert!(matches!(status.code(), Code::Unavailable | Code::ResourceExhausted), "{status}");
            }
        }
        for number in 0..12 {
            let uid = format!("u{number}");
            until("it is asked for again", async || site.prod.ensure(wanted(&uid, &uid, 80)).await.ok())
                .await;
        }
        assert_eq!(site.whole.leader().await, 1 - first);
        for number in 0..9 {
            drop(site.prod.becomes(&format!("u{number}"), "is told", |_| true).await);
        }
        let objects = site.objects().await;
        let mut names: Vec<_> = objects.iter().map(path).collect();
        names.dedup();
        assert_eq!((objects.len(), names.len()), (12, 12));
    });
}
