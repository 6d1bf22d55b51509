//! `guestctl --kubeconfig` and `kubectl guestlet`: a cluster is asked by its API server alone.

use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::{Value, json};
use tokio::process::Command;

use crate::api::Api;
use crate::bench::{Bench, GUESTS, NODE, guest, host, packaged};
use crate::cluster::{HOSTS, wait};
use crate::guest::Guest;
use crate::kubelet::Kubelet;
use crate::lab::{Lab, assert_fails};
use crate::patience::until;
use crate::plane::ControlPlane;
use crate::whole::Whole;

pub const SYSTEM: &str = "guestlet-system";
const PODS: &str = "/api/v1/namespaces/guestlet-system/pods";
const OTHER: &str = "host-2";

/// A pod of guestlet on this node, which runs.
pub async fn pod(api: &Api, name: &str, app: &str, node: &str) {
    let pod = json!({
        "metadata": { "name": name, "labels": { "app.kubernetes.io/name": app } },
        "spec": { "nodeName": node, "containers": [{ "name": "guestlet-host", "image": "registry.test/guestlet-host" }] },
    });
    api.ensure(PODS, &pod).await;
    state(api, name, &json!({ "running": {} })).await;
}

/// Its container is in this state.
pub async fn state(api: &Api, name: &str, state: &Value) {
    let container = json!({ "name": "guestlet-host", "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": state });
    let status = json!({ "status": { "phase": "Running", "containerStatuses": [container] } });
    api.patch(&format!("{PODS}/{name}/status"), &status).await.unwrap();
}

/// A user who has the packaged roles of these names, as a kubeconfig.
pub async fn user(plane: &ControlPlane, api: &Api, name: &str, roles: &[&str]) -> PathBuf {
    let group = "/apis/rbac.authorization.k8s.io/v1";
    for object in packaged("../roles/guestctl.yaml") {
        let (kind, role) = (object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap());
        let inside = format!("{group}/namespaces/{SYSTEM}");
        let (roles_path, bindings) = match kind {
            "ClusterRole" => (format!("{group}/clusterroles"), format!("{group}/clusterrolebindings")),
            _ => (format!("{inside}/roles"), format!("{inside}/rolebindings")),
        };
        api.ensure(&roles_path, &object).await;
        if roles.contains(&role) {
            let binding = json!({
                "metadata": { "name": format!("{name}-{role}") },
                "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role },
                "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name }],
            });
            api.ensure(&bindings, &binding).await;
        }
    }
    plane.kubeconfig(name, name, "people")
}

/// A program that finds nothing in its environment that says where a cluster is.
pub fn program(path: impl AsRef<Path>) -> Command {
    let mut command = Command::new(path.as_ref());
    for variable in
        ["KUBECONFIG", "HTTPS_PROXY", "https_proxy", "GUESTLET_HOST_SOCKET", "KUBERNETES_SERVICE_HOST"]
    {
        command.env_remove(variable);
    }
    command.env("HOME", "/nonexistent").kill_on_drop(true);
    command
}

pub async fn ctl(kubeconfig: &Path, arguments: &[&str]) -> Output {
    let mut command = program(env!("CARGO_BIN_EXE_guestctl"));
    command.arg("--kubeconfig").arg(kubeconfig).args(arguments).output().await.unwrap()
}

/// What it prints, which must succeed.
pub async fn words(kubeconfig: &Path, arguments: &[&str]) -> String {
    let output = ctl(kubeconfig, arguments).await;
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

pub async fn value(kubeconfig: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&words(kubeconfig, &[arguments, &["-o", "json"]].concat()).await).unwrap()
}

/// A cluster of two nodes with a guest on each, and somebody who may do everything with them.
pub struct Desk {
    pub admin: PathBuf,
    pub guests: Vec<Guest>,
    pub nodes: Vec<Lab>,
    pub kubelet: Kubelet,
    pub bench: Bench,
}

