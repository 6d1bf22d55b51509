//! Load balancers of a host whose guests are behind NAT: a client outside reaches what runs in real guests, by an address of
//! the host, as long as their agents say that it is well.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use guestlet::transport::http2::{Client, ORIGIN};
use guestlet::wire::proto::v1::cloud_client::CloudClient;
use guestlet::wire::proto::v1::load_balancer::State;
use guestlet::wire::proto::v1::{self, EnsureLoadBalancerRequest, LoadBalancer};
use serde_json::json;
use tonic::Status;

use crate::harness::grpc::{self, Answer};
use crate::harness::host::{HostHalf, Listed};
use crate::harness::launch::Options;
use crate::harness::snapshot::Saved;
use crate::harness::tools;
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::wait_for;
use crate::namespace::is_outside_of;
use crate::networks::{Namespace, sh};
use crate::{images, real};

/// The guest's port that leads to the socket of guestlet-ccm.
const CLOUD: u32 = 7004;
/// Connections of which each node gets one for certain, as far as chance goes: it fails once in 2^24.
const MANY: usize = 25;

/// Gives a guest a network of its own behind this host, and a service at port 30080 that answers with the guest's name and
/// its client's address.
fn connect(vm: &Vm, number: u8) {
    sh(&format!(
        "ip tuntap add dev tap{number} mode tap; ip link set tap{number} up; ip addr add 10.77.{number}.254/24 dev tap{number}"
    ));
    let tap = json!({ "type": "tap", "id": "tap", "ifname": format!("tap{number}"), "script": "no", "downscript": "no" });
    vm.qmp().execute("netdev_add", tap).unwrap();
    let port = json!({ "type": "hubport", "id": "tap-port", "hubid": 0, "netdev": "tap" });
    vm.qmp().execute("netdev_add", port).unwrap();
    vm.run(&format!(
        "nic=$(basename $(dirname $(grep -l 52:54:00:12:34:56 /sys/class/net/*/address))) && ip link set $nic up && \
         ip addr add 10.77.{number}.1/24 dev $nic && ip route replace default via 10.77.{number}.254"
    ))
    .unwrap();
    let unit = "[Socket]\nListenStream=30080\nAccept=yes\n";
    vm.write("/etc/systemd/system/web.socket", unit.as_bytes()).unwrap();
    let unit = format!(
        "[Service]\nStandardInput=socket\nExecStart=/bin/sh -c 'head -c 1 > /dev/null; echo {} $REMOTE_ADDR'\n",
        vm.name()
    );
    vm.write("/etc/systemd/system/web@.service", unit.as_bytes()).unwrap();
    vm.run("systemctl daemon-reload && systemctl start web.socket").unwrap();
}

/// Makes the socket of guestlet-ccm reachable, as its pod does by the directory that it mounts.
fn has_cloud_provider(vm: &Vm) {
    let unit = format!("[Socket]\nListenStream=vsock::{CLOUD}\n");
    vm.write("/etc/systemd/system/cloud.socket", unit.as_bytes()).unwrap();
    let unit = "[Service]\nExecStart=/lib/systemd/systemd-socket-proxyd /run/guestlet-cloud/cloud.sock\n";
    vm.write("/etc/systemd/system/cloud.service", unit.as_bytes()).unwrap();
    vm.run("mkdir -m 0700 -p /run/guestlet-cloud && systemctl daemon-reload && systemctl start cloud.socket")
        .unwrap();
}

fn cloud<T>(vm: &Vm, call: impl AsyncFnOnce(CloudClient<Client>) -> Answer<T>) -> Result<T, Status> {
    let origin = http::Uri::from_static(ORIGIN);
    grpc::call(vm, CLOUD, async |client| call(CloudClient::with_origin(client, origin)).await)
}

fn balancer(vm: &Vm) -> Option<LoadBalancer> {
    let list =
        cloud(vm, async |mut client| client.list_load_balancers(v1::ListLoadBalancersRequest {}).await);
    list.ok()?.load_balancers.pop()
}

