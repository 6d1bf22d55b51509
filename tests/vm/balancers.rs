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
use crate::harness::repository::Repository;
use crate::harness::snapshot::Saved;
use crate::harness::tools;
use crate::harness::vm::{BOOT, SOON, Vm};
use crate::harness::wait_for;
use crate::namespace::is_outside_of;
use crate::networks::{Namespace, sh};
use crate::{images, real};

/// The guest's port that leads to the socket of guestlet-ccm.
const CLOUD: u32 = 7004;
/// Where a Service is reached on each node.
const NODE_PORT: u16 = 30080;
/// Connections of which each node gets one for certain, as far as chance goes: it fails once in 2^24.
const MANY: usize = 25;

/// The hardware address that QEMU gives each guest's interface.
const CARD: &str = "52:54:00:12:34:56";
/// A shell command that says which interface the guest has.
const NIC: &str = "basename $(dirname $(grep -l 52:54:00:12:34:56 /sys/class/net/*/address))";

/// Gives a guest a network of its own behind this host.
fn connect(vm: &Vm, number: u8) {
    sh(&format!(
        "ip tuntap add dev tap{number} mode tap; ip link set tap{number} up; ip addr add 10.77.{number}.254/24 dev tap{number}"
    ));
    let tap = json!({ "type": "tap", "id": "tap", "ifname": format!("tap{number}"), "script": "no", "downscript": "no" });
    vm.qmp().execute("netdev_add", tap).unwrap();
    let port = json!({ "type": "hubport", "id": "tap-port", "hubid": 0, "netdev": "tap" });
    vm.qmp().execute("netdev_add", port).unwrap();
    vm.run(&format!("ip link set $({NIC}) address {}", hardware(number))).unwrap();
    vm.run(&format!(
        "nic=$({}) && ip link set $nic up && ip addr add 10.77.{number}.1/24 dev $nic",
        NIC.replace(CARD, &hardware(number))
    ))
    .unwrap();
    vm.run(&format!("ip route replace default via 10.77.{number}.254")).unwrap();
}

/// The hardware address of each guest, by which the host knows it.
fn hardware(number: u8) -> String {
    format!("52:54:00:12:35:{number:02x}")
}

