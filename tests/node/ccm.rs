//! All of it at once: `guestlet-ccm` in the API of a guest's cluster, the real agent of its node, the programs of the host's nodes and
//! the controller, in the API of the host cluster, where a model of Harvester gives addresses.

use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::agent::Agent;
use crate::api::Api;
use crate::balancers::allow;
use crate::bench::socket;
use crate::cluster::wait;
use crate::harvester::{BALANCERS, Harvester, of_pool, pool};
use crate::model::objects::{Kind, text, uid};
use crate::patience::until;
use crate::pool;
use crate::turns::Turn;
use crate::whole::Whole;

pub const SERVICES: &str = "/api/v1/namespaces/default/services";
const NODES: &str = "/api/v1/nodes";
const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";
pub const VIP: &str = "kube-vip.io/loadbalancerIPs";

/// It ends with this value.
pub struct Ends(pub Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A VM that nobody made from a VirtualMachine, and of whose DMI nothing is said: this machine has none that an agent could read.
async fn instance(whole: &Whole) -> Value {
    let instance = json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": { "name": "plane", "labels": { "guestcluster.harvesterhci.io/name": "dev" } },
        "spec": {
            "domain": {
                "devices": { "interfaces": [{ "name": "nic", "bridge": {} }] },
                "memory": { "guest": "1Gi" },
            },
            "networks": [{ "name": "nic", "multus": { "networkName": "default/lan" } }],
        },
    });
    whole.cluster.api.create(&Kind::Vmi.within("default"), &instance).await;
    let instance = whole.cluster.runs("plane").await;
    let interface = json!({ "name": "nic", "mac": "52:54:00:00:00:01", "interfaceName": "enp1s0", "ipAddresses": ["192.0.2.200"] });
    let change = json!({ "status": { "interfaces": [interface] } });
    whole.cluster.api.patch(&Kind::Vmi.path("default/plane"), &change).await.unwrap();
    whole.cluster.model.set_agent("default/plane", true).await;
    instance
}

/// A guest cluster whose Services its host gives addresses. What is first here ends first.
pub struct Managed {
    /// `guestlet-ccm`.
    pub manager: Ends,
    _agent: Agent,
    /// The API of the guest cluster.
    pub api: Api,
    _turn: Turn,
    /// The VM of its node.
    pub instance: Value,
}

/// Starts a guest cluster of one node, which is a VM of the host cluster.
pub async fn manage(whole: &Whole) -> Managed {
    let instance = instance(whole).await;
    let turn = pool::take().await;
    let (guest, plane) = (Api::read(turn.plane().folder.path(), "test"), turn.plane());
    let node = json!({
        "metadata": { "name": "n1", "labels": {
            "kubernetes.io/hostname": "n1", "node-role.kubernetes.io/control-plane": "",
        } },
        "spec": { "taints": [{ "key": UNINITIALIZED, "value": "true", "effect": "NoSchedule" }] },
    });
    guest.create(NODES, &node).await;

    let lab = &whole.nodes[text(&instance["status"]["nodeName"])];
    let folder = lab.path("agent");
    std::fs::create_dir_all(folder.join("cloud")).unwrap();
    std::fs::copy(plane.kubelet_config("n1"), folder.join("no-kubeconfig")).unwrap();
    let agent = Agent::start(&folder, &socket(lab, &instance));
    lab.until_vm("default/plane", |vm| vm["session"] == "connected" && vm["callback"] == "open");
    let log = std::fs::File::create(folder.join("ccm.log")).unwrap();
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--", env!("CARGO_BIN_EXE_guestlet-ccm"), "--name", "a", "--verbose"])
        .args(["--health", "127.0.0.1:0"])
        .arg("--kubeconfig")
        .arg(plane.kubeconfig("ccm", "ccm", "system:masters"))
        .arg("--agent-socket")
        .arg(folder.join("cloud/cloud.sock"))
        .env_remove("POD_NAME")
        .env_remove("POD_NAMESPACE")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let manager = Ends(command.spawn().unwrap());
    Managed { manager, _agent: agent, api: guest, _turn: turn, instance }
}

/// A Service that its cluster wants an address for.
pub fn service(name: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": { "type": "LoadBalancer", "ports": [{ "name": "http", "port": 80, "protocol": "TCP" }] },
    })
}

#[test]
fn a_service_of_a_guest_cluster_gets_its_address_from_harvester_without_a_credential_of_the_host() {
    wait(async {
        let whole = Whole::start(1).await;
        allow(&whole).await;
        let harvester = Harvester::start(&whole.cluster.api);
        pool(&whole.cluster.api, "dev", "default/lan", "dev", ("192.0.2.11", "192.0.2.13")).await;
        let Managed { instance, api: guest, .. } = &manage(&whole).await;

        // The Node is known by what the agent reads from kubelet's credential.
        let known = until("the Node is initialised", async || {
            let node = guest.get(&format!("{NODES}/n1")).await?;
            let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
            (!taints.iter().any(|one| one["key"] == UNINITIALIZED)).then_some(node)
        })
        .await;
        assert_eq!(text(&known["spec"]["providerID"]), format!("guestlet://{}", uid(instance)));
        let zone = text(&known["metadata"]["labels"]["topology.kubernetes.io/zone"]);
        assert!(zone.starts_with("zone-"), "{known}");
        let addresses = known["status"]["addresses"].as_array().unwrap();
        assert!(
            addresses.contains(&json!({ "type": "InternalIP", "address": "192.0.2.200" })),
            "{addresses:?}"
        );

        let made = guest.create(SERVICES, &service("web")).await;
        let path = format!("{SERVICES}/web");
        let web = until("the Service has its address", async || {
            let web = guest.get(&path).await?;
            web["metadata"]["annotations"][VIP].is_string().then_some(web)
        })
        .await;
        assert_eq!(web["metadata"]["annotations"][VIP], "192.0.2.12");
        let objects = whole.cluster.api.list(BALANCERS).await;
        assert_eq!(objects.len(), 1);
        assert_eq!(objects[0]["metadata"]["annotations"]["guestlet.io/service-uid"], uid(&made));

        // What cannot be is told as an event, in the host's words.
        let change =
            json!({ "metadata": { "annotations": { "cloudprovider.harvesterhci.io/ipam": "dhcp" } } });
        guest.patch(&path, &change).await.unwrap();
        // That the host gives no addresses may have been told before: the controller learns of its rights a little after its start.
        until("why it cannot be is told", async || {
            let events = guest.list("/api/v1/namespaces/default/events").await;
            let is_told = |one: &Value| {
                one["reason"] == "LoadBalancerRefused" && text(&one["message"]).contains("cannot become dhcp")
            };
            events.iter().any(is_told).then_some(())
        })
        .await;

        // Deleted while Harvester does nothing, it goes as soon as that gives its address back.
        harvester.hold(true);
        guest.delete(&path).await;
        until("its load balancer is being deleted", async || {
            let objects = whole.cluster.api.list(BALANCERS).await;
            objects[0]["metadata"]["deletionTimestamp"].is_string().then_some(())
        })
        .await;
        assert!(guest.get(&path).await.is_some(), "it is not gone before its address is");
        harvester.hold(false);
        until("the Service is gone", async || guest.get(&path).await.is_none().then_some(())).await;
        let pool = of_pool(&whole.cluster.api, "dev").await;
        assert_eq!(pool["status"]["available"], 3, "{pool}");
    });
}
