//! What a test begins with: an empty cluster, the packaged roles, a host, and replicas of the program; and short ways to ask for
//! things.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::api::Api;
use crate::host::{Host, Serving};
use crate::patience::until;
use crate::site;
use crate::turns::Turn;

const MANIFESTS: &str = include_str!("../../packaging/kubernetes/cloud-provider.yaml");
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
pub const CLUSTER_ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
pub const ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/kube-system/roles";
/// Whom the API server takes the program for.
const ACCOUNT: &str = "system:serviceaccount:kube-system:guestlet-ccm";
pub const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/cloud-controller-manager";
pub const NODES: &str = "/api/v1/nodes";
pub const SERVICES: &str = "/api/v1/namespaces/default/services";
const UNINITIALIZED: &str = "node.cloudprovider.kubernetes.io/uninitialized";

/// Runs a test.
pub fn wait<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(work)
}

/// What is first here ends first.
pub struct Lab {
    pub serving: Option<Serving>,
    pub host: Host,
    pub api: Api,
    pub folder: tempfile::TempDir,
    pub turn: Turn,
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The packaged objects of a kind.
pub fn packaged(kind: &str) -> Value {
    let all: Vec<Value> = serde_saphyr::from_multiple(MANIFESTS).unwrap();
    all.into_iter().find(|one| one["kind"] == kind).unwrap()
}

impl Lab {
    pub async fn start() -> Self {
        let turn = site::take().await;
        let api = Api::read(turn.plane().folder.path(), "test");
        let folder = tempfile::tempdir().unwrap();
        let host = Host::new(folder.path());
        let lab = Self { serving: Some(host.serve()), host, api, folder, turn };
        lab.install().await;
        lab
    }

    /// Gives the program its packaged roles, and nothing else.
    pub async fn install(&self) {
        self.api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": "kube-system" } })).await;
        for (kind, path) in [
            ("ClusterRole", format!("{RBAC}/clusterroles")),
            ("ClusterRoleBinding", format!("{RBAC}/clusterrolebindings")),
            ("Role", ROLES.to_owned()),
            ("RoleBinding", format!("{RBAC}/namespaces/kube-system/rolebindings")),
        ] {
            let object = packaged(kind);
            self.api.ensure(&path, &object).await;
            self.put(&path, &object).await;
        }
    }

    /// Puts an object in the place of the one of its name.
    pub async fn put(&self, path: &str, object: &Value) {
        let path = format!("{path}/{}", text(&object["metadata"]["name"]));
        until("the object is another one", async || {
            let mut new = object.clone();
            new["metadata"] = self.api.get(&path).await?["metadata"].clone();
            self.api.replace(&path, &new).await
        })
        .await;
    }

    /// Starts a replica with what a test has no time to wait for.
    pub fn replica(&self, name: &str) -> Replica {
        self.replica_with(name, &[])
    }

    /// The credential of the program.
    pub fn kubeconfig(&self, name: &str) -> PathBuf {
        self.turn.plane().kubeconfig(&format!("ccm-{name}"), ACCOUNT, "system:serviceaccounts")
    }

    /// Starts a replica with this credential.
    pub fn replica_by(&self, name: &str, kubeconfig: &Path) -> Replica {
        Replica::start(self.folder.path(), name, kubeconfig, self.host.socket(), &[])
    }

    pub fn replica_with(&self, name: &str, more: &[&str]) -> Replica {
        let kubeconfig = self.kubeconfig(name);
        Replica::start(self.folder.path(), name, &kubeconfig, self.host.socket(), more)
    }

    /// A Node joins, as its kubelet registers it.
    pub async fn join(&self, name: &str, uuid: &str) -> Value {
        let node = json!({
            "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
            "spec": { "taints": [{ "key": UNINITIALIZED, "value": "true", "effect": "NoSchedule" }] },
        });
        let made = self.api.create(NODES, &node).await;
        self.report(name, true, uuid).await;
        made
    }

