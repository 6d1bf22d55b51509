//! The control planes of this test program. A test has one to itself, and leaves it to the next; it starts one only where
//! none is free.
//!
//! They listen at loopback addresses of their own, on the ports that are usual, and end with this process: programs that
//! are started with `setpriv --pdeathsig` end with the thread that started them, which is one that never ends.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::task::JoinSet;

use crate::api::Api;
use crate::client::{JSON, MERGE, call, list};
use crate::model::admission::WEBHOOKS;
use crate::model::objects::namespace;
use crate::patience::PATIENCE;
use crate::plane::{ControlPlane, Site};

/// How many there are at once.
const MOST: usize = 4;
static TURNS: Semaphore = Semaphore::const_new(MOST);
static FREE: Mutex<Vec<ControlPlane>> = Mutex::new(Vec::new());

/// What binds and protects volumes, and deletes what belongs to objects that are gone.
const CONTROLLERS: &str = "persistentvolume-binder,pv-protection,pvc-protection,garbagecollector";

/// KubeVirt's kinds, and Harvester's.
pub const KINDS: [&str; 7] = [
    include_str!("crds/loadbalancers.yaml"),
    include_str!("crds/ippools.yaml"),
    include_str!("crds/networkfilesystems.yaml"),
    include_str!("crds/kubevirts.yaml"),
    include_str!("crds/virtualmachineinstancemigrations.yaml"),
    include_str!("crds/virtualmachineinstances.yaml"),
    include_str!("crds/virtualmachines.yaml"),
];

/// A control plane that is a test's for as long as it has this.
pub struct Turn {
    plane: Option<ControlPlane>,
    _turn: SemaphorePermit<'static>,
}

impl Turn {
    /// Waits for one, in which there is nothing yet but KubeVirt's kinds.
    pub async fn take() -> Self {
        let turn = TURNS.acquire().await.unwrap();
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let plane = match free {
            Some(plane) => {
                sweep(&Api::read(plane.folder.path(), "test")).await;
                plane
            }
            None => new().await,
        };
        Self { plane: Some(plane), _turn: turn }
    }

    pub fn plane(&self) -> &ControlPlane {
        self.plane.as_ref().expect("it is taken away at the end only")
    }

    /// Kills the API server, as hard as can be. The plane is no other test's afterwards.
    pub fn kill_api_server(&mut self) {
        self.plane.as_mut().expect("it is taken away at the end only").api_server.kill();
    }

    /// Starts the API server again.
    pub fn start_api_server(&mut self) {
        self.plane.as_mut().expect("it is taken away at the end only").api_server.again();
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(mut plane) = self.plane.take() else { return };
        // What a failed test has left may not be what sweeping takes away; and its logs are shown.
        if !std::thread::panicking() && plane.api_server.starts() == 1 && plane.api_server.runs() {
            FREE.lock().unwrap_or_else(PoisonError::into_inner).push(plane);
        }
    }
}

/// Has a thread that lasts start a control plane.
async fn new() -> ControlPlane {
    type Wish = oneshot::Sender<ControlPlane>;
    static STARTER: OnceLock<Mutex<mpsc::Sender<Wish>>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (wishes, to_do) = mpsc::channel::<Wish>();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            for (number, wish) in (1..).zip(to_do) {
                let _ = wish.send(runtime.block_on(start(number)));
            }
        });
        Mutex::new(wishes)
    });
    let (wish, granted) = oneshot::channel();
    starter.lock().unwrap_or_else(PoisonError::into_inner).send(wish).unwrap();
    granted.await.expect("a control plane starts")
}

async fn start(number: u8) -> ControlPlane {
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = IpAddr::V4(Ipv4Addr::new(127, 64 + (number & 63), high, low.max(1)));
    let site = Site { address, by: &["setpriv", "--pdeathsig", "KILL", "--"] };
    let mut plane = ControlPlane::servers(site).await;
    remove_in_the_end(plane.folder.path());
    for kind in KINDS {
        add_kind(&plane.api, kind).await;
    }
    // The garbage collector looks for kinds when it starts, and seldom after.
    plane.add_controllers(CONTROLLERS);
    plane
}

