//! The control planes of the tests that need KubeVirt's kinds: which there are in them at first, and how they are swept.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::api::Api;
use crate::client::{JSON, MERGE, call, list};
use crate::model::admission::WEBHOOKS;
use crate::model::objects::namespace;
use crate::patience::PATIENCE;
use crate::plane::ControlPlane;
use crate::turns::{Turn, Turns};

static TURNS: Turns = Turns::new(|plane| Box::pin(prepare(plane)));

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

/// Waits for one, in which there is nothing yet but KubeVirt's kinds.
pub async fn take() -> Turn {
    let turn = TURNS.take().await;
    if !turn.is_new {
        sweep(&Api::read(turn.plane().folder.path(), "test")).await;
    }
    turn
}

async fn prepare(plane: &mut ControlPlane) {
    for kind in KINDS {
        add_kind(&plane.api, kind).await;
    }
    // The garbage collector looks for kinds when it starts, and seldom after.
    plane.add_controllers(CONTROLLERS);
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
