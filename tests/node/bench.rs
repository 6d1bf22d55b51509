//! What a test begins with: a cluster with the packaged kind and role, and programs of guestlet that have that role.

use std::path::{Path, PathBuf};

use guestlet::wire::proto::v1::GuestInfo;
use serde_json::{Value, json};

use crate::api::Api;
use crate::guest::{Door, Guest, Manner, info};
use crate::lab::Lab;
use crate::plane::ControlPlane;
use crate::pool::{self, add_kind};
use crate::turns::Turn;

/// The node that most tests are about.
pub const NODE: &str = "host-1";
pub const INSTANCES: &str = "/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances";
pub const MACHINES: &str = "/apis/kubevirt.io/v1/namespaces/default/virtualmachines";
pub const GUESTS: &str = "/apis/guestlet.io/v1alpha1/namespaces/default/guests";
pub const ROLES: &str = "/apis/rbac.authorization.k8s.io/v1/clusterroles";
const BINDINGS: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
/// Whom the packaged role is bound to, as the API server knows it.
const ACCOUNT: &str = "system:serviceaccount:guestlet-system:guestlet-node";
const ACCOUNTS: &str = "system:serviceaccounts";

/// The objects of a file of packaging/kubernetes/host/base.
pub fn packaged(file: &str) -> Vec<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/kubernetes/host/base");
    serde_saphyr::from_multiple(&std::fs::read_to_string(folder.join(file)).unwrap()).unwrap()
}

/// The only object of this kind in a file.
pub fn one(file: &str, kind: &str) -> Value {
    let mut all = packaged(file);
    all.retain(|object| object["kind"] == kind);
    assert_eq!(all.len(), 1, "{file}: {kind}");
    all.remove(0)
}

/// Gives the account what is packaged for it.
pub async fn install(api: &Api) {
    let kind = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/kubernetes/host/base/crd.yaml"),
    );
    add_kind(api, &kind.unwrap()).await;
    // The garbage collector of a cluster that other tests have used may not know the kind.
    for left in api.list(GUESTS).await {
        api.delete(&format!("{GUESTS}/{}", left["metadata"]["name"].as_str().unwrap())).await;
    }
    api.ensure(ROLES, &one("node.yaml", "ClusterRole")).await;
    api.ensure(BINDINGS, &one("node.yaml", "ClusterRoleBinding")).await;
}

/// Gives a user a role of this name with these rules.
pub async fn grant(api: &Api, user: &str, name: &str, rules: &Value) {
    api.create(ROLES, &json!({ "metadata": { "name": name }, "rules": rules })).await;
    let group = "rbac.authorization.k8s.io";
    let binding = json!({
        "metadata": { "name": name },
        "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": name },
        "subjects": [{ "apiGroup": group, "kind": "User", "name": user }],
    });
    api.create(BINDINGS, &binding).await;
}

/// A host half of a node, not started, which asks as the packaged account.
pub fn host(plane: &ControlPlane, node: &str) -> Lab {
    let kubeconfig = plane.kubeconfig(&format!("node-{node}"), ACCOUNT, ACCOUNTS);
    host_of(&kubeconfig, node)
}

/// The same with another kubeconfig. Agents are in the folder `sockets` of the lab.
pub fn host_of(kubeconfig: &Path, node: &str) -> Lab {
    let lab = without_sockets(kubeconfig, node);
    let sockets = lab.path("sockets");
    std::fs::create_dir(&sockets).unwrap();
    lab.set(&format!("kubevirt.sockets = '{}'", sockets.display()))
}

/// The same as it is in a cluster, where agents are reached from inside of pods.
pub fn without_sockets(kubeconfig: &Path, node: &str) -> Lab {
    Lab::new().with_arguments(&["node", "--kubeconfig", kubeconfig.to_str().unwrap(), "--node", node])
}

/// One as it is in a cluster, with the packaged account. Nothing is dialled before a launcher's process is found, and there
/// is none.
pub fn host_without_sockets(plane: &ControlPlane) -> Lab {
    without_sockets(&plane.kubeconfig("node", ACCOUNT, ACCOUNTS), NODE)
}

