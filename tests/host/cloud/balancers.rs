//! Load balancers of clusters: whose they are, which addresses they get, and what is said where they get none.

use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{self, WatchBounds, WatchLoadBalancersRequest};
use tonic::Code;

use super::{Asking, Machines, SMALL, USUAL, service, started, tcp, wanted};
use crate::csi::refused;

fn watch(asking: &Asking, position: &str, wait_seconds: u32) -> v1::WatchLoadBalancersResponse {
    let bounds = Some(WatchBounds { position: position.into(), wait_seconds });
    asking.watch_load_balancers(WatchLoadBalancersRequest { bounds }).unwrap()
}

#[test]
fn a_service_gets_and_loses_its_address() {
    let vms = started(&USUAL, SMALL);
    let (a, b) = (vms.of("a"), vms.of("b"));
    let start = watch(&a, "", 0);
    assert!(start.complete && start.load_balancers.is_empty());
    let first = a.ensure(wanted("web")).unwrap();
    assert_eq!((first.state(), first.reason.as_str()), (State::Ready, ""));
    assert_eq!(
        (first.addresses[0].address.as_str(), first.addresses[0].pool.as_str()),
        ("192.0.2.1", "small")
    );
    assert_eq!((first.ipam(), first.announcing()), (v1::Ipam::Pool, v1::Announcing::KubeVip));
    // Asked again, by whichever VM of the cluster.
    let again = b.ensure(wanted("web")).unwrap();
    assert_eq!((again.addresses, again.name), (first.addresses, first.name));
    let news = watch(&b, &start.position, 20);
    assert_eq!((news.complete, news.load_balancers.len()), (false, 1));
    a.release("web").unwrap();
    a.release("web").unwrap();
    let gone = watch(&b, &news.position, 20);
    assert_eq!((gone.gone, gone.load_balancers.len()), (vec![service("web")], 0));
    assert_eq!((a.names(), vms.kept()), (Vec::<String>::new(), 0));
    // A Service of the same name gets the address that it had, though others were there first.
    let mut anew = wanted("web");
    anew.service.as_mut().unwrap().uid = "another".into();
    a.ensure(wanted("other")).unwrap();
    assert_eq!(a.address(anew), "192.0.2.1");
}

#[test]
fn clusters_neither_see_nor_touch_each_others() {
    let vms = started(&USUAL, SMALL);
    let (a, c) = (vms.of("a"), vms.of("c"));
    let (ours, theirs) = (a.address(wanted("web")), c.address(wanted("web")));
    assert_ne!(ours, theirs, "names and UIDs are each cluster's own");
    assert_eq!((a.list().len(), c.list().len()), (1, 1));
    // What another has is in use, and nothing is said of who has it.
    let mut asks = wanted("mine");
    asks.addresses = vec![theirs.clone()];
    let told = a.ensure(asks).unwrap();
    assert_eq!(
        (told.reason.as_str(), told.message.as_str()),
        ("AddressInUse", format!("{theirs} is in use").as_str())
    );
    // To share another's does not go: it does not exist for it.
    c.ensure(wanted("only-theirs")).unwrap();
    let mut shares = wanted("shares");
    shares.share_with = Some(service("only-theirs"));
    shares.ports = vec![tcp(90, 30090)];
    assert_eq!(a.failure(shares), "NoPrimary");
    a.release("only-theirs").unwrap();
    a.release("web").unwrap();
    assert_eq!(c.names(), ["only-theirs", "web"]);
    assert_eq!(c.address(wanted("web")), theirs);
}

#[test]
fn an_exhausted_pool_is_told_and_tried_again() {
    let vms = started(&USUAL, SMALL);
    let (a, c) = (vms.of("a"), vms.of("c"));
    for name in ["w1", "w2", "w3"] {
        a.ensure(wanted(name)).unwrap();
    }
    c.ensure(wanted("theirs")).unwrap();
    assert_eq!(a.failure(wanted("late")), "PoolExhausted");
    let position = watch(&a, "", 0).position;
    // Another cluster gives its address back, and nobody asks again.
    c.release("theirs").unwrap();
    let news = watch(&a, &position, 20);
    assert_eq!(news.load_balancers[0].state(), State::Ready, "{news:?}");
    assert_eq!(news.load_balancers[0].addresses[0].address, "192.0.2.4");
    // One that wants more than it can have keeps what it has.
    let mut more = wanted("w1");
    (more.families, more.all_families) = (vec![1, 2], true);
    let told = a.ensure(more).unwrap();
    assert_eq!((told.state(), told.reason.as_str()), (State::Failed, "NoPool"));
    assert_eq!(told.addresses[0].address, "192.0.2.1");
}

#[test]
fn a_shared_address_has_each_port_once() {
    let vms = started(&USUAL, SMALL);
    let a = vms.of("a");
    let share = |name: &str, port: u32| {
        let mut request = wanted(name);
        request.share_with = Some(service("web"));
        request.ports = vec![tcp(port, 30000 + port)];
        request
    };
    // The one that is shared comes later.
    assert_eq!(a.failure(share("second", 81)), "NoPrimary");
    let address = a.address(wanted("web"));
    let second = a.until(&vms.lab, "second", |one| one.state() == State::Ready);
    assert_eq!(
        (second.addresses[0].address.as_str(), second.shares_with),
        (address.as_str(), Some(service("web")))
    );
    assert_eq!(a.failure(share("third", 81)), "PortInUse");
    assert_eq!(a.failure(share("third", 80)), "PortInUse");
    assert_eq!(a.address(share("third", 82)), address);
    // The first of them cannot go while others use its address.
    refused(a.release("web"), Code::FailedPrecondition, "shop/second, shop/third");
    a.release("second").unwrap();
    a.release("third").unwrap();
    a.release("web").unwrap();
    assert_eq!(vms.kept(), 0);
}

