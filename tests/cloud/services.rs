//! Services of type LoadBalancer: from nothing to an address, and back to nothing.

use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{Announcing, BackendProblem, Ipam};
use serde_json::{Value, json};

use crate::host::{Fault, instance};
use crate::lab::{Lab, SERVICES, annotation, quiet, text, uid, wait};
use crate::patience::until;

const FINALIZER: &str = "service.kubernetes.io/load-balancer-cleanup";
const VIP: &str = "kube-vip.io/loadbalancerIPs";
const INTERFACE: &str = "kube-vip.io/serviceInterface";
const NETWORK: &str = "cloudprovider.harvesterhci.io/network";
const PRIMARY: &str = "cloudprovider.harvesterhci.io/primary-service";

fn ingress(service: &Value) -> Vec<&str> {
    let all = service["status"]["loadBalancer"]["ingress"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().map(|one| text(&one["ip"])).collect()
}

fn has_finalizer(service: &Value) -> bool {
    service["metadata"]["finalizers"].as_array().is_some_and(|all| all.contains(&json!(FINALIZER)))
}

async fn is_gone(lab: &Lab, service: &str) {
    until(&format!("{service} is gone"), async || lab.get(service).await.is_none().then_some(())).await;
}

#[test]
fn a_service_gets_an_address_that_kube_vip_announces_and_gives_it_back() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        let made = lab.service("web", json!({})).await;
        let web = lab.service_is("web", "has an address", |web| !annotation(web, VIP).is_empty()).await;
        assert_eq!(annotation(&web, VIP), "198.51.100.1");
        assert!(has_finalizer(&web));
        assert!(ingress(&web).is_empty(), "kube-vip says what it announces");
        let request = lab.host.request(uid(&made)).unwrap();
        assert_eq!((request.announcing(), request.ipam()), (Announcing::KubeVip, Ipam::Unspecified));
        assert_eq!(request.service.as_ref().unwrap().name, "web");
        assert!(lab.told("web", "EnsuredLoadBalancer").await.contains("198.51.100.1"));
        let calls = lab.host.calls("EnsureLoadBalancer");
        quiet(3).await;
        assert_eq!(lab.host.calls("EnsureLoadBalancer"), calls, "nothing is asked for again");

        lab.api.delete(&format!("{SERVICES}/web")).await;
        is_gone(&lab, "web").await;
        assert!(lab.host.world().balancers.is_empty());
    });
}

/// harvester/harvester#11345: a Service that is made again under its name leaves what Harvester's cloud provider had made for the first.
#[test]
fn what_another_program_has_left_under_a_name_in_use_is_given_back_if_nothing_of_it_is_announced() {
    wait(async {
        let lab = Lab::start().await;
        // The first ones of three moved here from Harvester's cloud provider, and of the last one kube-vip still announces the old address.
        for (name, address) in [("web", "192.0.2.101"), ("db", "192.0.2.102"), ("api", "192.0.2.103")] {
            lab.service(name, json!({ VIP: address })).await;
            lab.host.leave(&format!("left-{name}"), name, address);
        }
        let announced = json!({ "status": { "loadBalancer": { "ingress": [{ "ip": "192.0.2.103" }] } } });
        lab.api.patch(&format!("{SERVICES}/api/status"), &announced).await.unwrap();
        // One that cannot have what it asks for keeps what there is.
        lab.host.world().is_slow = true;
        let replica = lab.replica("a");
        for name in ["web", "api"] {
            let uid = uid(&lab.get(name).await.unwrap()).to_owned();
            until("it is asked for", async || lab.host.request(&uid)).await;
            lab.host.allocate(&uid);
        }
        until("it is given back", async || {
            (!lab.host.world().balancers.contains_key("left-web")).then_some(())
        })
        .await;
        assert!(
            lab.told("web", "ReleasedLeakedLoadBalancer").await.contains("an earlier Service of this name")
        );
        quiet(2).await;
        for left in ["left-db", "left-api"] {
            assert!(lab.host.world().balancers.contains_key(left), "{left}: {}", replica.log());
        }
        let web = lab.get("web").await.unwrap();
        assert!(annotation(&web, VIP).starts_with("198.51.100."), "it has its own: {web}");
        // As soon as that is over, and both sides are compared, it goes.
        let announced = json!({ "status": { "loadBalancer": { "ingress": [{ "ip": annotation(&lab.get("api").await.unwrap(), VIP) }] } } });
        lab.api.patch(&format!("{SERVICES}/api/status"), &announced).await.unwrap();
        drop(replica);
        let _replica = lab.replica("b");
        until("it is given back", async || {
            (!lab.host.world().balancers.contains_key("left-api")).then_some(())
        })
        .await;
        assert!(lab.host.world().balancers.contains_key("left-db"));
    });
}