/// Has a folder removed when this process has ended, however it does: nobody drops what the pool has.
#[allow(clippy::zombie_processes, reason = "it ends after this process")]
fn remove_in_the_end(folder: &Path) {
    let script = r#"cat; until rm -rf -- "$1"; do sleep 0.1; done"#;
    let mut remover = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // It waits until nobody has the other end.
    std::mem::forget(remover.stdin.take());
}

/// Makes a kind known, and waits until it is served.
pub async fn add_kind(api: &Api, yaml: &str) {
    api.add_kind(&serde_saphyr::from_str(yaml).unwrap()).await;
}

/// What tests make, and programs under test.
const LEFT: [&str; 24] = [
    "/apis/loadbalancer.harvesterhci.io/v1beta1/loadbalancers",
    "/apis/loadbalancer.harvesterhci.io/v1beta1/ippools",
    "/apis/harvesterhci.io/v1beta1/networkfilesystems",
    "/apis/apiregistration.k8s.io/v1/apiservices",
    "/apis/kubevirt.io/v1/virtualmachines",
    "/apis/kubevirt.io/v1/virtualmachineinstances",
    "/apis/kubevirt.io/v1/virtualmachineinstancemigrations",
    "/apis/kubevirt.io/v1/kubevirts",
    "/apis/coordination.k8s.io/v1/leases",
    "/api/v1/pods",
    "/api/v1/events",
    "/api/v1/configmaps",
    "/api/v1/secrets",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/api/v1/persistentvolumeclaims",
    "/apis/storage.k8s.io/v1/volumeattachments",
    "/api/v1/persistentvolumes",
    "/apis/storage.k8s.io/v1/storageclasses",
    "/api/v1/nodes",
    "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "/apis/rbac.authorization.k8s.io/v1/roles",
    "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
];

/// Takes away what a test has left, whatever it waits for.
async fn sweep(api: &Api) {
    // Whom the test had asked is gone.
    while !sweep_once(api, WEBHOOKS).await {}
    let mut sweeps = JoinSet::new();
    for path in LEFT {
        let api = api.clone();
        sweeps.spawn(async move {
            let deadline = Instant::now() + PATIENCE;
            while !sweep_once(&api, path).await {
                assert!(Instant::now() < deadline, "{path} cannot be swept");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }
    sweeps.join_all().await;
}

/// Whether nothing was left.
async fn sweep_once(api: &Api, path: &str) -> bool {
    let Ok((objects, _)) = list(api, path).await else { return false };
    let left: Vec<Value> = objects.into_iter().filter(|object| !is_the_servers_own(object)).collect();
    if path.ends_with("/events") {
        let spaces: BTreeSet<String> = left.iter().map(|event| namespace(event).to_owned()).collect();
        for space in spaces {
            let path = format!("/api/v1/namespaces/{space}/events");
            let _ = call(api, Method::DELETE, &path, JSON, None).await;
        }
        return left.is_empty();
    }
    for object in &left {
        let path = path_of(path, object);
        if object["metadata"]["finalizers"].is_array() {
            // A webhook that is gone may be asked for a moment yet; then it is done in the next round.
            let none = json!({ "metadata": { "finalizers": null } });
            let _ = call(api, Method::PATCH, &path, MERGE, Some(&none)).await;
        }
        let now = json!({ "gracePeriodSeconds": 0, "propagationPolicy": "Background" });
        let _ = call(api, Method::DELETE, &path, JSON, Some(&now)).await;
    }
    left.is_empty()
}

/// Whether the API server makes it by itself.
fn is_the_servers_own(object: &Value) -> bool {
    let metadata = &object["metadata"];
    metadata["labels"]["kubernetes.io/bootstrapping"].is_string()
        || metadata["labels"]["kube-aggregator.kubernetes.io/automanaged"].is_string()
        || metadata["namespace"].as_str().is_some_and(|name| name.starts_with("kube-"))
        || (metadata["name"] == "kubernetes" && metadata["namespace"] == "default")
}

/// The path of an object of this collection of all namespaces.
fn path_of(collection: &str, object: &Value) -> String {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    match object["metadata"]["namespace"].as_str() {
        None => format!("{collection}/{name}"),
        Some(namespace) => {
            let (group, plural) = collection.rsplit_once('/').expect("a path");
            format!("{group}/namespaces/{namespace}/{plural}/{name}")
        }
    }
}
