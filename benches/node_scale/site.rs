//! The host cluster: a real API server with many VMs, in which nothing runs.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::Request;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::api::collection;
use crate::patience::until;
use crate::plane::{self, ControlPlane};

/// The node whose guests are real.
pub const NODE: &str = "host-0";
/// How many nodes there are.
const NODES: usize = 10;
const NAMESPACE: &str = "/api/v1/namespaces";
const KUBEVIRT: &str = "/apis/kubevirt.io/v1/namespaces/default";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/guestlet-system/leases/guestlet-controller";
const ACCOUNTS: &str = "system:serviceaccounts";
/// How many requests are made at a time.
const AT_ONCE: usize = 16;

pub struct Site {
    plane: ControlPlane,
    client: Client,
}

/// How often each verb was asked for.
pub struct Requests(BTreeMap<String, f64>);

impl Site {
    /// One with the kinds of `KubeVirt`, and the packaged kind and roles.
    pub async fn start() -> Self {
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = IpAddr::V4(Ipv4Addr::new(127, 62, high, low.max(1)));
        let by = &["setpriv", "--pdeathsig", "KILL", "--"];
        let plane = ControlPlane::servers(plane::Site { address, by }).await;
        let config = Kubeconfig::read_from(plane.folder.path().join("test.conf")).unwrap();
        let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
        let site = Self { plane, client: Client::try_from(config).unwrap() };
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let base = here.join("packaging/kubernetes/host/base");
        let kinds = here.join("tests/kubevirt/crds");
        let kinds = std::fs::read_dir(kinds).unwrap().map(|entry| entry.unwrap().path());
        let packaged = ["crd.yaml", "node.yaml", "controller-role.yaml"].map(|file| base.join(file));
        site.make(NAMESPACE, &json!({ "metadata": { "name": "guestlet-system" } })).await;
        for file in kinds.chain(packaged) {
            let text = std::fs::read_to_string(file).unwrap();
            for object in serde_saphyr::from_multiple::<Value>(&text).unwrap() {
                site.install(&object).await;
            }
        }
        site
    }

    async fn install(&self, object: &Value) {
        match object["kind"].as_str().unwrap() {
            "CustomResourceDefinition" => self.plane.api.add_kind(object).await,
            "ClusterRole" | "ClusterRoleBinding" | "Role" | "RoleBinding" => {
                self.make(&collection(object), object).await;
            }
            // Nothing runs here.
            _ => {}
        }
    }

    async fn make(&self, path: &str, object: &Value) {
        self.plane.api.ensure(path, object).await;
    }

    /// Makes nodes, and VMs that run on them: so many on the first; the UIDs of their instances.
    pub async fn fill(&self, vms: usize, on_first: usize) -> Vec<String> {
        for number in 0..NODES {
            let labels =
                json!({ "topology.kubernetes.io/region": "eu", "topology.kubernetes.io/zone": "zone-1" });
            let node = json!({ "metadata": { "name": format!("host-{number}"), "labels": labels } });
            self.make("/api/v1/nodes", &node).await;
        }
        // Custom kinds are served by all of the API server a moment after it says so.
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        let places = Arc::new(Semaphore::new(AT_ONCE));
        let mut made = JoinSet::new();
        for number in 0..vms {
            let node = if number < on_first { 0 } else { 1 + number % (NODES - 1) };
            let (client, place) = (self.client.clone(), Arc::clone(&places).acquire_owned().await.unwrap());
            made.spawn(async move {
                let _place = place;
                (number, vm(&client, number, node).await)
            });
        }
        let mut uids: Vec<_> = made.join_all().await;
        uids.sort_unstable();
        uids.into_iter().take(on_first).map(|(_, uid)| uid).collect()
    }

    /// Says in which zone the node is.
    pub async fn zone(&self, zone: &str) {
        let labels = json!({ "metadata": { "labels": { "topology.kubernetes.io/zone": zone } } });
        self.plane.api.patch(&format!("/api/v1/nodes/{NODE}"), &labels).await.unwrap();
    }

    /// Waits until there are so many Guests.
    pub async fn until_guests(&self, number: usize) {
        let path = "/apis/guestlet.io/v1alpha1/namespaces/default/guests";
        until("all Guests are written", async || {
            let all = self.plane.api.list(path).await;
            let connected = all.iter().filter(|one| one["status"]["session"] == "Connected").count();
            (connected == number).then_some(())
        })
        .await;
    }

    /// Waits until a controller leads.
    pub async fn until_led(&self) {
        until("the controller leads", async || {
            let lease = self.plane.api.get(LEASE).await?;
            lease["metadata"]["annotations"]["guestlet.io/address"].is_string().then_some(())
        })
        .await;
    }