/// Before anybody has announced it, its status is empty: the address was forgotten then.
#[test]
fn a_service_that_is_deleted_before_it_has_its_address_leaves_nothing() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        lab.host.world().is_slow = true;
        let web = lab.service("web", json!({})).await;
        until("it is asked for", async || lab.host.request(uid(&web))).await;
        lab.host.world().is_slow_to_release = true;
        lab.api.delete(&format!("{SERVICES}/web")).await;
        until("it is given back", async || (lab.host.calls("ReleaseLoadBalancer") > 0).then_some(())).await;
        quiet(1).await;
        assert!(has_finalizer(&lab.get("web").await.unwrap()), "not before nothing is left");
        lab.host.world().is_slow_to_release = false;
        lab.host.released(uid(&web));
        is_gone(&lab, "web").await;
        assert!(lab.host.world().balancers.is_empty());
    });
}

#[test]
fn addresses_that_come_later_are_told_by_the_host_and_no_worker_waits_for_them() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica_with("a", &["--announce", "none"]);
        lab.host.world().is_slow = true;
        let mut all = Vec::new();
        for number in 0..20 {
            all.push(lab.service(&format!("web-{number}"), json!({})).await);
        }
        for one in &all {
            until("all are asked for", async || lab.host.request(uid(one))).await;
        }
        for one in &all {
            lab.host.allocate(uid(one));
        }
        for one in &all {
            let name = text(&one["metadata"]["name"]);
            lab.service_is(name, "has an address", |service| ingress(service).len() == 1).await;
        }
        assert_eq!(lab.host.calls("EnsureLoadBalancer"), 20, "each was asked for once");
    });
}

#[test]
fn a_service_that_is_made_again_under_its_name_leaves_nothing_of_the_first() {
    wait(async {
        let lab = Lab::start().await;
        let replica = lab.replica("a");
        let first = lab.service("web", json!({})).await;
        lab.service_is("web", "has an address", |web| !annotation(web, VIP).is_empty()).await;
        // Nobody sees to it while it goes, and somebody takes its finalizer away.
        drop(replica);
        lab.patch("web", json!({ "metadata": { "finalizers": null } })).await;
        lab.api.delete(&format!("{SERVICES}/web")).await;
        is_gone(&lab, "web").await;
        let second = lab.service("web", json!({})).await;
        let _replica = lab.replica("b");
        lab.service_is("web", "has an address", |web| !annotation(web, VIP).is_empty()).await;
        until("the first one's is given back", async || {
            (!lab.host.world().balancers.contains_key(uid(&first))).then_some(())
        })
        .await;
        assert!(lab.host.world().balancers.contains_key(uid(&second)));
        assert!(lab.told("web", "ReleasedLeakedLoadBalancer").await.contains("no longer exists"));
    });
}

