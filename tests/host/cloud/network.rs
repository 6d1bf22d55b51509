//! Load balancers that the host forwards: real traffic through the kernel, while nodes fail and return.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{self, EnsureLoadBalancerRequest, LoadBalancer};

use super::wires::{Wires, ask, output, say, sh};
use super::{Machines, forwarding, start_guest, started, tcp, wanted};
use crate::namespace::is_outside_of;

const VMS: [super::Vm; 2] = [("a", 1, "dev"), ("b", 2, "dev")];
pub const NAT: &str = "[[address-pool]]\nname = 'nat'\nranges = ['198.51.100.10-198.51.100.19', '2001:db8:1::10-2001:db8:1::19']\n\
                   forward-to = ['10.77.0.0/24', 'fd00:77::/64']\ninterface = 'ext0'";
/// Connections of which each healthy node gets one for certain, as far as chance goes: it fails once in 2^40.
const MANY: usize = 40;

pub fn by_host(name: &str) -> EnsureLoadBalancerRequest {
    EnsureLoadBalancerRequest {
        announcing: v1::Announcing::Host.into(),
        families: vec![v1::IpFamily::Ipv4.into(), v1::IpFamily::Ipv6.into()],
        all_families: true,
        ports: vec![tcp(80, 30080), v1::ServicePort { protocol: "UDP".into(), ..tcp(53, 30053) }],
        ..wanted(name)
    }
}

impl Machines {
    /// Makes a load balancer, and waits until it is forwarded to so many nodes.
    pub fn forwarded(&self, request: EnsureLoadBalancerRequest, healthy: u32) -> LoadBalancer {
        let name = request.service.clone().unwrap().name;
        let of = self.of("a");
        of.ensure(request).unwrap();
        of.until(&self.lab, &name, |one| one.state() == State::Ready && one.healthy == healthy)
    }

    /// Waits until new connections go to these nodes and no others.
    pub fn until_goes_to(&self, wires: &Wires, at: &str, nodes: &[&str]) {
        let at: SocketAddr = at.parse().unwrap();
        let expected: BTreeSet<_> = nodes.iter().map(|&node| node.to_owned()).collect();
        self.lab.until(&format!("{at} goes to {nodes:?}"), || seen(wires, at, false) == expected);
    }

    /// The agent of a VM says whether its only check passes, once it was given that.
    fn passes(&self, vm: &str, healthy: bool) {
        let newest = || self.guests[vm].checks().pop().filter(|given| given.checks.len() == 1);
        self.lab.until("the guest has its check", || newest().is_some());
        let v1::SetHealthChecksRequest { generation, checks, .. } = newest().unwrap();
        let results =
            vec![v1::HealthCheckResult { id: checks[0].id.clone(), healthy, problem: String::new() }];
        self.of(vm).report_health_checks(v1::ReportHealthChecksRequest { generation, results }).unwrap();
    }
}

/// The nodes that answer.
fn seen(wires: &Wires, at: SocketAddr, udp: bool) -> BTreeSet<String> {
    let ask = |_| {
        let answer = if udp { wires.outside.ask_udp(at) } else { wires.outside.ask(at) };
        answer.ok()?.split_once(' ').map(|(node, _)| node.to_owned())
    };
    (0..MANY).filter_map(ask).collect()
}

fn both() -> BTreeSet<String> {
    ["a".to_owned(), "b".to_owned()].into()
}