/// Has a guest answer at its node port with its name and its client's address. `more` is of the section of its socket.
fn serves(vm: &Vm, more: &str) {
    let unit = format!("[Socket]\nListenStream={NODE_PORT}\nAccept=yes\n{more}");
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

/// Asks for an address from which port 80 is forwarded to the services of these VMs.
fn ensure(vm: &Vm, backends: Vec<String>) -> LoadBalancer {
    let service =
        v1::ServiceReference { namespace: "shop".into(), name: "web".into(), uid: "uid-web".into() };
    let port = v1::ServicePort {
        name: "http".into(),
        protocol: "TCP".into(),
        port: 80,
        node_port: NODE_PORT.into(),
    };
    let wanted = EnsureLoadBalancerRequest {
        service: Some(service),
        families: vec![v1::IpFamily::Ipv4.into()],
        ports: vec![port],
        announcing: v1::Announcing::Host.into(),
        backends,
        health_check: Some(v1::HealthCheck { port: 80, period_seconds: 1, ..v1::HealthCheck::default() }),
        ..EnsureLoadBalancerRequest::default()
    };
    let asked = wait_for("the host half's answer", SOON, || {
        let wanted = wanted.clone();
        cloud(vm, async |mut client| client.ensure_load_balancer(wanted).await).ok()
    });
    asked.unwrap().load_balancer.unwrap()
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
    let mut host = {
        let listed = [Listed::of(&first).hardware(&hardware(1)), Listed::of(&second).hardware(&hardware(2))];
        HostHalf::start_with(&listed, &lines).unwrap()
    };
    for (vm, number) in [(&first, 1), (&second, 2)] {
        host.wait_connected(vm.name(), BOOT).unwrap();
        connect(vm, number);
        serves(vm, "");
    }
    has_cloud_provider(&first);
    let made = ensure(&first, vec![first.uuid().to_owned(), second.uuid().to_owned()]);
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

#[test]
fn the_unit_forwards_once_its_drop_in_lets_it() {
    let host_package = tools::package().unwrap().to_str().unwrap().replace("/guestlet_", "/guestlet-host_");
    let mut packages = Repository::new(&[host_package.into()]).unwrap();
    let libraries = [
        "libedit2",
        "libbsd0",
        "libgmp10",
        "libjansson4",
        "libmnl0",
        "libnftables1",
        "libnftnl11",
        "libxtables12",
    ];
    packages.add_debian(&[&["nftables"], &libraries[..]].concat()).unwrap();
    let vm = real("forwards");
    packages.mount(&vm).unwrap();
    // A node of its own network on this host, and in it an agent, which the host half reaches by a unix socket.
    vm.run(
        "ip netns add node && ip link add node0 type veth peer name eth0 netns node
         ip addr add 10.77.0.254/24 dev node0 && ip link set node0 up
         ip netns exec node ip link set eth0 address 52:54:00:12:35:01 up
         ip netns exec node ip link set lo up
         ip netns exec node ip addr add 10.77.0.1/24 dev eth0 && ip netns exec node ip route add default via 10.77.0.254",
    )
    .unwrap();
    let settings = "runtime-dir = \"/run/second\"\n[control]\nlisten = \"unix:/run/second/control.sock\"\n[qga]\nmethod = \"none\"\n";
    vm.write("/run/second.toml", settings.as_bytes()).unwrap();
    vm.run("systemctl stop guestlet guestlet.socket && mkdir -p /run/second").unwrap();
    vm.run("systemd-run --unit second -p NetworkNamespacePath=/run/netns/node guestlet --settings /run/second.toml").unwrap();
    let uuid = vm.run("cat /sys/class/dmi/id/product_uuid").unwrap().trim().to_owned();
    serves(&vm, "NetworkNamespacePath=/run/netns/node\n");
    vm.run("echo 1 > /proc/sys/net/ipv4/ip_forward").unwrap();
    let nic = vm.run(NIC).unwrap();
    let settings = format!(
        "[[vm]]\nname = \"forwards\"\nuuid = \"{uuid}\"\ncluster = \"test\"\nunix-socket = \"/run/second/control.sock\"\n\
         networks = {{ \"52:54:00:12:35:01\" = \"nat\" }}\n[[address-pool]]\nname = \"nat\"\nranges = [\"198.51.100.10\"]\nforward-to = [\"10.77.0.0/24\"]\ninterface = \"{}\"\n",
        nic.trim()
    );
    vm.run("dpkg -i /srv/packages/*.deb").unwrap();
    vm.write("/etc/guestlet/host.toml", settings.as_bytes()).unwrap();
    has_cloud_provider(&vm);
    assert_eq!(ensure(&vm, vec![uuid]).addresses[0].address, "198.51.100.10");

    let pools = "guestctl pools | grep 'example drop-in forwarding.conf'";
    wait_for("advice", SOON, || vm.run(pools).ok()).unwrap();
    // As the example says in its first lines; these guests install no documentation.
    let example = include_str!("../../packaging/forwarding.conf").replace("192.168.122.0/24", "10.77.0.0/24");
    vm.run("mkdir -p /etc/systemd/system/guestlet-host.service.d").unwrap();
    vm.write("/etc/systemd/system/guestlet-host.service.d/forwarding.conf", example.as_bytes()).unwrap();
    vm.run("systemctl daemon-reload && systemctl restart guestlet-host").unwrap();
    let ask = "timeout 5 bash -c 'exec 3<>/dev/tcp/198.51.100.10/80 && echo >&3 && cat <&3'";
    let answer =
        wait_for("an answer by the address", SOON, || vm.run(ask).ok().filter(|said| !said.is_empty()));
    let seen =
        || vm.run("guestctl pools; guestctl lb ls -o wide; nft list ruleset; ip addr").unwrap_or_default();
    let answer = answer.unwrap_or_else(|error| panic!("{error:#}\n{}", seen()));
    assert!(answer.starts_with("forwards "), "{answer}");
    assert_eq!(vm.run("ps -o user:32= -C guestlet-host").unwrap().trim(), "guestlet-host");
    let denied =
        vm.run("journalctl --unit guestlet-host --output cat | grep -ci 'sandbox\\|bad system call'");
    assert!(denied.is_err(), "{denied:?}");
}
