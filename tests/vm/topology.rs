//! Where a real guest runs, on its Node: an edit of its host's zone, and the way to another host.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api_server::Cluster;
use crate::harness::host::{HostHalf, Listed};
use crate::harness::vm::{SOON, Vm};
use crate::harness::wait_for;
use crate::real;

/// The Node is called otherwise than the VM.
const NODE: &str = "worker-7.example";
const ZONE: &str = "topology.kubernetes.io/zone";
/// The port of the guest's host by which it reaches the API server.
const PORT: u32 = 6443;

/// Gives the guest an API server at the address that its kubelet knows, and kubelet's credential where RKE2 has it.
fn join(vm: &Vm, cluster: &Cluster) {
    let address = cluster.address();
    vm.forward(PORT, address).unwrap();
    let listen = format!("TCP-LISTEN:{},bind=127.0.0.1,reuseaddr,fork", address.port());
    vm.run(&format!("systemd-run --quiet --unit api-server socat {listen} VSOCK-CONNECT:2:{PORT}")).unwrap();
    let folder = Path::new("/var/lib/rancher/rke2/agent");
    vm.run(&format!("mkdir -p {}", folder.display())).unwrap();
    for (name, text) in cluster.credential(&format!("system:node:{NODE}"), Duration::from_secs(3600), folder)
    {
        vm.write(&folder.join(name).display().to_string(), text.as_bytes()).unwrap();
    }
}

/// Waits until the Node has this zone.
fn wait_labelled(cluster: &Cluster, zone: &str) {
    let labelled = || (cluster.label(NODE, ZONE).as_deref() == Some(zone)).then_some(());
    wait_for(&format!("zone {zone} on the Node"), SOON, labelled).unwrap();
}

#[test]
fn a_guest_that_comes_to_another_host_has_its_zone_on_its_node() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let cluster = runtime.block_on(Cluster::start());
    cluster.join(NODE, json!({ "mine": "x" }));
    let mut vm = real("wanderer");
    let host = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    host.wait_connected("wanderer", SOON).unwrap();
    host.place("a").unwrap();
    join(&vm, &cluster);
    wait_labelled(&cluster, "a");
    host.wait_placed("wanderer", "a", SOON).unwrap();
    let session = host.info("wanderer").unwrap()["sessions"].clone();
    let edited = Instant::now();
    host.place("b").unwrap();
    wait_labelled(&cluster, "b");
    println!("an edit of the zone is on the Node after {:?}", edited.elapsed());
    host.wait_placed("wanderer", "b", SOON).unwrap();
    assert_eq!(host.info("wanderer").unwrap()["sessions"], session, "the session is the same");
    let nodes: Value = serde_json::from_str(&host.ctl(&["nodes", "-o", "json"]).unwrap()).unwrap();
    assert!(nodes.to_string().contains(NODE), "{nodes}");

    // As a live migration does: the vsock device is another one, and so is the host half.
    vm.unplug_vsock().unwrap();
    drop(host);
    let other = HostHalf::start(&[Listed::of(&vm)]).unwrap();
    other.place("c").unwrap();
    vm.replug_vsock().unwrap();
    other.wait_connected("wanderer", SOON).unwrap();
    let connected = Instant::now();
    wait_labelled(&cluster, "c");
    println!("the zone of the other host is on the Node {:?} after the reconnect", connected.elapsed());
    other.wait_placed("wanderer", "c", SOON).unwrap();
    assert_eq!(cluster.label(NODE, "mine").as_deref(), Some("x"));
    let told: Value = serde_json::from_str(&vm.run("cat /run/guestlet/topology.json").unwrap()).unwrap();
    assert_eq!((&told["version"], &told["zone"], &told["region"]), (&1.into(), &"c".into(), &"eu".into()));

    let id = vm.run("systemctl show --value --property MainPID guestlet.service").unwrap();
    let resident =
        || vm.run(&format!("grep -E '^Rss(Anon|File):|^VmRSS:' /proc/{}/status", id.trim())).unwrap();
    println!("the agent, with a Node that it watches: {}", resident());
}