#[test]
fn traffic_goes_to_healthy_nodes_and_no_others() {
    if is_outside_of("--net") {
        return;
    }
    let wires = Wires::new(&[("a", 1), ("b", 2)]);
    sh("nft add table ip other; nft add chain ip other c '{ type filter hook forward priority 5; }'");
    let others = output("nft list table ip other");
    let mut vms = forwarding(&VMS, NAT);
    let made = vms.forwarded(by_host("web"), 2);
    let addresses: Vec<_> = made.addresses.iter().map(|one| one.address.as_str()).collect();
    assert_eq!(addresses, ["198.51.100.10", "2001:db8:1::10"]);
    let on_interface = || output("ip -o addr show dev ext0");
    assert!(on_interface().contains("198.51.100.10/32") && on_interface().contains("2001:db8:1::10/128"));

    // TCP and UDP, of both families, to both nodes; the sender's address stays.
    for (at, me) in [("198.51.100.10", "198.51.100.2"), ("[2001:db8:1::10]", "2001:db8:1::2")] {
        let address = |port: u16| format!("{at}:{port}").parse::<SocketAddr>().unwrap();
        vms.lab.until("the host sees both at their addresses", || seen(&wires, address(80), false) == both());
        assert_eq!(seen(&wires, address(53), true), both(), "{at}");
        let answer = wires.outside.ask(address(80)).unwrap();
        assert_eq!(answer.split_once(' ').unwrap().1, me);
        // Nothing else is to be found there.
        let refused = wires.outside.ask(address(81)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }
    let http: SocketAddr = "198.51.100.10:80".parse().unwrap();
    // From the host itself, and from the nodes, whose answers would not come back this way by themselves.
    assert!(ask(http).is_ok());
    for (number, node) in wires.nodes.iter().enumerate() {
        for time in 0..8 {
            let answer = node.namespace.ask(http);
            let seen = || output("nft list table inet guestlet; cat /proc/net/nf_conntrack; ip neigh");
            assert!(answer.is_ok(), "node {number}, time {time}: {answer:?}\n{}", seen());
        }
    }

    // A connection to the node that stays, whatever becomes of the other.
    let mut kept = loop {
        let mut stream = wires.outside.run(move || TcpStream::connect(http).unwrap());
        if say(&mut stream).unwrap().starts_with("a ") {
            break stream;
        }
    };
    drop(vms.guests.remove("b"));
    vms.until_goes_to(&wires, "198.51.100.10:80", &["a"]);
    assert!(say(&mut kept).unwrap().starts_with("a "));
    drop(vms.guests.remove("a"));
    vms.until_goes_to(&wires, "198.51.100.10:80", &[]);
    let begun = Instant::now();
    assert_eq!(wires.outside.ask(http).unwrap_err().kind(), ErrorKind::ConnectionRefused, "nobody waits");
    assert!(begun.elapsed() < Duration::from_secs(1));
    assert!(say(&mut kept).unwrap().starts_with("a "), "what there is goes on");
    for (name, number, _) in VMS {
        vms.guests.insert(name.into(), start_guest(&vms.lab, name, number));
    }
    vms.until_connected();
    vms.until_goes_to(&wires, "198.51.100.10:80", &["a", "b"]);

    // Somebody removes the rules, or adds one: they are put back.
    for damage in [
        "delete table inet guestlet",
        "add rule inet guestlet prerouting counter drop",
        "flush table inet guestlet",
    ] {
        sh(&format!("nft {damage}"));
        vms.until_goes_to(&wires, "198.51.100.10:80", &["a", "b"]);
    }
    let said = vms.lab.log().matches("another program has changed or removed the nftables table").count();
    assert_eq!(said, 1);

    // It is killed: traffic goes on, and goes on after its next start.
    vms.lab.kill();
    assert_eq!(seen(&wires, http, false), both());
    vms.lab.again();
    // Nothing is interrupted while agents are yet to answer.
    assert_eq!(seen(&wires, http, false), both());
    vms.until_connected();
    vms.until_goes_to(&wires, "198.51.100.10:80", &["a", "b"]);
    vms.of("a").until(&vms.lab, "web", |one| one.state() == State::Ready && one.healthy == 2);
    assert!(say(&mut kept).unwrap().starts_with("a "));

    // It is given back: nothing of it stays, and nothing of others was touched.
    vms.of("a").release("web").unwrap();
    vms.lab.until("the address is gone", || !on_interface().contains("198.51.100.10"));
    assert!(!on_interface().contains("2001:db8:1::10/128") && on_interface().contains("198.51.100.1/24"));
    assert!(!output("nft list table inet guestlet").contains("198.51.100.10"));
    assert!(wires.outside.ask(http).is_err());
    assert_eq!(output("nft list table ip other"), others);

    // The pool is taken out of the settings: so is the table.
    vms.lab.edit(NAT, "");
    vms.lab.until("the table is gone", || !output("nft list tables").contains("guestlet"));
    assert!(output("nft list tables").contains("other"));
}

#[test]
fn who_may_send_and_where_to_is_as_the_service_says() {
    if is_outside_of("--net") {
        return;
    }
    let wires = Wires::new(&[("a", 1), ("b", 2)]);
    let vms = forwarding(&VMS, NAT);
    let four = |name: &str| EnsureLoadBalancerRequest {
        families: vec![v1::IpFamily::Ipv4.into()],
        ports: vec![tcp(80, 30080)],
        ..by_host(name)
    };
    // Some sources only.
    let some = EnsureLoadBalancerRequest { source_ranges: vec!["203.0.113.0/24".into()], ..four("some") };
    let some = vms.forwarded(some, 2).addresses[0].address.clone();
    let at: SocketAddr = format!("{some}:80").parse().unwrap();
    assert!(wires.outside.ask(at).is_err());
    let wider = vec!["203.0.113.0/24".into(), "198.51.100.0/24".into()];
    vms.forwarded(EnsureLoadBalancerRequest { source_ranges: wider, ..four("some") }, 2);
    vms.until_goes_to(&wires, &at.to_string(), &["a", "b"]);
    // Named nodes only.
    vms.forwarded(EnsureLoadBalancerRequest { backends: vec![crate::lab::uuid(2)], ..four("some") }, 1);
    vms.until_goes_to(&wires, &at.to_string(), &["b"]);

    // One client stays with one node, which another connection of it finds again.
    let sticky = vms.forwarded(EnsureLoadBalancerRequest { affinity_seconds: 60, ..four("sticky") }, 2);
    let at: SocketAddr = format!("{}:80", sticky.addresses[0].address).parse().unwrap();
    vms.lab.until("it is forwarded", || wires.outside.ask(at).is_ok());
    assert_eq!(seen(&wires, at, false).len(), 1);

    // Only nodes with endpoints.
    let health_check = Some(v1::HealthCheck { port: 80, period_seconds: 1, ..v1::HealthCheck::default() });
    let local =
        EnsureLoadBalancerRequest { local_traffic: true, health_check_node_port: 32000, ..four("local") };
    let local = vms.forwarded(local, 2);
    let at = format!("{}:80", local.addresses[0].address);
    vms.until_goes_to(&wires, &at, &["a", "b"]);
    wires.nodes[0].has_endpoints.store(false, Ordering::SeqCst);
    vms.until_goes_to(&wires, &at, &["b"]);
    let told = vms.of("a").until(&vms.lab, "local", |one| one.healthy == 1);
    assert_eq!(told.failing[0].problem, "it has no endpoint of the Service");
    wires.nodes[0].has_endpoints.store(true, Ordering::SeqCst);
    vms.until_goes_to(&wires, &at, &["a", "b"]);

    // Only nodes whose agents say that the check passes.
    let checked = vms.forwarded(EnsureLoadBalancerRequest { health_check, ..four("checked") }, 0);
    let at = format!("{}:80", checked.addresses[0].address);
    assert!(wires.outside.ask(at.parse().unwrap()).is_err());
    vms.passes("b", true);
    vms.until_goes_to(&wires, &at, &["b"]);
    vms.passes("b", false);
    vms.until_goes_to(&wires, &at, &[]);
}

#[test]
fn a_restart_takes_no_traffic_from_nodes_that_are_yet_to_be_checked() {
    if is_outside_of("--net") {
        return;
    }
    let wires = Wires::new(&[("a", 1), ("b", 2)]);
    let mut vms = forwarding(&VMS, NAT);
    let health_check = Some(v1::HealthCheck { port: 80, period_seconds: 1, ..v1::HealthCheck::default() });
    let made = vms.forwarded(EnsureLoadBalancerRequest { health_check, ..by_host("web") }, 0);
    let at = format!("{}:80", made.addresses[0].address);
    let http: SocketAddr = at.parse().unwrap();
    vms.passes("a", true);
    vms.passes("b", true);
    vms.until_goes_to(&wires, &at, &["a", "b"]);

    vms.restart();
    vms.passes("b", true);
    let of = vms.of("b");
    of.until(&vms.lab, "web", |one| one.healthy == 1);
    assert_eq!(seen(&wires, http, false), both(), "the agent of the other one has not told yet");
    vms.passes("a", true);
    of.until(&vms.lab, "web", |one| one.healthy == 2);
    assert_eq!(seen(&wires, http, false), both());

    // One that does not pass any more is not waited for without end.
    vms.restart();
    vms.passes("a", false);
    vms.passes("b", true);
    vms.until_goes_to(&wires, &at, &["b"]);
}

#[test]
fn a_kernel_that_does_not_forward_is_told_of() {
    if is_outside_of("--net") {
        return;
    }
    let wires = Wires::new(&[("a", 1), ("b", 2)]);
    let setting = |name: &str, value: u8| sh(&format!("echo {value} > /proc/sys/net/{name}"));
    for name in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        setting(name, 0);
    }
    let vms = forwarding(&VMS, NAT);
    let a = vms.of("a");
    a.ensure(by_host("web")).unwrap();
    let told = a.until(&vms.lab, "web", |one| one.state() == State::Failed);
    assert_eq!(told.reason, "ForwardingFailed");
    assert!(vms.lab.words(&["pools"]).contains("net.ipv4.ip_forward=1"), "{}", vms.lab.words(&["pools"]));
    setting("ipv4/ip_forward", 1);
    vms.lab
        .until("IPv4 is forwarded", || vms.lab.words(&["pools"]).contains("net.ipv6.conf.all.forwarding=1"));
    setting("ipv6/conf/all/forwarding", 1);
    a.until(&vms.lab, "web", |one| one.state() == State::Ready);
    for at in ["198.51.100.10:80", "[2001:db8:1::10]:80"] {
        vms.until_goes_to(&wires, at, &["a", "b"]);
    }
}

#[test]
fn a_host_that_cannot_forward_says_so() {
    let settings = format!("load-balancers.nft = '/nowhere/nft'\n{NAT}");
    let vms = forwarding(&VMS, &settings);
    let a = vms.of("a");
    a.ensure(by_host("web")).unwrap();
    let told = a.until(&vms.lab, "web", |one| one.state() == State::Failed);
    assert_eq!(told.reason, "ForwardingFailed");
    assert!(vms.lab.log().contains("cannot run /nowhere/nft"), "{}", vms.lab.log());
    // What others announce is no matter of it.
    let settings = super::SMALL;
    assert_eq!(started(&VMS, settings).of("a").ensure(wanted("plain")).unwrap().state(), State::Ready);
}
