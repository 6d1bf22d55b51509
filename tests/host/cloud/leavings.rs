//! What is left of a load balancer that is gone, or of settings that are others now: nothing.

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{self, EnsureLoadBalancerRequest};

use super::network::by_host;
use super::wires::{Wires, output};
use super::{Machines, forwarding, tcp};
use crate::namespace::is_outside_of;

const VMS: [super::Vm; 2] = [("a", 1, "dev"), ("b", 2, "prod")];
/// One address for everybody.
const ONE: &str = "[[address-pool]]\nname = 'one'\nranges = ['198.51.100.10']\nforward-to = ['10.77.0.0/24']\ninterface = 'ext0'";

fn four(name: &str) -> EnsureLoadBalancerRequest {
    EnsureLoadBalancerRequest {
        families: vec![v1::IpFamily::Ipv4.into()],
        ports: vec![tcp(80, 30080), v1::ServicePort { protocol: "UDP".into(), ..tcp(53, 30053) }],
        ..by_host(name)
    }
}

fn on_interface() -> String {
    output("ip -o addr show dev ext0")
}

/// Who answers on a flow that there is.
fn answers(flow: &UdpSocket) -> Option<String> {
    flow.send(b"who").ok()?;
    let mut answer = [0; 256];
    let length = flow.recv(&mut answer).ok()?;
    String::from_utf8_lossy(&answer[..length]).split_once(' ').map(|(node, _)| node.to_owned())
}

/// Flows of UDP went on to the node of the cluster that had the address before.
#[test]
fn flows_go_to_whoever_has_the_address_now() {
    if is_outside_of("--net") {
        return;
    }
    let wires = Wires::new(&[("a", 1), ("b", 2)]);
    let mut vms = forwarding(&VMS, ONE);
    vms.forwarded(four("web"), 1);
    let at: SocketAddr = "198.51.100.10:53".parse().unwrap();
    let flow = |port: u16| {
        wires.outside.run(move || {
            let socket = UdpSocket::bind(("0.0.0.0", port)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            socket.connect(at).unwrap();
            socket
        })
    };
    let (kept, other) = (flow(40_001), flow(40_002));
    vms.lab.until("the first cluster answers", || answers(&kept).as_deref() == Some("a"));
    // What is not given back goes on as it was.
    vms.forwarded(EnsureLoadBalancerRequest { affinity_seconds: 60, ..four("web") }, 1);
    assert_eq!(answers(&kept).as_deref(), Some("a"));
    let moves = |vms: &Machines, from: &str, to: &str, node: &str| {
        vms.of(from).release("web").unwrap();
        let of = vms.of(to);
        of.ensure(four("web")).unwrap();
        of.until(&vms.lab, "web", |one| one.state() == State::Ready && one.healthy == 1);
        vms.lab.until("the flow goes to the other cluster", || answers(&kept).as_deref() == Some(node));
    };
    moves(&vms, "a", "b", "b");
    assert_eq!(answers(&other).as_deref(), Some("b"));
    // And back, after another run has begun.
    vms.restart();
    moves(&vms, "b", "a", "a");
}

#[test]
fn addresses_go_from_an_interface_that_the_settings_name_no_more() {
    if is_outside_of("--net") {
        return;
    }
    let _wires = Wires::new(&[("a", 1), ("b", 2)]);
    let mut vms = forwarding(&VMS, ONE);
    vms.forwarded(four("web"), 1);
    let has = || on_interface().contains("198.51.100.10/32");
    assert!(has());
    let without = ONE.replace("\ninterface = 'ext0'", "");
    vms.lab.edit(ONE, &without);
    vms.lab.until("the interface has lost it", || !has());
    vms.lab.edit(&without, ONE);
    vms.lab.until("it has it again", has);
    vms.lab.edit(ONE, "");
    vms.lab.until("nothing is left", || !has() && !output("nft list tables").contains("guestlet"));
    assert!(on_interface().contains("198.51.100.1/24"));
    vms.lab.edit("[[vm]]", &format!("{ONE}\n[[vm]]"));
    vms.lab.until("it has it again", has);
    // While nobody looks.
    vms.lab.kill();
    vms.lab.edit(ONE, "");
    assert!(has());
    vms.lab.again();
    vms.lab.until("nothing is left", || !has() && !output("nft list tables").contains("guestlet"));
    vms.lab.until("nothing is noted", || !vms.lab.path("balancers").join(".forwarding").exists());
}

#[test]
fn the_package_takes_rules_and_addresses_with_it() {
    if is_outside_of("--net") {
        return;
    }
    let _wires = Wires::new(&[("a", 1), ("b", 2)]);
    let mut vms = forwarding(&VMS, ONE);
    vms.forwarded(four("web"), 1);
    vms.lab.kill();
    let (root, records) = (vms.lab.path("root"), vms.lab.path("balancers"));
    let state = root.join("var/lib/guestlet-host/load-balancers");
    std::fs::create_dir_all(&state).unwrap();
    std::fs::copy(records.join(".forwarding"), state.join(".forwarding")).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/guestlet-host/postrm");
    let run = |what: &str| output(&format!("DPKG_ROOT={} sh {script} {what}", root.display()));
    run("upgrade");
    assert!(on_interface().contains("198.51.100.10/32") && output("nft list tables").contains("guestlet"));
    run("remove");
    assert!(!on_interface().contains("198.51.100.10") && on_interface().contains("198.51.100.1/24"));
    assert!(!output("nft list tables").contains("guestlet") && !state.join(".forwarding").exists());
}

#[test]
fn a_port_that_becomes_reserved_is_forwarded_no_more() {
    if is_outside_of("--net") {
        return;
    }
    let wires = Wires::new(&[("a", 1), ("b", 2)]);
    let own = "[[address-pool]]\nname = 'own'\nranges = ['198.51.100.1']\nforward-to = ['10.77.0.0/24']\nreserved-ports = [22]";
    let mut vms = forwarding(&VMS, own);
    vms.forwarded(EnsureLoadBalancerRequest { ports: vec![tcp(80, 30080)], ..four("web") }, 1);
    vms.until_goes_to(&wires, "198.51.100.1:80", &["a"]);
    vms.lab.edit("reserved-ports = [22]", "reserved-ports = [22, 80]");
    let told = vms.of("a").until(&vms.lab, "web", |one| one.state() == State::Failed);
    assert_eq!(
        (told.reason.as_str(), told.message.as_str()),
        ("PortReserved", "the host does not forward port 80")
    );
    vms.until_goes_to(&wires, "198.51.100.1:80", &[]);
    vms.lab.edit("reserved-ports = [22, 80]", "reserved-ports = [22]");
    vms.of("a").until(&vms.lab, "web", |one| one.state() == State::Ready);
    vms.until_goes_to(&wires, "198.51.100.1:80", &["a"]);
}