impl Desk {
    pub async fn start() -> Self {
        let bench = Bench::start().await;
        let api = &bench.api;
        api.create("/api/v1/nodes", &json!({ "metadata": { "name": OTHER } })).await;
        api.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": SYSTEM } })).await;
        let kubelet = Kubelet::start(bench.turn.plane().address()).await;
        let (mut nodes, mut guests) = (Vec::new(), Vec::new());
        for (node, name) in [(NODE, "web"), (OTHER, "mail")] {
            kubelet.announce(api, node).await;
            let lab = host(bench.turn.plane(), node);
            let audit = format!("audit.file = '{}'", lab.path("audit.json").display());
            let lab = lab.set(&audit).start();
            let instance = bench.instance(name, node).await;
            guests.push(guest(&lab, &instance));
            let name = format!("guestlet-node-{node}");
            pod(api, &name, "guestlet-node", node).await;
            kubelet.run(&name, lab.socket());
            nodes.push(lab);
        }
        for name in ["web", "mail"] {
            until(&format!("the Guest {name} is connected"), async || {
                let guest = api.get(&format!("{GUESTS}/{name}")).await?;
                (guest["status"]["conditions"][0]["status"] == "True").then_some(())
            })
            .await;
        }
        let admin = user(bench.turn.plane(), api, "admin", &["guestlet-viewer", "guestlet-admin"]).await;
        Self { admin, guests, nodes, kubelet, bench }
    }

    /// In which pods something was run since this was asked last.
    fn asked(&self) -> Vec<String> {
        let asked = std::mem::take(&mut self.kubelet.pods.lock().unwrap().asked);
        asked.into_iter().map(|(pod, _)| pod).collect()
    }
}

pub fn names(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|vm| vm["name"].as_str().unwrap()).collect()
}

#[test]
fn guests_are_listed_from_their_objects_and_asked_in_the_pods_of_their_nodes() {
    wait(async {
        let desk = Desk::start().await;
        let list = value(&desk.admin, &["ls"]).await;
        assert_eq!(names(&list), ["default/mail", "default/web"]);
        assert_eq!(desk.asked(), [""; 0], "for this, guests' objects are enough");
        let web = &list[1];
        assert_eq!((&web["session"], &web["power"]), (&json!("connected"), &json!("running")));
        assert_eq!((&web["dial"], &web["guest"]["agent_version"]), (&json!("node host-1"), &json!("0.1.0")));
        let wide = words(&desk.admin, &["ls", "-o", "wide", "-A"]).await;
        assert!(wide.contains("default/web") && wide.contains("node host-2"), "{wide}");
        assert_eq!(value(&desk.admin, &["ls", "-n", "default"]).await, list);
        assert_eq!(value(&desk.admin, &["ls", "-n", SYSTEM]).await, json!([]));

        // A verb is what it is on the node.
        let lasting = |mut vm: Value| {
            vm["last_heard"].take();
            vm
        };
        let told = lasting(value(&desk.admin, &["info", "web"]).await);
        assert_eq!(told, lasting(desk.nodes[0].info("default/web")));
        assert_eq!(desk.asked(), ["guestlet-node-host-1"]);
        let pongs = words(&desk.admin, &["ping", "default/mail", "-c", "2"]).await;
        assert!(pongs.contains("default/mail: 2 in ") && pongs.contains("2 pings, min/avg/max"), "{pongs}");
        assert_eq!(desk.asked(), ["guestlet-node-host-2"]);
        let key = value(&desk.admin, &["trust", "show", "mail", "--namespace", "default"]).await;
        assert_eq!(key["name"], "default/mail");
        let there = value(&desk.admin, &["ls", "--node", OTHER]).await;
        assert_eq!(names(&there), ["default/mail"], "what the node itself lists");
        drop(desk.guests);
    });
}

