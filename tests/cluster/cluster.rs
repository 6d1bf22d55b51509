//! A cluster of one node, whose kubelet has the agent for a driver.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::api::Api;
use crate::components::{Component, ControlPlane, NODE};
use crate::disk::Machine;
use crate::half::Half;
use crate::lab::{DRIVER, Lab, run};
use crate::runtime::Runtime;
use crate::sidecars::Sidecars;

pub const PODS: &str = "/api/v1/namespaces/default/pods";
pub const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims";
pub const VOLUMES: &str = "/api/v1/persistentvolumes";
pub const ATTACHMENTS: &str = "/apis/storage.k8s.io/v1/volumeattachments";
pub const NODES: &str = "/api/v1/nodes";
/// Where a pod has its volume.
pub const AT: &str = "/mnt/volume";
/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// What people apply to their cluster.
const MANIFESTS: &str = include_str!("../../packaging/kubernetes/csi.yaml");

/// The whole cluster. What is first here ends first.
pub struct Cluster {
    _sidecars: Sidecars,
    pub kubelet: Component,
    pub lab: Lab,
    pub half: Half,
    pub plane: ControlPlane,
    _runtime: Runtime,
}

impl Cluster {
    /// Starts one, to which the manifests were applied, and whose node has registered the driver.
    pub async fn start() -> Self {
        Self::start_on(None).await
    }

    /// The same, where volumes and nodes have a place (`csi.topology`), and the guest runs on `host`.
    pub async fn start_on(host: Option<&str>) -> Self {
        let mut plane = ControlPlane::start().await;
        let half = Half::new(Machine::new());
        let places = if host.is_some() { "topology = ['guestlet.io/host']" } else { "" };
        let kubeconfig = plane.kubelet_config.display();
        let mut lab = Lab::unknown(&format!("{places}\n[topology]\nkubeconfig = '{kubeconfig}'"));
        let root = lab.root().display().to_string();
        // kubelet and the agent see each other's mounts there, and those below.
        run(&format!("mkdir {root}; mount -t tmpfs kubelet {root}; mount --make-shared {root}"));
        apply(&plane.api).await;
        let (runtime, socket) = (Runtime::default(), lab.path("runtime.sock"));
        runtime.serve(&socket);
        let kubelet = plane.kubelet(&lab.root(), &socket, &half.real_sys());
        half.answer_for(&mut lab).await;
        if let Some(host) = host {
            lab.runs_on(host).await;
        }
        let sidecars = Sidecars::start(plane.api.clone(), lab.controller());
        let mut cluster = Self { _sidecars: sidecars, kubelet, lab, half, plane, _runtime: runtime };
        until("the node is ready, and has the driver", async || {
            assert!(cluster.kubelet.runs(), "kubelet has ended");
            let node = cluster.node().await?;
            let conditions = node["status"]["conditions"].as_array()?;
            let is_ready = conditions.iter().any(|it| it["type"] == "Ready" && it["status"] == "True");
            (is_ready && cluster.driver().await.is_some()).then_some(())
        })
        .await;
        cluster
    }

    pub fn api(&self) -> &Api {
        &self.plane.api
    }

    /// The Node, if kubelet has made it.
    pub async fn node(&self) -> Option<Value> {
        self.api().get(&format!("{NODES}/{NODE}")).await
    }

    /// What kubelet has told the cluster of the driver.
    pub async fn driver(&self) -> Option<Value> {
        let node = self.api().get(&format!("/apis/storage.k8s.io/v1/csinodes/{NODE}")).await?;
        node["spec"]["drivers"].as_array()?.iter().find(|driver| driver["name"] == DRIVER).cloned()
    }

    /// Asks for a volume of so many MiB; `mode` is its volumeMode.
    pub async fn claim(&self, name: &str, mebibytes: u64, mode: &str) {
        let claim = json!({
            "metadata": { "name": name },
            "spec": {
                "storageClassName": "guestlet",
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": mode,
                "resources": { "requests": { "storage": format!("{mebibytes}Mi") } },
            },
        });
        self.api().create(CLAIMS, &claim).await;
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
        self.lab.root().join(format!("pods/{uid}/volumes/kubernetes.io~csi/{volume}/mount"))
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
        until("nothing is left", async || {
            for path in [PODS, CLAIMS, VOLUMES, ATTACHMENTS] {
                if !self.api().list(path).await.is_empty() {
                    return None;
                }
            }
            let is_left = self.half.is_left() || !self.mounts().is_empty();
            (!is_left).then_some(())
        })
        .await;
    }

    /// The mounts of volumes below kubelet's root.
    pub fn mounts(&self) -> Vec<String> {
        let root = self.lab.root();
        let list = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let places = list.lines().filter_map(|line| line.split(' ').nth(4));
        places
            .filter(|place| Path::new(place).starts_with(&root) && Path::new(place) != root)
            .map(str::to_owned)
            .collect()
    }

    /// Kills the agent, and starts it again; its host half comes back to it.
    pub async fn kill_agent(&mut self) {
        self.lab.kill();
        self.lab.start();
        until("the agent listens", async || listens(&self.lab.path("control.sock")).then_some(())).await;
        self.half.answer_for(&mut self.lab).await;
    }

    /// Kills kubelet, and starts it again.
    pub fn kill_kubelet(&mut self) {
        self.kubelet.kill();
        self.kubelet.again();
    }
}

/// Whether a process listens on this socket, whose file another may have left behind. Nobody has to be dialled for that.
fn listens(socket: &Path) -> bool {
    const LISTENING: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(LISTENING) && fields.last() == socket.to_str()
    })
}

/// Makes the objects of the manifests. XFS, because it grows wherever the tests run.
async fn apply(api: &Api) {
    let documents: Vec<Value> = serde_saphyr::from_multiple(MANIFESTS).unwrap();
    assert_eq!(documents.len(), 8);
    for mut document in documents {
        let kind = document["kind"].as_str().unwrap();
        let plural = if kind == "StorageClass" { "storageclasses".into() } else { kind.to_lowercase() + "s" };
        let group = match document["apiVersion"].as_str().unwrap() {
            "v1" => "/api/v1".to_owned(),
            version => format!("/apis/{version}"),
        };
        let namespace = document["metadata"]["namespace"].as_str().map(|name| format!("/namespaces/{name}"));
        let path = format!("{group}{}/{plural}", namespace.unwrap_or_default());
        if kind == "StorageClass" {
            document["parameters"] = json!({ "csi.storage.k8s.io/fstype": "xfs" });
        }
        api.create(&path, &document).await;
    }
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

/// Waits until there is something.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
