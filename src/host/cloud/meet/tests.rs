use std::collections::BTreeMap;

use super::super::settings::tests::pool;
use super::super::wanted::tests::{request, tcp};
use super::*;
use crate::addresses::Subnet;
use crate::wire::proto::v1::{self, EnsureLoadBalancerRequest};

struct Host {
    book: Book,
    settings: Settings,
}

impl Host {
    fn new(pools: Vec<Pool>) -> Self {
        let of_clusters = [("dev".to_owned(), ["lan".to_owned()].into())].into();
        let settings = Settings { pools, of_clusters, ..Settings::default() };
        Self { book: Book::new(Vec::new(), BTreeMap::new()), settings }
    }

    /// Does what the desk does for a request, without a disk.
    fn ensure(&mut self, request: EnsureLoadBalancerRequest) -> Result<Vec<String>, &'static str> {
        let (service, wanted) = Wanted::read(request).unwrap();
        let known = self.book.find("dev", &service.uid).cloned();
        let known = known.unwrap_or_else(|| Record::new(service.uid.clone(), "dev".into(), service));
        if let Some(met) = &known.met {
            check_change(met.ipam, &met.network, &wanted).map_err(|_| "contradiction")?;
        }
        let ground = Ground { book: &self.book, settings: &self.settings, now: Instant::now() };
        match ground.meet(&known, &wanted) {
            Ok(addresses) => {
                let told = addresses.iter().map(|held| held.address.to_string()).collect();
                let mut record = known;
                (record.addresses, record.met) = (addresses, Some(wanted));
                self.book.put(record);
                Ok(told)
            }
            Err(failure) => Err(failure.reason),
        }
    }
}

fn ask(name: &str, change: impl FnOnce(&mut EnsureLoadBalancerRequest)) -> EnsureLoadBalancerRequest {
    let mut request = request(name, name);
    change(&mut request);
    request
}

fn plain(name: &str) -> EnsureLoadBalancerRequest {
    ask(name, |_| {})
}

fn sharing(name: &str, with: &str, port: u32) -> EnsureLoadBalancerRequest {
    ask(name, |one| {
        one.share_with = plain(with).service;
        one.ports = vec![tcp(port, 30000)];
    })
}

const BOTH: [i32; 2] = [1, 2];

#[test]
fn the_same_request_has_the_same_outcome() {
    let mut host = Host::new(vec![pool("p", &["192.0.2.1-192.0.2.2"])]);
    for _ in 0..3 {
        assert_eq!(host.ensure(plain("a")), Ok(vec!["192.0.2.1".into()]));
        assert_eq!(host.ensure(plain("b")), Ok(vec!["192.0.2.2".into()]));
        assert_eq!(host.ensure(plain("c")), Err("PoolExhausted"));
    }
}

#[test]
fn addresses_that_are_asked_for_have_to_be_the_clusters_and_free() {
    let of_others = Pool { clusters: Some(vec!["prod".parse().unwrap()]), ..pool("o", &["198.51.100.1"]) };
    let mut host = Host::new(vec![pool("p", &["192.0.2.1-192.0.2.9"]), of_others]);
    let asked = |name: &str, address: &str| ask(name, |one| one.addresses = vec![address.into()]);
    assert_eq!(host.ensure(asked("a", "192.0.2.5")), Ok(vec!["192.0.2.5".into()]));
    assert_eq!(host.ensure(asked("b", "192.0.2.5")), Err("AddressInUse"));
    assert_eq!(host.ensure(asked("b", "198.51.100.1")), Err("AddressOutsidePools"));
    assert_eq!(host.ensure(asked("b", "203.0.113.1")), Err("AddressOutsidePools"));
    // It may request another address, or any: then it keeps the one that it has.
    assert_eq!(host.ensure(asked("a", "192.0.2.6")), Ok(vec!["192.0.2.6".into()]));
    assert_eq!(host.ensure(plain("a")), Ok(vec!["192.0.2.6".into()]));
    assert_eq!(host.ensure(asked("b", "192.0.2.5")), Ok(vec!["192.0.2.5".into()]));
}

#[test]
fn two_families_are_had_as_far_as_they_are_asked_for() {
    let dual =
        |name: &str, all: bool| ask(name, |one| (one.families, one.all_families) = (BOTH.to_vec(), all));
    let mut host = Host::new(vec![pool("p", &["192.0.2.1-192.0.2.9", "2001:db8::1"])]);
    assert_eq!(host.ensure(dual("a", true)), Ok(vec!["192.0.2.1".into(), "2001:db8::1".into()]));
    assert_eq!(host.ensure(dual("b", true)), Err("PoolExhausted"));
    assert_eq!(host.ensure(dual("b", false)), Ok(vec!["192.0.2.2".into()]));
    let mut host = Host::new(vec![pool("p", &["192.0.2.1-192.0.2.9"])]);
    assert_eq!(host.ensure(dual("a", true)), Err("NoPool"));
    let asked = ask("a", |one| {
        (one.families, one.addresses) = (BOTH.to_vec(), vec!["2001:db8::7".into()]);
    });
    assert_eq!(host.ensure(asked), Err("AddressOutsidePools"), "what is asked for by name has to be had");
}