#[test]
fn what_the_host_has_lost_or_has_too_much_is_set_right() {
    wait(async {
        let lab = Lab::start().await;
        lab.host.leak("default", "never", "u-1");
        lab.host.leak("no-such-namespace", "never", "u-2");
        let _replica = lab.replica("a");
        let web = lab.service("web", json!({})).await;
        lab.service_is("web", "has an address", |web| !annotation(web, VIP).is_empty()).await;
        until("both leaks are released", async || {
            let world = lab.host.world();
            (!world.balancers.contains_key("u-1") && !world.balancers.contains_key("u-2")).then_some(())
        })
        .await;
        // Somebody deletes it on the host.
        lab.host.world().requests.clear();
        lab.host.released(uid(&web));
        until("it is asked for again", async || lab.host.request(uid(&web))).await;
    });
}

#[test]
fn a_service_that_is_none_any_more_and_one_of_another_class() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica_with("a", &["--announce", "none"]);
        lab.service("web", json!({})).await;
        lab.service_is("web", "has an address", |web| ingress(web) == ["198.51.100.1"]).await;
        // Somebody else announces it from now on.
        lab.patch("web", json!({ "metadata": { "annotations": { "guestlet.io/announce": "kube-vip" } } }))
            .await;
        lab.service_is("web", "is kube-vip's", |web| annotation(web, VIP) == "198.51.100.1").await;
        lab.patch("web", json!({ "metadata": { "annotations": { "guestlet.io/announce": "host" } } })).await;
        lab.service_is("web", "is the host's", |web| annotation(web, VIP).is_empty()).await;
        let other = json!({ "spec": { "type": "ClusterIP", "ports": [{ "port": 80, "name": "http", "nodePort": null }], "externalTrafficPolicy": null } });
        lab.patch("web", other).await;
        let web = lab.service_is("web", "is none any more", |web| !has_finalizer(web)).await;
        assert!(ingress(&web).is_empty(), "{web}");
        assert!(lab.host.world().balancers.is_empty());
    });
}

/// The host gives another address for another announcer; kube-vip went on to announce the first, which was another Service's by then.
#[test]
fn kube_vip_is_told_nothing_any_more_once_another_announces() {
    wait(async {
        let lab = Lab::start().await;
        lab.host.world().is_moving = true;
        let _replica = lab.replica("a");
        lab.service("web", json!({})).await;
        lab.service_is("web", "is kube-vip's", |web| annotation(web, VIP) == "198.51.100.1").await;
        lab.patch("web", json!({ "metadata": { "annotations": { "guestlet.io/announce": "host" } } })).await;
        let web = lab.service_is("web", "is the host's", |web| ingress(web) == ["198.51.100.2"]).await;
        assert_eq!(annotation(&web, VIP), "", "{web}");
        // One that somebody else has written is left.
        lab.patch("web", json!({ "metadata": { "annotations": { VIP: "203.0.113.9" } } })).await;
        quiet(2).await;
        assert_eq!(annotation(&lab.get("web").await.unwrap(), VIP), "203.0.113.9");
    });
}

/// The address may be another Service's as soon as the host has it back.
#[test]
fn an_address_is_announced_no_more_when_it_is_given_back() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        let hold = json!({ "metadata": { "finalizers": ["example.com/hold", FINALIZER] } });
        for (name, announce) in [("web", "kube-vip"), ("db", "none")] {
            lab.service(name, json!({ "guestlet.io/announce": announce })).await;
            let is_there = |one: &Value| !annotation(one, VIP).is_empty() || !ingress(one).is_empty();
            lab.service_is(name, "has an address", is_there).await;
            lab.patch(name, hold.clone()).await;
        }
        lab.host.world().is_slow_to_release = true;
        for name in ["web", "db"] {
            let calls = lab.host.calls("ReleaseLoadBalancer");
            lab.api.delete(&format!("{SERVICES}/{name}")).await;
            until("it is asked to be given back", async || {
                (lab.host.calls("ReleaseLoadBalancer") > calls).then_some(())
            })
            .await;
            let service = lab.get(name).await.unwrap();
            assert!(has_finalizer(&service), "nothing was given back yet");
            assert_eq!((annotation(&service, VIP), ingress(&service).len()), ("", 0), "{service}");
        }
        lab.host.world().is_slow_to_release = false;
        for name in ["web", "db"] {
            lab.host.released(uid(&lab.get(name).await.unwrap()));
            let service = lab.service_is(name, "is given back", |one| !has_finalizer(one)).await;
            assert_eq!(service["metadata"]["finalizers"], json!(["example.com/hold"]));
            lab.patch(name, json!({ "metadata": { "finalizers": null } })).await;
        }
    });
}

