//! Guests that tell addresses that are not theirs: nothing is forwarded there.

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};

use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{self, EnsureLoadBalancerRequest};
use tonic::Code;

use super::network::{NAT, by_host};
use super::wires::{Wires, sh};
use super::{Machines, forwarding, start_guest, start_guest_at, started, tcp};
use crate::csi::refused;
use crate::namespace::is_outside_of;

/// VMs of two clusters on one network.
const VMS: [super::Vm; 2] = [("a", 1, "dev"), ("b", 2, "prod")];

fn four(name: &str) -> EnsureLoadBalancerRequest {
    EnsureLoadBalancerRequest {
        families: vec![v1::IpFamily::Ipv4.into()],
        ports: vec![tcp(80, 30080)],
        ..by_host(name)
    }
}

impl Machines {
    /// The only node takes no traffic, for this reason.
    fn until_fails(&self, words: &str) {
        let fails = |one: &v1::LoadBalancer| {
            one.healthy == 0 && one.failing.first().is_some_and(|one| one.problem.contains(words))
        };
        self.of("a").until(&self.lab, "web", fails);
    }
}

/// Outside reached a service of the host, and the VM of another cluster.
#[test]
fn nothing_is_forwarded_to_the_host_itself_or_to_another_clusters_vm() {
    if is_outside_of("--net") {
        return;
    }
    let wires = Wires::new(&[("a", 1), ("b", 2)]);
    let own = TcpListener::bind("10.77.0.254:30080").unwrap();
    std::thread::spawn(move || {
        for stream in own.incoming() {
            let _ = stream.unwrap().write_all(b"host 0");
        }
    });
    let mut vms = forwarding(&VMS, NAT);
    let made = vms.forwarded(four("web"), 1);
    let at = format!("{}:80", made.addresses[0].address);
    vms.until_goes_to(&wires, &at, &["a"]);
    for (lie, words) in [
        ("10.77.0.254/24", "10.77.0.254 is one of the host itself"),
        ("10.77.0.2/24", "the host sees another machine at its address 10.77.0.2"),
        ("10.77.0.99/24", "no machine answers at its address 10.77.0.99"),
    ] {
        drop(vms.guests.remove("a"));
        vms.guests.insert("a".into(), start_guest_at(&vms.lab, "a", 1, &[lie.to_owned()]));
        vms.until_connected();
        vms.until_fails(words);
        vms.until_goes_to(&wires, &at, &[]);
    }
    // With its own address, it takes traffic again; and no more once another machine has that.
    drop(vms.guests.remove("a"));
    vms.guests.insert("a".into(), start_guest(&vms.lab, "a", 1));
    vms.until_connected();
    vms.until_goes_to(&wires, &at, &["a"]);
    wires.nodes[0].namespace.sh("ip link set eth0 down");
    wires.nodes[1].namespace.sh("ip addr add 10.77.0.1/24 dev eth0");
    sh("ip neigh flush dev br0");
    vms.until_fails("the host sees another machine at its address 10.77.0.1");
    vms.until_goes_to(&wires, &at, &[]);
}

#[test]
fn a_guest_does_not_say_what_its_hardware_address_is_and_names_no_port_of_a_machines_own() {
    if is_outside_of("--net") {
        return;
    }
    let wires = Wires::new(&[("a", 1), ("b", 2)]);
    // The settings do not name its hardware address, so that it could tell that of another.
    let vms = started(&VMS, NAT);
    vms.of("a").ensure(four("web")).unwrap();
    vms.until_fails("set vm.networks");
    let balancer = vms.of("a").until(&vms.lab, "web", |one| one.state() == State::Ready);
    let http: SocketAddr = format!("{}:80", balancer.addresses[0].address).parse().unwrap();
    assert!(wires.outside.ask(http).is_err());
    let ssh = EnsureLoadBalancerRequest { ports: vec![tcp(2222, 22)], ..four("ssh") };
    refused(vms.of("a").ensure(ssh), Code::InvalidArgument, "ports.node_port = 22 is less than 1024");
}