#[test]
fn a_plugin_of_kubectl_asks_the_cluster_that_the_kubeconfigs_name() {
    wait(async {
        let desk = Desk::start().await;
        let folder = tempfile::tempdir().unwrap();
        let plugin = folder.path().join("kubectl-guestlet");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_guestctl"), &plugin).unwrap();
        let help = program(&plugin).arg("--help").output().await.unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        assert!(help.contains("Usage: kubectl guestlet [OPTIONS] <COMMAND>"), "{help}");
        let nowhere = program(&plugin).arg("ls").output().await.unwrap();
        assert_fails(&nowhere, 1, "name a kubeconfig with --kubeconfig or KUBECONFIG");

        // One file has the context, and the other one the cluster and the user that it names. One is missing.
        let whole: Value = serde_json::from_slice(&std::fs::read(&desk.admin).unwrap()).unwrap();
        let context = |name: &str, namespace: &str| json!({ "name": name, "context": { "cluster": "cluster", "user": "admin", "namespace": namespace } });
        let contexts = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "here",
                               "contexts": [context("here", "default"), context("there", SYSTEM)] });
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        std::fs::write(&one, contexts.to_string()).unwrap();
        let rest = json!({ "apiVersion": "v1", "kind": "Config", "clusters": whole["clusters"], "users": whole["users"] });
        std::fs::write(&other, rest.to_string()).unwrap();
        let listed = format!("/nonexistent/config:{}:{}", one.display(), other.display());
        let asked = async |arguments: &[&str]| {
            let output = program(&plugin).env("KUBECONFIG", &listed).args(arguments).output().await.unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        assert!(asked(&["info", "web"]).await.contains("default/web"));
        assert!(asked(&["ls"]).await.contains("default/web"));
        assert!(!asked(&["ls", "--context", "there"]).await.contains("default/web"));
        assert!(asked(&["ls", "-A", "--context", "there"]).await.contains("default/web"));
        let unknown = program(&plugin)
            .env("KUBECONFIG", &listed)
            .args(["ls", "--context", "x"])
            .output()
            .await
            .unwrap();
        assert_fails(&unknown, 1, "failed to load current context: x");

        // On a node, nothing of this means anything.
        let here = program(env!("CARGO_BIN_EXE_guestctl")).args(["ls", "-n", "shop"]).output().await.unwrap();
        assert_fails(&here, 2, "select one with --kubeconfig or --context");
    });
}

#[test]
fn what_keeps_a_guest_from_being_asked_is_said_with_what_to_do() {
    wait(async {
        let desk = Desk::start().await;
        let (api, plane) = (&desk.bench.api, desk.bench.turn.plane());
        let admin = &desk.admin;
        assert_fails(
            &ctl(admin, &["info", "wbe"]).await,
            4,
            "no Guest \"default/wbe\"; did you mean default/web?",
        );
        assert_fails(&ctl(admin, &["ping", "shop/mail"]).await, 4, "did you mean default/mail?");
        assert_fails(&ctl(admin, &["trust", "rotate", "--host"]).await, 1, "name it with --node");
        assert_fails(
            &ctl(admin, &["info", "web", "--node", "n9"]).await,
            3,
            "no pod of guestlet-node runs on the node n9",
        );

        // Somebody who may see guests, and one who may also see pods.
        let viewer = user(plane, api, "viewer", &["guestlet-viewer"]).await;
        assert_eq!(names(&value(&viewer, &["ls"]).await).len(), 2);
        let refused = ctl(&viewer, &["info", "web"]).await;
        assert_fails(&refused, 1, "the verb list on pods in the namespace guestlet-system is needed");
        let rules = json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list"] }]);
        crate::bench::grant(api, "viewer", "sees-pods", &rules).await;
        let refused = until("pods may be seen", async || {
            let refused = ctl(&viewer, &["info", "web"]).await;
            String::from_utf8_lossy(&refused.stderr).contains("pods/exec").then_some(refused)
        })
        .await;
        assert_fails(
            &refused,
            1,
            "on pods/exec in the namespace guestlet-system is needed: the Role guestlet-admin",
        );
        let lease = ctl(&viewer, &["volumes", "ls"]).await;
        assert_fails(&lease, 1, "the verb get on leases in the namespace guestlet-system is needed");
        let nobody = user(plane, api, "nobody", &[]).await;
        for (verb, arguments) in [("list", &["ls", "-n", "default"][..]), ("get", &["info", "web"])] {
            let words = format!("the verb {verb} on guests.guestlet.io in the namespace default is needed");
            assert_fails(&ctl(&nobody, arguments).await, 1, &words);
        }

        // A guest without an agent.
        desk.bench.instance("deaf", NODE).await;
        until("there is a Guest", async || api.get(&format!("{GUESTS}/deaf")).await).await;
        let deaf = until("it says why", async || {
            let deaf = ctl(admin, &["ping", "deaf"]).await;
            String::from_utf8_lossy(&deaf.stderr).contains("its Guest shows Connecting").then_some(deaf)
        })
        .await;
        assert_fails(
            &deaf,
            1,
            "there is no session with this guest now; its Guest shows Connecting: there is no socket",
        );

        // How the pod is.
        let waiting = json!({ "waiting": { "reason": "ImagePullBackOff" } });
        state(api, "guestlet-node-host-1", &waiting).await;
        assert_fails(&ctl(admin, &["info", "web"]).await, 3, "is starting (ImagePullBackOff)");
        state(api, "guestlet-node-host-1", &json!({ "running": {} })).await;
        desk.kubelet.run("guestlet-node-host-1", "/nonexistent/api.sock".into());
        let silent = ctl(admin, &["info", "web"]).await;
        assert_fails(
            &silent,
            3,
            "in the pod guestlet-node-host-1 on the node host-1: guestlet-host is not running",
        );
        desk.kubelet.pods.lock().unwrap().forget("guestlet-node-host-1");
        assert_fails(&ctl(admin, &["info", "web"]).await, 1, "container not found");
        api.delete(&format!("{PODS}/guestlet-node-host-1?gracePeriodSeconds=0")).await;
        assert_fails(
            &ctl(admin, &["info", "web"]).await,
            3,
            "runs on the node host-1, where default/web runs",
        );
        assert_fails(&ctl(admin, &["volumes", "ls"]).await, 3, "no controller leads");

        // The API server.
        let config = std::fs::read_to_string(admin).unwrap();
        let wrong = desk.nodes[0].path("wrong.conf");
        std::fs::write(&wrong, config.replace(":6443", ":6444")).unwrap();
        assert_fails(&ctl(&wrong, &["ls"]).await, 1, ":6444/: Connection refused");
        let stranger = json!({ "token": "none" });
        let mut config: Value = serde_json::from_str(&config).unwrap();
        config["users"][0]["user"] = stranger;
        std::fs::write(&wrong, config.to_string()).unwrap();
        assert_fails(&ctl(&wrong, &["ls"]).await, 1, "does not accept these credentials");
        config["users"][0]["user"] = json!({ "exec": {
            "apiVersion": "client.authentication.k8s.io/v1", "command": "/nonexistent/login", "interactiveMode": "Never",
        } });
        std::fs::write(&wrong, config.to_string()).unwrap();
        assert_fails(&ctl(&wrong, &["ls"]).await, 1, "cannot use the credentials for the API server");
        assert_fails(
            &ctl("/nonexistent/config".as_ref(), &["ls"]).await,
            1,
            "cannot use the kubeconfig /nonexistent/config",
        );
    });
}