    /// What the API server was asked so far, but for what this program asks itself.
    pub async fn requests(&self) -> Requests {
        let request = Request::get("/metrics").body(Vec::new()).unwrap();
        let text = self.client.request_text(request).await.unwrap();
        let mut all = BTreeMap::new();
        for line in text.lines().filter(|line| line.starts_with("apiserver_request_total{")) {
            let (labels, value) = line.rsplit_once(' ').unwrap();
            let label = |name: &str| {
                let (_, rest) = labels.split_once(&format!("{name}=\""))?;
                Some(rest.split_once('"')?.0.to_owned())
            };
            let (verb, resource) = (label("verb").unwrap(), label("resource").unwrap_or_default());
            // The API server asks itself, and this program asks for metrics.
            let is_own =
                ["flowschemas", "prioritylevelconfigurations", "apiservices", "customresourcedefinitions"]
                    .contains(&resource.as_str());
            if !is_own && !resource.is_empty() {
                *all.entry(format!("{verb} {resource}")).or_default() += value.parse::<f64>().unwrap();
            }
        }
        Requests(all)
    }

    /// Of the account of the nodes, and of the controller's.
    pub fn node_config(&self) -> PathBuf {
        self.plane.kubeconfig("node", "system:serviceaccount:guestlet-system:guestlet-node", ACCOUNTS)
    }

    pub fn controller_config(&self) -> PathBuf {
        self.plane.kubeconfig(
            "controller",
            "system:serviceaccount:guestlet-system:guestlet-controller",
            ACCOUNTS,
        )
    }
}

impl Requests {
    pub fn since(mut self, before: &Self) -> Self {
        for (what, count) in &mut self.0 {
            *count -= before.0.get(what).copied().unwrap_or_default();
        }
        self.0.retain(|_, count| *count > 0.0);
        self
    }
}

impl fmt::Display for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> = self.0.iter().map(|(what, count)| format!("{count} {what}")).collect();
        if words.is_empty() { f.write_str("nothing was asked") } else { f.write_str(&words.join(", ")) }
    }
}

/// Makes a VM and its instance; the UID of that.
async fn vm(client: &Client, number: usize, node: usize) -> String {
    let name = crate::host::name(number);
    // As kubectl apply leaves it: objects of KubeVirt are large.
    let applied = json!({ "kubectl.kubernetes.io/last-applied-configuration": "x".repeat(4096) });
    let spec = json!({
        "domain": {
            "devices": {
                "autoattachVSOCK": true,
                "disks": [{ "name": "root", "disk": { "bus": "virtio" } }],
                "interfaces": [{ "name": "default", "masquerade": {} }],
            },
            "memory": { "guest": "4Gi" },
            "resources": { "requests": { "memory": "4Gi" } },
        },
        "networks": [{ "name": "default", "pod": {} }],
        "volumes": [{ "name": "root", "containerDisk": { "image": "registry.test/root" } }],
    });
    let labels =
        json!({ "guestcluster.harvesterhci.io/name": "dev", "kubevirt.io/nodeName": format!("host-{node}") });
    let made = create(client, &format!("{KUBEVIRT}/virtualmachines"), &json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": { "name": name, "annotations": applied },
        "spec": { "runStrategy": "Always", "template": { "metadata": { "labels": labels }, "spec": spec } },
    }))
    .await;
    let made = create(client, &format!("{KUBEVIRT}/virtualmachineinstances"), &json!({
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachineInstance",
        "metadata": {
            "name": name,
            "labels": labels,
            "annotations": applied,
            "ownerReferences": [{
                "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name,
                "uid": made["metadata"]["uid"], "controller": true,
            }],
        },
        "spec": spec,
        "status": {
            "phase": "Running",
            "nodeName": format!("host-{node}"),
            "VSOCKCID": number + 100,
            "conditions": [{ "type": "Ready", "status": "True" }, { "type": "LiveMigratable", "status": "True" }],
            "interfaces": [{ "name": "default", "ipAddress": "192.0.2.7", "mac": "52:54:00:12:34:56" }],
            "volumeStatus": [{ "name": "root", "target": "vda" }],
        },
    }))
    .await;
    made["metadata"]["uid"].as_str().unwrap().to_owned()
}

async fn create(client: &Client, path: &str, object: &Value) -> Value {
    let request = Request::post(path).header("content-type", "application/json");
    let answer = client.request_text(request.body(object.to_string().into_bytes()).unwrap()).await.unwrap();
    serde_json::from_str(&answer).unwrap()
}