#[test]
fn an_address_is_shared_only_where_no_port_is_in_use() {
    let mut host = Host::new(vec![pool("p", &["192.0.2.1-192.0.2.9"])]);
    assert_eq!(host.ensure(sharing("b", "a", 81)), Err("NoPrimary"));
    host.ensure(plain("a")).unwrap();
    assert_eq!(host.ensure(sharing("b", "a", 80)), Err("PortInUse"));
    assert_eq!(host.ensure(sharing("b", "a", 81)), Ok(vec![]));
    assert_eq!(host.ensure(sharing("c", "a", 81)), Err("PortInUse"));
    assert_eq!(host.ensure(sharing("c", "b", 82)), Err("PrimaryShares"));
    assert_eq!(host.ensure(sharing("a", "a", 80)), Err("SharesItself"));
    host.ensure(plain("d")).unwrap();
    assert_eq!(host.ensure(sharing("a", "d", 99)), Err("AddressShared"));
    let other = ask("a", |one| one.ports = vec![tcp(80, 1), tcp(81, 2)]);
    assert_eq!(host.ensure(other), Err("PortInUse"), "the one that has it is bound as well");
    let differs = ask("c", |one| {
        one.share_with = plain("a").service;
        one.ports = vec![tcp(90, 30000)];
        one.announcing = v1::Announcing::None.into();
    });
    assert_eq!(host.ensure(differs), Err("AnnouncingDiffers"));
    // The same number with UDP is another port.
    let udp = ask("c", |one| {
        one.share_with = plain("a").service;
        one.ports = vec![v1::ServicePort { protocol: "UDP".into(), ..tcp(80, 30000) }];
    });
    assert_eq!(host.ensure(udp), Ok(vec![]));
}

#[test]
fn what_cannot_become_something_else_is_refused() {
    let lan = Pool { network: Some("lan".into()), ..pool("p", &["192.0.2.1-192.0.2.9"]) };
    let mut host = Host::new(vec![lan]);
    let network = |name: &str, network: &str| ask(name, |one| one.network = network.into());
    assert_eq!(host.ensure(network("a", "wan")), Err("UnknownNetwork"));
    assert_eq!(host.ensure(network("a", "lan")), Ok(vec!["192.0.2.1".into()]));
    assert_eq!(host.ensure(network("a", "")), Err("contradiction"));
    let dhcp = |name: &str| ask(name, |one| (one.network, one.ipam) = ("lan".into(), v1::Ipam::Dhcp.into()));
    assert_eq!(host.ensure(dhcp("a")), Err("contradiction"));
    assert_eq!(host.ensure(dhcp("b")), Ok(vec![]));
    let host_dhcp =
        ask("c", |one| (one.ipam, one.announcing) = (v1::Ipam::Dhcp.into(), v1::Announcing::Host.into()));
    assert_eq!(host.ensure(host_dhcp), Err("NoDhcp"));
}

#[test]
fn the_host_forwards_only_from_pools_that_are_for_it() {
    let nat = Pool {
        forward_to: vec![Subnet::parse("10.0.0.0/8").unwrap()],
        reserved_ports: vec![22],
        ..pool("nat", &["198.51.100.1-198.51.100.9"])
    };
    let mut host = Host::new(vec![pool("p", &["192.0.2.1-192.0.2.9"]), nat]);
    let by_host = |name: &str, port: u32| {
        ask(name, |one| {
            one.announcing = v1::Announcing::Host.into();
            one.ports = vec![tcp(port, 30000)];
        })
    };
    assert_eq!(host.ensure(plain("a")), Ok(vec!["192.0.2.1".into()]));
    assert_eq!(host.ensure(by_host("b", 80)), Ok(vec!["198.51.100.1".into()]));
    assert_eq!(host.ensure(by_host("c", 22)), Err("PortReserved"));
    // The announcer may change: the address then comes from another pool.
    assert_eq!(host.ensure(by_host("a", 80)), Ok(vec!["198.51.100.2".into()]));
    // Removing a pool from the settings, or from a cluster, takes no address from its present holders.
    host.settings.pools[0].clusters = Some(vec!["prod".parse().unwrap()]);
    host.ensure(by_host("b", 81)).unwrap();
    host.settings.pools.remove(1);
    assert_eq!(host.ensure(by_host("b", 81)), Err("NoPool"), "but nobody forwards from it");
}
