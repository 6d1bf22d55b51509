//! A cluster of one or two nodes, whose kubelets have the agent for a driver.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::api::{Api, collection};
use crate::disk::Machine;
use crate::half::Half;
use crate::lab::{DRIVER, Lab};
use crate::node::{self, Node};
pub use crate::patience::{PATIENCE, until};
use crate::plane::ControlPlane;
use crate::sidecars::Sidecars;

pub const PODS: &str = "/api/v1/namespaces/default/pods";
pub const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
pub const VOLUMES: &str = "/api/v1/persistentvolumes";
pub const ATTACHMENTS: &str = "/apis/storage.k8s.io/v1/volumeattachments";
pub const CLASSES: &str = "/apis/storage.k8s.io/v1/storageclasses";
pub const NODES: &str = "/api/v1/nodes";
/// The name of the first Node.
pub const NODE: &str = node::NODES[0].name;
/// Where a pod has its volume.
pub const AT: &str = "/mnt/volume";
/// What people apply to their cluster.
const MANIFESTS: &str = include_str!("../../packaging/kubernetes/csi.yaml");

/// What a cluster has beyond one node that has no place, and sidecars beside its pods.
#[derive(Default)]
pub struct Layout {
    /// Two nodes.
    pub is_double: bool,
    /// Volumes and nodes have a place (`csi.topology`), and the guests run on this host.
    pub host: Option<&'static str>,
    /// The sidecars are the pods of the manifests' Deployment.
    pub is_deployed: bool,
}

/// The whole cluster. What is first here ends first.
pub struct Cluster {
    _sidecars: Option<Sidecars>,
    pub nodes: Vec<Node>,
    pub half: Half,
    pub plane: ControlPlane,
}

impl Cluster {
    /// Starts one, to which the manifests were applied, and whose node has registered the driver.
    pub async fn start() -> Self {
        Self::with(Layout::default()).await
    }

    /// The same with a layout of its own.
    pub async fn with(Layout { is_double, host, is_deployed }: Layout) -> Self {
        let plane =
            if is_deployed { ControlPlane::with_deployments().await } else { ControlPlane::start().await };
        let first = Machine::new();
        let second = is_double.then(|| first.beside());
        let machines: Vec<_> = std::iter::once(first).chain(second).map(Arc::new).collect();
        let names = node::NODES.iter().map(|who| who.machine);
        let half = Half::new(names.zip(machines.iter().cloned()).collect());
        apply(&plane.api, false).await;
        let settings = if host.is_some() { "topology = ['guestlet.io/host']" } else { "" };
        let mut nodes = Vec::new();
        for (number, machine) in machines.iter().enumerate() {
            let node = Node::start(number, machine, &plane, &half, settings).await;
            if let Some(host) = host {
                node.lab.runs_on(host).await;
            }
            nodes.push(node);
        }
        let sidecars = (!is_deployed)
            .then(|| Sidecars::start(Api::read(plane.sidecars(), "sidecars"), nodes[0].lab.controller()));
        let mut cluster = Self { _sidecars: sidecars, nodes, half, plane };
        for number in 0..cluster.nodes.len() {
            cluster.is_ready(number).await;
        }
        apply(cluster.api(), true).await;
        cluster
    }

    /// Waits until a node is ready, and has the driver.
    pub async fn is_ready(&mut self, number: usize) {
        until("the node is ready, and has the driver", async || {
            let node = &mut self.nodes[number];
            assert!(node.kubelet.runs(), "kubelet has ended");
            let name = node.who.name;
            driver_when_ready(self.api(), name).await
        })
        .await;
    }

    pub fn api(&self) -> &Api {
        &self.plane.api
    }

    /// The first node's agent.
    pub fn lab(&self) -> &Lab {
        &self.nodes[0].lab
    }

    /// The first Node, if kubelet has made it.
    pub async fn node(&self) -> Option<Value> {
        self.api().get(&format!("{NODES}/{NODE}")).await
    }

    /// What kubelet has told the cluster of the driver.
    pub async fn driver(&self) -> Option<Value> {
        driver_of(self.api(), NODE).await
    }

    /// Asks for a volume of so many MiB; `mode` is its volumeMode.
    pub async fn claim(&self, name: &str, mebibytes: u64, mode: &str) {
        self.claim_of("guestlet", name, mebibytes, mode).await;
    }

    /// The same of another storage class.
    pub async fn claim_of(&self, class: &str, name: &str, mebibytes: u64, mode: &str) {
        self.api().create(CLAIMS, &claim(class, name, mebibytes, mode)).await;
    }

    /// Has a pod run.
    pub async fn run(&self, pod: &Value) {
        self.api().create(PODS, pod).await;
    }

    /// Waits until a pod runs; its uid.
    pub async fn runs(&self, name: &str) -> String {
        until(&format!("{name} runs"), async || {
            let pod = self.api().get(&format!("{PODS}/{name}")).await.unwrap();
            let container = &pod["status"]["containerStatuses"][0];
            (container["ready"] == true).then(|| pod["metadata"]["uid"].as_str().unwrap().to_owned())
        })
        .await
    }

