//! Pods that run `guestlet-host`: that of a node, and that of the leading controller.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ContainerState, Pod};
use kube::api::{Api, ListParams};

use super::Error;
use super::access::ApiServer;
use super::api::Asked;

/// Namespace of guestlet's own objects, as in its manifests.
pub const SYSTEM: &str = "guestlet-system";
/// Name of the container in these pods.
pub const CONTAINER: &str = "guestlet-host";
/// Role that permits requests to the pods.
pub const ROLE: &str = "the Role guestlet-admin in guestlet-system has it (docs/kubevirt.md)";

const NODES: &str = "app.kubernetes.io/name=guestlet-node";
const LEASE: &str = "guestlet-controller";

/// Pod in which guestctl can be run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Node of the pod.
    pub node: String,
    /// Name of the pod.
    pub pod: String,
}

/// Finds the pod of this node.
///
/// # Errors
/// Fails if the node has no pod, or the pod is not running. The message then mentions `guest`.
pub async fn of_node(server: &ApiServer, node: &str, guest: &str) -> Result<Place, Error> {
    let parameters = ListParams::default().labels(NODES).fields(&format!("spec.nodeName={node}"));
    let pods = list(server, parameters).await?;
    let missing = || Error::NoPod { node: node.to_owned(), why: guest.to_owned() };
    // While a pod is replaced, two may exist.
    let best = pods.iter().min_by_key(|pod| standing(pod).is_some()).ok_or_else(missing)?;
    running(best)
}

/// Lists the nodes that have a pod, sorted by name, each with the pod if it is running.
///
/// # Errors
/// Fails if they cannot be listed, or there are none.
pub async fn of_nodes(server: &ApiServer) -> Result<Vec<(String, Result<Place, Error>)>, Error> {
    let pods = list(server, ListParams::default().labels(NODES)).await?;
    let mut found: Vec<_> =
        pods.iter().map(|pod| (place(pod), standing(pod).is_some(), running(pod))).collect();
    found.sort_by(|one, other| (&one.0.node, one.1).cmp(&(&other.0.node, other.1)));
    found.retain(|(place, _, _)| !place.node.is_empty());
    found.dedup_by(|later, kept| later.0.node == kept.0.node);
    if found.is_empty() {
        return Err(Error::NoPods);
    }
    Ok(found.into_iter().map(|(place, _, pod)| (place.node, pod)).collect())
}

/// Finds the pod of the leading controller.
///
/// # Errors
/// Fails if none is leading, or the pod cannot be determined.
pub async fn leader(server: &ApiServer) -> Result<Place, Error> {
    let leases: Api<Lease> = Api::namespaced(server.client.clone(), SYSTEM);
    let lease = server.ask(asked("read the Lease", "get", "leases"), leases.get_opt(LEASE)).await?;
    let holder = lease.and_then(|lease| lease.spec?.holder_identity).unwrap_or_default();
    // The holder consists of the pod's name and a suffix that distinguishes runs of the program.
    let name = holder.rsplit_once('_').map_or("", |(name, _)| name);
    if name.is_empty() {
        return Err(Error::NoLeader);
    }
    let pods: Api<Pod> = Api::namespaced(server.client.clone(), SYSTEM);
    let pod = server.ask(asked("read a pod", "get", "pods"), pods.get_opt(name)).await?;
    running(&pod.ok_or(Error::NoLeader)?)
}

async fn list(server: &ApiServer, parameters: ListParams) -> Result<Vec<Pod>, Error> {
    server.list(asked("list pods", "list", "pods"), parameters).await
}

fn asked(what: &'static str, verb: &'static str, resource: &'static str) -> Asked<'static> {
    Asked { what, verb, resource, namespace: Some(SYSTEM), role: ROLE }
}

fn place(pod: &Pod) -> Place {
    Place {
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        pod: pod.metadata.name.clone().unwrap_or_default(),
    }
}

fn running(pod: &Pod) -> Result<Place, Error> {
    let Place { node, pod: name } = place(pod);
    match standing(pod) {
        None => Ok(Place { node, pod: name }),
        Some(state) => Err(Error::NotRunning { pod: name, node, state }),
    }
}

/// Returns why the program of a pod is not running; `None` if it is.
fn standing(pod: &Pod) -> Option<String> {
    if pod.metadata.deletion_timestamp.is_some() {
        return Some("is terminating, and is being replaced".to_owned());
    }
    let status = pod.status.clone().unwrap_or_default();
    let containers = status.container_statuses.unwrap_or_default();
    let own = containers.into_iter().find(|container| container.name == CONTAINER);
    let state = own.and_then(|container| container.state).unwrap_or_default();
    match state {
        ContainerState { running: Some(_), .. } => None,
        ContainerState { waiting: Some(waiting), .. } => {
            Some(starting(waiting.reason.as_deref(), waiting.message.as_deref()))
        }
        ContainerState { terminated: Some(ended), .. } => {
            Some(format!("has ended with the exit code {}", ended.exit_code))
        }
        _ => Some(starting(status.reason.as_deref().or(status.phase.as_deref()), status.message.as_deref())),
    }
}

fn starting(reason: Option<&str>, message: Option<&str>) -> String {
    let reason = reason.unwrap_or("its state is not known yet");
    let message = message.map(|message| format!(": {message}")).unwrap_or_default();
    format!("is starting ({reason}{message}); try again when it runs")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pod_that_does_not_run_says_why() {
        let pod = |container: serde_json::Value, phase: &str| -> Pod {
            let statuses = json!([{ "name": CONTAINER, "image": "", "imageID": "", "ready": false, "restartCount": 0,
                                    "state": container }]);
            let status = json!({ "phase": phase, "containerStatuses": statuses });
            let (metadata, spec) = (json!({ "name": "p" }), json!({ "nodeName": "n1", "containers": [] }));
            serde_json::from_value(json!({ "metadata": metadata, "spec": spec, "status": status })).unwrap()
        };
        let place = Place { node: "n1".into(), pod: "p".into() };
        assert_eq!(running(&pod(json!({ "running": {} }), "Running")).unwrap(), place);
        for (container, expected) in [
            (
                json!({ "waiting": { "reason": "ImagePullBackOff", "message": "no such image" } }),
                "ImagePullBackOff: no such image",
            ),
            (json!({ "terminated": { "exitCode": 1 } }), "exit code 1"),
            (json!({}), "is starting (Pending)"),
        ] {
            let words = running(&pod(container, "Pending")).unwrap_err().to_string();
            assert!(words.contains(expected) && words.contains("describe pod p"), "{words}");
        }
        let mut going = pod(json!({ "running": {} }), "Running");
        going.metadata.deletion_timestamp = serde_json::from_value(json!("2026-11-23T12:00:00Z")).unwrap();
        assert!(running(&going).unwrap_err().to_string().contains("is terminating"));
    }
}