#[test]
fn a_client_outside_reaches_healthy_guests_behind_nat_by_an_address_of_the_host() {
    let images = images();
    if is_outside_of("--net") {
        return;
    }
    sh("ip link set lo up; echo 1 > /proc/sys/net/ipv4/ip_forward");
    let outside = Namespace::new();
    sh(&format!(
        "ip link add ext0 type veth peer name ext0 netns {}; ip link set ext0 up; ip addr add 198.51.100.1/24 dev ext0",
        outside.thread()
    ));
    outside.sh("ip link set ext0 up; ip addr add 198.51.100.2/24 dev ext0");

    // Guests that are restored have the same UUID: the second one boots.
    let disk = &Saved::installed(images, &tools::package().unwrap()).unwrap().disk;
    let second = Options::named("node-2").without_cloud_init().real(images, disk).unwrap();
    let first = real("node-1");
    let lines = "load-balancers.state-dir = \"@balancers\"\n[[address-pool]]\nname = \"nat\"\n\
                 ranges = [\"198.51.100.10-198.51.100.19\"]\nforward-to = [\"10.77.1.0/24\", \"10.77.2.0/24\"]\ninterface = \"ext0\"\n";
    let records = first.file("balancers");
    let lines = lines.replace("@balancers", records.to_str().unwrap());
    let mut host = HostHalf::start_with(&[Listed::of(&first), Listed::of(&second)], &lines).unwrap();
    for (vm, number) in [(&first, 1), (&second, 2)] {
        host.wait_connected(vm.name(), BOOT).unwrap();
        connect(vm, number);
    }
    has_cloud_provider(&first);
    let wanted = EnsureLoadBalancerRequest {
        service: Some(v1::ServiceReference {
            namespace: "shop".into(),
            name: "web".into(),
            uid: "uid-web".into(),
        }),
        families: vec![v1::IpFamily::Ipv4.into()],
        ports: vec![v1::ServicePort {
            name: "http".into(),
            protocol: "TCP".into(),
            port: 80,
            node_port: 30080,
        }],
        announcing: v1::Announcing::Host.into(),
        backends: vec![first.uuid().to_owned(), second.uuid().to_owned()],
        health_check: Some(v1::HealthCheck { port: 80, period_seconds: 1, ..v1::HealthCheck::default() }),
        ..EnsureLoadBalancerRequest::default()
    };
    let asked = wait_for("the host half's answer", SOON, || {
        let wanted = wanted.clone();
        cloud(&first, async |mut client| client.ensure_load_balancer(wanted).await).ok()
    });
    let made = asked.unwrap().load_balancer.unwrap();
    assert_eq!(made.addresses[0].address, "198.51.100.10", "{made:?}");

    let at: SocketAddr = "198.51.100.10:80".parse().unwrap();
    let seen = || -> BTreeSet<String> {
        (0..MANY).filter_map(|_| outside.ask(at).ok()).map(|answer| answer.trim().to_owned()).collect()
    };
    let [one, two] = ["node-1", "node-2"].map(|name| format!("{name} 198.51.100.2"));
    let goes_to = |nodes: &[&String]| {
        let expected: BTreeSet<String> = nodes.iter().map(|&node| node.clone()).collect();
        let is_so = || (seen() == expected).then_some(());
        wait_for(&format!("traffic to {nodes:?}"), SOON, is_so).unwrap_or_else(|error| {
            panic!("{error:#}: {:?}\n{:#?}\n{}", seen(), balancer(&first), host.log())
        });
    };
    goes_to(&[&one, &two]);
    let told = balancer(&first).unwrap();
    assert_eq!((told.state(), told.healthy), (State::Ready, 2), "{told:?}");

    // What runs in a guest ends, and is back.
    second.run("systemctl stop web.socket").unwrap();
    goes_to(&[&one]);
    second.run("systemctl start web.socket").unwrap();
    goes_to(&[&one, &two]);

    // A guest that stands still takes nothing.
    first.qmp().execute("stop", json!({})).unwrap();
    goes_to(&[&two]);
    first.qmp().execute("cont", json!({})).unwrap();
    goes_to(&[&one, &two]);

    // The host half is killed: nothing is lost meanwhile, nor once it is back.
    host.kill().unwrap();
    assert_eq!(seen(), [one.clone(), two.clone()].into());
    for name in ["node-1", "node-2"] {
        host.wait_connected(name, BOOT).unwrap();
        assert_eq!(seen(), [one.clone(), two.clone()].into());
    }
}