#[test]
fn what_makes_no_sense_is_told_and_what_there_was_stays() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        let web = lab.service("web", json!({ "cloudprovider.harvesterhci.io/ipam": "pool" })).await;
        lab.service_is("web", "has an address", |web| !annotation(web, VIP).is_empty()).await;
        lab.patch(
            "web",
            json!({ "metadata": { "annotations": { "cloudprovider.harvesterhci.io/ipam": "dhcp" } } }),
        )
        .await;
        assert!(lab.told("web", "LoadBalancerRefused").await.contains("IPAM mode cannot change"));
        lab.patch(
            "web",
            json!({ "metadata": { "annotations": { "cloudprovider.harvesterhci.io/ipam": "magic" } } }),
        )
        .await;
        assert!(lab.told("web", "InvalidAnnotation").await.contains("magic"));
        assert_eq!(lab.host.request(uid(&web)).unwrap().ipam(), Ipam::Pool);
        assert_eq!(annotation(&lab.get("web").await.unwrap(), VIP), "198.51.100.1");
        // The host has no more: it says why, and gets it later.
        lab.patch(
            "web",
            json!({ "metadata": { "annotations": {
            "cloudprovider.harvesterhci.io/ipam": "pool", "cloudprovider.harvesterhci.io/color": "blue",
        } } }),
        )
        .await;
        assert!(lab.told("web", "UnknownAnnotation").await.contains("color"));
        lab.host.balance(uid(&web), |balancer| {
            balancer.state = State::Failed.into();
            (balancer.reason, balancer.message) =
                ("PoolExhausted".into(), "the pool lan has no address left".into());
        });
        assert!(lab.told("web", "PoolExhausted").await.contains("no address left"));
        assert_eq!(annotation(&lab.get("web").await.unwrap(), VIP), "198.51.100.1");
    });
}

#[test]
fn services_share_an_address_and_the_first_one_goes_last() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        let second = lab.service("second", json!({ PRIMARY: "default/first" })).await;
        assert!(lab.told("second", "NoPrimaryService").await.contains("default/first"));
        assert!(lab.host.request(uid(&second)).is_none());
        let first = lab.service("first", json!({})).await;
        let web = lab
            .service_is("second", "has the same address", |web| annotation(web, VIP) == "198.51.100.1")
            .await;
        assert_eq!(web["metadata"]["labels"][PRIMARY], "default.first");
        assert_eq!(lab.host.request(uid(&second)).unwrap().share_with.unwrap().uid, uid(&first));
        lab.api.delete(&format!("{SERVICES}/first")).await;
        assert!(lab.told("first", "LoadBalancerNotReleased").await.contains("shares its address"));
        assert!(lab.get("first").await.is_some());
        lab.api.delete(&format!("{SERVICES}/second")).await;
        is_gone(&lab, "second").await;
        is_gone(&lab, "first").await;
        assert!(lab.host.world().balancers.is_empty());
    });
}