#[test]
fn what_a_load_balancer_is_cannot_become_something_else() {
    let vms = started(&USUAL, SMALL);
    let a = vms.of("a");
    let address = a.address(wanted("web"));
    let mut dhcp = wanted("web");
    dhcp.set_ipam(v1::Ipam::Dhcp);
    refused(a.ensure(dhcp.clone()), Code::FailedPrecondition, "cannot become dhcp");
    assert_eq!(a.address(wanted("web")), address, "and it is as it was");
    dhcp.service = Some(service("dynamic"));
    assert_eq!(a.address(dhcp), "0.0.0.0");
    let mut odd = wanted("web");
    odd.ports = vec![tcp(80, 1), tcp(80, 2)];
    refused(a.ensure(odd), Code::InvalidArgument, "TCP 80 twice");
    let mut elsewhere = wanted("elsewhere");
    elsewhere.network = "lan".into();
    assert_eq!(a.failure(elsewhere), "UnknownNetwork");
}

#[test]
fn a_cluster_has_no_more_than_it_may_and_only_some_vms_may_ask() {
    let mut vms =
        started(&USUAL, &format!("{SMALL}\n[cluster.dev]\nmax-load-balancers = 2\ncontrollers = ['a']"));
    let (a, b) = (vms.of("a"), vms.of("b"));
    refused(b.ensure(wanted("web")), Code::PermissionDenied, "may not request load balancers");
    refused(b.release("web"), Code::PermissionDenied, "may not request");
    let says = |words: &str| assert!(vms.lab.log().contains(words), "{words}\n{}", vms.lab.log());
    says("audit: vm:b: lb ensure \"dev/shop/web\": denied, PERMISSION_DENIED");
    says("audit: vm:b: lb rm \"dev/shop/web\": denied, PERMISSION_DENIED");
    a.ensure(wanted("w1")).unwrap();
    a.ensure(wanted("w2")).unwrap();
    refused(a.ensure(wanted("w3")), Code::ResourceExhausted, "has 2 load balancers, and may have at most 2");
    says("audit: vm:a: lb ensure \"dev/shop/w1\": allowed, OK");
    says("audit: vm:a: lb ensure \"dev/shop/w3\": allowed, RESOURCE_EXHAUSTED");
    a.ensure(wanted("w2")).unwrap();
    // It holds at once when the settings change.
    vms.lab.edit("max-load-balancers = 2", "max-load-balancers = 3");
    vms.lab.until("there may be more", || a.ensure(wanted("w3")).is_ok());
}

/// What settings that change take away stays with those who have it.
#[test]
fn addresses_outlive_their_pool() {
    let mut vms = started(&USUAL, SMALL);
    let a = vms.of("a");
    let address = a.address(wanted("web"));
    vms.lab.edit("ranges = ['192.0.2.1-192.0.2.4']", "ranges = ['198.51.100.1-198.51.100.4']");
    vms.lab.until("others come from the new ranges", || {
        let other = a.ensure(wanted("other")).unwrap().addresses[0].address.clone();
        a.release("other").unwrap();
        other.starts_with("198.51.100.")
    });
    assert_eq!(a.address(wanted("web")), address);
    vms.restart();
    assert_eq!(vms.of("a").address(wanted("web")), address);
}

fn many(vms: &Machines, count: usize) -> std::time::Duration {
    let begun = std::time::Instant::now();
    std::thread::scope(|scope| {
        for worker in 0..8 {
            let a = vms.of(if worker % 2 == 0 { "a" } else { "b" });
            scope.spawn(move || {
                for number in (0..count).filter(|number| number % 8 == worker) {
                    a.ensure(wanted(&format!("s{number}"))).unwrap();
                }
            });
        }
    });
    begun.elapsed()
}

/// Issue 20: 500 Services from nothing within 20 s. The limit is for a machine that is busy.
#[test]
fn five_hundred_services_have_addresses_soon() {
    let mut vms = started(
        &USUAL,
        "limits.calls-per-second = 1000\n[[address-pool]]\nname = 'large'\nranges = ['10.200.0.0/20']",
    );
    let took = many(&vms, 500);
    assert!(took < std::time::Duration::from_secs(60), "{took:?}");
    let list = vms.of("a").list();
    let addresses: std::collections::BTreeSet<_> =
        list.iter().map(|one| one.addresses[0].address.clone()).collect();
    assert_eq!((list.len(), addresses.len(), vms.kept()), (500, 500, 500));
    vms.restart();
    let again: std::collections::BTreeSet<_> =
        vms.of("b").list().iter().map(|one| one.addresses[0].address.clone()).collect();
    assert_eq!(again, addresses);
    many(&vms, 500);
    assert_eq!(vms.of("a").list().len(), 500);
}