    /// What kubelet, or whoever misses it, writes to the status of a Node.
    pub async fn report(&self, name: &str, is_ready: bool, uuid: &str) {
        let ready = json!({
            "type": "Ready", "status": if is_ready { "True" } else { "Unknown" }, "reason": "Test", "message": "",
        });
        let info = json!({
            "systemUUID": uuid.to_uppercase(), "machineID": "", "bootID": "", "kernelVersion": "", "osImage": "",
            "containerRuntimeVersion": "", "kubeletVersion": "", "kubeProxyVersion": "", "operatingSystem": "linux",
            "architecture": "amd64",
        });
        let status = json!({ "status": { "conditions": [ready], "nodeInfo": info } });
        self.api.patch(&format!("{NODES}/{name}/status"), &status).await.unwrap();
    }

    pub async fn node(&self, name: &str) -> Option<Value> {
        self.api.get(&format!("{NODES}/{name}")).await
    }

    /// Waits until a Node is so.
    pub async fn node_is(&self, name: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        until(&format!("the Node {name} {what}"), async || self.node(name).await.filter(&is)).await
    }

    pub async fn initialised(&self, name: &str) -> Value {
        self.node_is(name, "is initialised", |node| !has_taint(node, UNINITIALIZED)).await
    }

    /// Makes a Service of type LoadBalancer.
    pub async fn service(&self, name: &str, annotations: Value) -> Value {
        let service = json!({
            "metadata": { "name": name, "annotations": annotations },
            "spec": { "type": "LoadBalancer", "ports": [{ "name": "http", "port": 80, "protocol": "TCP" }] },
        });
        self.api.create(SERVICES, &service).await
    }

    pub async fn get(&self, service: &str) -> Option<Value> {
        self.api.get(&format!("{SERVICES}/{service}")).await
    }

    /// Waits until a Service is so.
    pub async fn service_is(&self, name: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        until(&format!("the Service {name} {what}"), async || self.get(name).await.filter(&is)).await
    }

    pub async fn patch(&self, service: &str, change: Value) {
        self.api.patch(&format!("{SERVICES}/{service}"), &change).await.unwrap();
    }

    /// Waits until the cluster is told something of an object, for this reason; what.
    pub async fn told(&self, object: &str, reason: &str) -> String {
        until(&format!("{reason} is told of {object}"), async || self.was_told(object, reason).await).await
    }

    pub async fn was_told(&self, object: &str, reason: &str) -> Option<String> {
        let events = self.api.list("/api/v1/namespaces/default/events").await;
        let is_meant =
            |event: &&Value| event["involvedObject"]["name"] == object && event["reason"] == reason;
        events.iter().find(is_meant).map(|event| text(&event["message"]).to_owned())
    }
}

pub fn has_taint(node: &Value, key: &str) -> bool {
    node["spec"]["taints"].as_array().is_some_and(|taints| taints.iter().any(|taint| taint["key"] == key))
}

pub fn uid(object: &Value) -> &str {
    text(&object["metadata"]["uid"])
}

pub fn annotation<'o>(object: &'o Value, key: &str) -> &'o str {
    text(&object["metadata"]["annotations"][key])
}

/// A replica of the program. It ends with this value.
pub struct Replica {
    child: Child,
    log: PathBuf,
}

impl Replica {
    fn start(folder: &Path, name: &str, kubeconfig: &Path, socket: &Path, more: &[&str]) -> Self {
        let log = folder.join(format!("{name}.log"));
        // It ends with the test, however that does.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--", env!("CARGO_BIN_EXE_guestlet-ccm")])
            .args(["--name", name, "--lease", "4", "--delete-after", "2", "--tell-after", "1", "--verbose"])
            .args(["--health", "127.0.0.1:0"])
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .arg("--agent-socket")
            .arg(socket)
            .args(more)
            .env_remove("POD_NAME")
            .env_remove("POD_NAMESPACE")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap());
        Self { child: command.spawn().unwrap(), log }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.id()).unwrap()), signal).unwrap();
    }

    pub fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> std::process::ExitStatus {
        until("the replica has ended", async || self.child.try_wait().unwrap()).await
    }

    /// Waits until it leads.
    pub async fn leads(&self) {
        until("the replica leads", async || self.log().contains(" is the leader: ").then_some(())).await;
    }

    /// Bytes of memory that it has, and had at most.
    pub fn memory(&self) -> (u64, u64) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id())).unwrap();
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
        };
        (field("VmRSS:"), field("VmHWM:"))
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}:\n{}", self.log.display(), self.log());
        }
    }
}

/// Nothing else may happen in this time.
pub async fn quiet(seconds: u64) {
    tokio::time::sleep(Duration::from_secs(seconds)).await;
}