#[test]
fn kube_vip_is_told_the_interface_of_the_network_if_all_nodes_agree() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica("a");
        for number in ["1", "2"] {
            lab.host.set(instance(number, &format!("n{number}"), &format!("192.0.2.1{number}")));
            lab.join(&format!("n{number}"), &format!("uuid-{number}")).await;
            lab.initialised(&format!("n{number}")).await;
        }
        lab.service("web", json!({ NETWORK: "default/lan" })).await;
        let web =
            lab.service_is("web", "has an interface", |web| !annotation(web, INTERFACE).is_empty()).await;
        assert_eq!((annotation(&web, INTERFACE), annotation(&web, VIP)), ("enp1s0", "198.51.100.1"));
        lab.host.change("2", |vm| vm.interfaces[0].name = "eth0".to_owned());
        lab.told("web", "InterfaceUnclear").await;
        let web = lab.service("other", json!({ NETWORK: "default/lan" })).await;
        assert!(lab.told("other", "InterfaceUnclear").await.contains("enp1s0, eth0"));
        assert_eq!(annotation(&lab.get("other").await.unwrap(), VIP), "");
        lab.host.change("2", |vm| vm.interfaces[0].name = "enp1s0".to_owned());
        lab.service_is("other", "has an interface", |web| annotation(web, INTERFACE) == "enp1s0").await;
        assert_eq!(lab.host.request(uid(&web)).unwrap().network, "default/lan");
    });
}

#[test]
fn health_checks_name_the_nodes_and_who_fails_is_told() {
    wait(async {
        let lab = Lab::start().await;
        let _replica = lab.replica_with("a", &["--announce", "host"]);
        lab.host.set(instance("1", "n1", "192.0.2.11"));
        lab.join("n1", "uuid-1").await;
        lab.initialised("n1").await;
        let check = json!({ "cloudprovider.harvesterhci.io/healthcheck-port": "80" });
        let web = lab.service("web", check).await;
        let request = until("it is asked for with a backend", async || {
            lab.host.request(uid(&web)).filter(|request| request.backends == ["1"])
        })
        .await;
        let port = request.ports.first().unwrap().node_port;
        assert!(port > 0 && request.health_check.unwrap().port == 80);
        // One more Node, and one that is to take no traffic.
        lab.host.set(instance("2", "n2", "192.0.2.12"));
        lab.join("n2", "uuid-2").await;
        until("both are named", async || {
            lab.host.request(uid(&web)).filter(|request| request.backends == ["1", "2"])
        })
        .await;
        let exclude = json!({ "metadata": { "labels": { "node.kubernetes.io/exclude-from-external-load-balancers": "" } } });
        lab.api.patch(&format!("{}/n1", crate::lab::NODES), &exclude).await.unwrap();
        until("one is named", async || {
            lab.host.request(uid(&web)).filter(|request| request.backends == ["2"])
        })
        .await;
        lab.host.balance(uid(&web), |balancer| {
            balancer.healthy = 0;
            balancer.failing = vec![BackendProblem {
                vm_uid: "2".into(),
                vm_name: "vm-2".into(),
                problem: format!("connection to port {port} refused"),
            }];
        });
        assert!(lab.told("web", "BackendsUnhealthy").await.contains("vm-2: connection to port"));
    });
}

#[test]
fn while_the_host_is_away_nothing_is_taken_away_and_then_all_is_made_up_for() {
    wait(async {
        let mut lab = Lab::start().await;
        let mut replica = lab.replica("a");
        lab.service("web", json!({})).await;
        lab.service_is("web", "has an address", |web| !annotation(web, VIP).is_empty()).await;
        lab.host.fault(Fault::Away);
        lab.service("late", json!({})).await;
        lab.api.delete(&format!("{SERVICES}/web")).await;
        assert!(lab.told("web", "LoadBalancerNotReleased").await.contains("does not answer"));
        lab.serving = None;
        quiet(5).await;
        assert!(has_finalizer(&lab.get("web").await.unwrap()) && replica.runs());
        assert_eq!(annotation(&lab.get("late").await.unwrap(), VIP), "");
        lab.host.fault(Fault::None);
        lab.serving = Some(lab.host.serve());
        is_gone(&lab, "web").await;
        lab.service_is("late", "has an address", |late| !annotation(late, VIP).is_empty()).await;
    });
}