/// The socket by which the lab reaches the agent of an instance.
pub fn socket(lab: &Lab, instance: &Value) -> PathBuf {
    lab.path("sockets").join(format!("{}.sock", instance["metadata"]["uid"].as_str().unwrap()))
}

/// A guest in an instance that reads `dmi`.
pub fn guest_that_reads(lab: &Lab, instance: &Value, dmi: &str) -> Guest {
    let info = info(dmi, "boot-1");
    let info = GuestInfo { capabilities: [info.capabilities, vec!["topology".into()]].concat(), ..info };
    Guest::start(&socket(lab, instance), Door::Hybrid, Manner::Good, info)
}

/// A decent guest in an instance.
pub fn guest(lab: &Lab, instance: &Value) -> Guest {
    guest_that_reads(lab, instance, instance["spec"]["domain"]["firmware"]["uuid"].as_str().unwrap())
}

/// The names of the VMs that the lab lists.
pub fn names(lab: &Lab) -> Vec<String> {
    let all: Value = serde_json::from_str(&lab.words(&["ls", "-o", "json"])).unwrap();
    let all = all.as_array().unwrap_or_else(|| panic!("{all}"));
    all.iter().map(|vm| vm["name"].as_str().unwrap().to_owned()).collect()
}

/// Waits until the lab lists these VMs, and no others.
pub fn until_names(lab: &Lab, wanted: &[&str]) {
    lab.until(&format!("{wanted:?} are listed"), || names(lab) == wanted);
}

/// A cluster without `KubeVirt`: its objects are what the test says.
pub struct Bench {
    pub turn: Turn,
    pub api: Api,
}

impl Bench {
    pub async fn start() -> Self {
        let turn = pool::take().await;
        let api = Api::read(turn.plane().folder.path(), "test");
        install(&api).await;
        let labels = json!({
            "topology.kubernetes.io/region": "region",
            "topology.kubernetes.io/zone": "zone-1",
            "example.com/rack": "r7",
        });
        api.create("/api/v1/nodes", &json!({ "metadata": { "name": NODE, "labels": labels } })).await;
        Self { turn, api }
    }

    /// A host half of the node.
    pub fn host(&self) -> Lab {
        host(self.turn.plane(), NODE)
    }

    /// Makes an instance that runs on a node, as `KubeVirt` would have it.
    pub async fn instance(&self, name: &str, node: &str) -> Value {
        self.instance_with(name, node, |_| ()).await
    }

    /// The same with a change of it.
    pub async fn instance_with(&self, name: &str, node: &str, change: impl FnOnce(&mut Value)) -> Value {
        let mut instance = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {
                "name": name,
                "labels": { "kubevirt.io/nodeName": node, "guestcluster.harvesterhci.io/name": "dev" },
                "ownerReferences": [{
                    "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "name": name,
                    "uid": self.owner(name).await, "controller": true,
                }],
            },
            "spec": { "domain": {
                "firmware": { "uuid": "6F1C0A52-5C0F-4A8E-9D1B-0D7A2F3B4C5D" },
                "devices": {},
            } },
            "status": { "phase": "Running", "nodeName": node },
        });
        change(&mut instance);
        let mut made = self.api.create(INSTANCES, &instance).await;
        let firmware = &mut made["spec"]["domain"]["firmware"]["uuid"];
        if let Some(uuid) = firmware.as_str().map(str::to_lowercase) {
            // As guests read it.
            *firmware = json!(uuid);
        }
        made
    }

    /// The UID of the VM of this name, which is made if there is none: what belongs to nothing is collected as garbage.
    pub async fn owner(&self, name: &str) -> String {
        let vm = json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachine",
            "metadata": { "name": name },
            "spec": { "running": true, "template": { "spec": { "domain": { "devices": {} } } } },
        });
        self.api.ensure(MACHINES, &vm).await;
        let vm = self.api.get(&format!("{MACHINES}/{name}")).await.unwrap();
        vm["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// Deletes the VM of this name, and what belongs to it.
    pub async fn unmake(&self, name: &str) {
        self.api.delete(&format!("{MACHINES}/{name}")).await;
        self.delete(name).await;
    }

    pub async fn delete(&self, name: &str) {
        self.api.delete(&format!("{INSTANCES}/{name}")).await;
    }
}