#[test]
fn volumes_are_asked_of_the_controller_that_leads() {
    wait(async {
        let whole = Whole::start(2).await;
        let web = whole.vm("web").await;
        let id = web.with_volume().await;
        let (api, plane) = (&whole.cluster.api, whole.cluster.turn.plane());
        let kubelet = Kubelet::start(plane.address()).await;
        kubelet.announce(api, HOSTS[0]).await;
        for (number, lab) in whole.controllers.iter().enumerate() {
            let name = format!("controller-{number}");
            pod(api, &name, "guestlet-controller", HOSTS[0]).await;
            kubelet.run(&name, lab.socket());
        }
        let admin = user(plane, api, "admin", &["guestlet-admin"]).await;
        let list = value(&admin, &["volumes", "ls"]).await;
        assert_eq!((list.as_array().unwrap().len(), &list[0]["id"]), (1, &json!(id)), "{list}");
        let asked = kubelet.pods.lock().unwrap().asked.clone();
        let leader = format!("controller-{}", whole.leader().await);
        assert_eq!(asked, [(leader, vec!["guestctl".to_owned(), "proxy".to_owned()])]);
        let rules =
            json!([{ "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"] }]);
        crate::bench::grant(api, "sees-leases", "sees-leases", &rules).await;
        let other = plane.kubeconfig("sees-leases", "sees-leases", "people");
        let refused = until("Leases may be seen", async || {
            let refused = ctl(&other, &["volumes", "ls"]).await;
            (!String::from_utf8_lossy(&refused.stderr).contains("on leases")).then_some(refused)
        })
        .await;
        assert_fails(&refused, 1, "the verb get on pods in the namespace guestlet-system is needed");
        let done = words(&admin, &["volumes", "detach", &id]).await;
        assert!(done.contains(&id), "{done}");
        assert_eq!(web.guest.disks().seen.len(), 0, "as on the controller");
    });
}
