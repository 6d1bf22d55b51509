//! Descriptions of load balancers that a cluster does not have yet or must not have, and the number of checks.

use super::super::super::super::health::MOST_CHECKS;
use super::super::super::super::wanted::Check;
use super::*;

/// Until its Service can have what it requests, the object is reported as that Service's, with its address, and
/// not a second time by itself.
#[test]
fn one_that_is_not_taken_over_yet_is_told_of_once() {
    let mut world = World::new();
    world.put(theirs(&service("web")));
    let all = |world: &World| -> Vec<LoadBalancer> {
        let keys = world.balancers.keys(Some("ns/dev"));
        keys.iter().filter_map(|key| world.message(key)).collect()
    };
    assert_eq!(all(&world)[0].service.as_ref().unwrap().uid, "");
    let wanted = Wanted { announcing: Announcing::Host, ..of_port(80) };
    let Err(Refusal::Failure(failure)) = world.ensure("web", &wanted) else { panic!() };
    let asked = Asked { service: service("web"), wanted, failure };
    let key: Key = ("ns/dev".into(), "u-web".into());
    world.balancers.asked.insert(key.clone(), asked);
    let told = all(&world);
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(
        (told[0].state(), told[0].reason.as_str(), told[0].addresses[0].address.as_str()),
        (State::Failed, "NotForwarded", "192.0.2.7")
    );
    assert_eq!(told[0].service.as_ref().unwrap().uid, "u-web");
    // An object left by another Service of this name is reported by itself.
    world.put(theirs(&Service { uid: "before".into(), ..service("web") }));
    assert_eq!(all(&world).len(), 2);
    world.balancers.asked.remove(&key);
    assert_eq!(all(&world).len(), 2, "both by themselves");
    world.ensure("web", &of_port(80)).unwrap();
    assert_eq!(world.told("web").state(), State::Ready);
}

#[test]
fn the_address_of_a_network_that_is_not_the_clusters_is_neither_told_nor_shared() {
    let mut world = World::new();
    world.ensure("web", &of_port(80)).unwrap();
    world.allocate("web", "192.0.2.7");
    world.ensure("db", &sharing(81, "web")).unwrap();
    assert_eq!(world.told("db").addresses.len(), 1);
    let id = world.id("web");
    let chosen =
        json!({ "metadata": { "annotations": { "loadbalancer.harvesterhci.io/network": "ns/others" } } });
    world.change(&id, &chosen);
    for name in ["web", "db"] {
        let told = world.told(name);
        assert_eq!((told.state(), told.reason.as_str()), (State::Failed, "NetworkNotOfCluster"));
        assert!(told.addresses.is_empty());
    }
    world.fails("api", &sharing(82, "web"), "NoPrimary");
    // Before the networks are known, the address is not reported either.
    let key: Key = ("ns/dev".into(), "u-web".into());
    let told = message(&world.balancers, None, &key).unwrap();
    assert_eq!((told.state(), told.addresses.len()), (State::Pending, 0));
}

#[test]
fn a_cluster_has_so_many_health_checks_at_most() {
    let mut world = World::new();
    let check = Check {
        node_port: 30000,
        success_threshold: 1,
        failure_threshold: 3,
        period_seconds: 5,
        timeout_seconds: 3,
    };
    let checked = Wanted { check: Some(check), ..of_port(80) };
    for number in 0..MOST_CHECKS {
        world.ensure(&format!("s{number}"), &checked).unwrap();
    }
    world.ensure("s0", &checked).unwrap();
    let refused = world.ensure("more", &checked).unwrap_err();
    assert!(matches!(refused, Refusal::Problem(Problem::Exhausted(_))), "{refused:?}");
    world.ensure("more", &of_port(80)).unwrap();
}