    /// Where kubelet has a pod's volume published.
    pub fn published(&self, uid: &str, volume: &str) -> PathBuf {
        self.lab().root().join(format!("pods/{uid}/volumes/kubernetes.io~csi/{volume}/mount"))
    }

    /// The name of the `PersistentVolume` that a claim is bound to.
    pub async fn volume_of(&self, claim: &str) -> String {
        let claim = self.api().get(&format!("{CLAIMS}/{claim}")).await.unwrap();
        claim["spec"]["volumeName"].as_str().unwrap().to_owned()
    }

    /// Deletes a pod, and waits until it is gone.
    pub async fn end(&self, name: &str) {
        let path = format!("{PODS}/{name}");
        self.api().delete(&path).await;
        until(&format!("{name} ends"), async || self.api().get(&path).await.is_none().then_some(())).await;
    }

    /// Waits until there is no volume, nowhere.
    pub async fn is_empty(&self) {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let left = self.left().await;
            if left.is_empty() {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "there is left: {left:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// What there is of volumes and pods.
    async fn left(&self) -> Vec<String> {
        let mut left = self.mounts();
        left.extend(objects(self.api()).await);
        if self.half.is_left() {
            left.push("disks".to_owned());
        }
        left
    }

    /// The mounts of volumes, on all nodes.
    pub fn mounts(&self) -> Vec<String> {
        self.nodes.iter().flat_map(Node::mounts).collect()
    }

    /// Kills the agent of the first node, and starts it again; its host half comes back to it.
    pub async fn kill_agent(&mut self) {
        self.nodes[0].kill_agent(&self.half).await;
    }

    /// Kills kubelet of the first node, and starts it again.
    pub fn kill_kubelet(&mut self) {
        self.nodes[0].kill_kubelet();
    }
}

/// Makes the objects of the manifests: those that make pods, or the others. XFS, because it grows wherever the tests run.
pub async fn apply(api: &Api, makes_pods: bool) {
    let documents: Vec<Value> = serde_saphyr::from_multiple(MANIFESTS).unwrap();
    assert_eq!(documents.len(), 8);
    for mut document in documents {
        let kind = document["kind"].as_str().unwrap();
        if (kind == "Deployment") != makes_pods {
            continue;
        }
        if kind == "StorageClass" {
            document["parameters"] = json!({ "csi.storage.k8s.io/fstype": "xfs" });
        }
        api.create(&collection(&document), &document).await;
    }
}

/// What the kubelet of a Node has told the cluster of the driver.
pub async fn driver_of(api: &Api, node: &str) -> Option<Value> {
    let node = api.get(&format!("/apis/storage.k8s.io/v1/csinodes/{node}")).await?;
    node["spec"]["drivers"].as_array()?.iter().find(|driver| driver["name"] == DRIVER).cloned()
}

/// The same, once the Node is ready.
pub async fn driver_when_ready(api: &Api, name: &str) -> Option<Value> {
    let node = api.get(&format!("{NODES}/{name}")).await?;
    let conditions = node["status"]["conditions"].as_array()?;
    let is_ready = conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True");
    if is_ready { driver_of(api, name).await } else { None }
}

/// The paths of all objects that make or use a volume.
pub async fn objects(api: &Api) -> Vec<String> {
    let mut all = Vec::new();
    for path in [PODS, CLAIMS, VOLUMES, ATTACHMENTS] {
        let objects = api.list(path).await;
        all.extend(objects.iter().map(|object| format!("{path}/{}", object["metadata"]["name"])));
    }
    all
}

/// A claim of so many MiB of a storage class; `mode` is its volumeMode.
pub fn claim(class: &str, name: &str, mebibytes: u64, mode: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": {
            "storageClassName": class,
            "accessModes": ["ReadWriteOnce"],
            "volumeMode": mode,
            "resources": { "requests": { "storage": format!("{mebibytes}Mi") } },
        },
    })
}

/// A pod that has a claim at [`AT`], of which its command knows; `mode` is the volumeMode.
pub fn pod(name: &str, claim: &str, mode: &str, script: &str) -> Value {
    let (list, at) =
        if mode == "Block" { ("volumeDevices", "devicePath") } else { ("volumeMounts", "mountPath") };
    json!({
        "metadata": { "name": name },
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [{
                "name": "only",
                "image": "processes",
                "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-ec", format!("{script}; exec sleep infinity")],
                list: [{ "name": "volume", at: AT }],
            }],
            "volumes": [{ "name": "volume", "persistentVolumeClaim": { "claimName": claim } }],
        },
    })
}

/// What the cluster says of a pod, as in `kubectl describe`.
pub async fn told(cluster: &Cluster, name: &str, reason: &str) -> String {
    until(&format!("{reason} is told of {name}"), async || {
        let events = cluster.api().list("/api/v1/namespaces/default/events").await;
        let is_meant = |event: &&Value| event["involvedObject"]["name"] == name && event["reason"] == reason;
        events.iter().find(is_meant).map(|event| event["message"].as_str().unwrap().to_owned())
    })
    .await
}
