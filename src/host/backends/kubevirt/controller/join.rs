//! Determines which node a token belongs to.
//!
//! kubelet gives each pod of the nodes' DaemonSet a token that is bound to the pod and valid for the
//! controller's audience only. The API server confirms that it is genuine, and names the pod; the pod's object
//! names the node. A token stolen from one node is therefore valid for that node only, and only while the pod
//! exists.

use std::collections::BTreeMap;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};

use super::super::api::{code, words};
use super::private;

/// Audience of the nodes' tokens.
pub const AUDIENCE: &str = "guestlet-controller";
/// Service account of the nodes.
pub const ACCOUNT: &str = "guestlet-node";
/// Maximum length of a token in bytes; real ones have some 1,500.
const LONGEST: usize = 16 * 1024;
/// Keys under which a `TokenReview` returns the pod of a token.
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";
/// Key for the node's name, available from Kubernetes 1.30.
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// Reason why the node of a token is unknown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The token is invalid.
    #[error("the token of the node is refused: {0}")]
    Refused(String),
    /// The API server cannot confirm the token.
    #[error("the token of the node cannot be checked: {0}")]
    Unavailable(String),
}

/// Pod that a token is bound to.
#[derive(Debug, PartialEq, Eq)]
struct Bound {
    pod: String,
    uid: String,
    node: Option<String>,
}

/// Returns the node of the pod that this token is bound to.
///
/// # Errors
/// If the token does not belong to a pod of the nodes' DaemonSet or is not meant for the controller, or the API
/// server cannot confirm it.
pub async fn node_of_token(client: &Client, namespace: &str, token: &str) -> Result<String, JoinError> {
    if token.is_empty() || token.len() > LONGEST {
        let words = format!("a token has 1 to {LONGEST} bytes, and it has {}", token.len());
        return Err(JoinError::Refused(words));
    }
    let spec = TokenReviewSpec { audiences: Some(vec![AUDIENCE.to_owned()]), token: token.to_owned() };
    let review = TokenReview { spec, ..TokenReview::default() };
    let reviewed = private::create(client, None, &review).await;
    let reviewed = reviewed.map_err(|failure| JoinError::Unavailable(failure.words))?;
    let bound = bound(&reviewed, namespace).map_err(JoinError::Refused)?;
    let pod = match Api::<Pod>::namespaced(client.clone(), namespace).get(&bound.pod).await {
        Ok(pod) => Some(pod),
        Err(error) if code(&error) == Some(404) => None,
        Err(error) => return Err(JoinError::Unavailable(words(&error))),
    };
    node(&bound, pod.as_ref()).map_err(JoinError::Refused)
}

/// Returns the pod of a token, if the token belongs to a node and is meant for the controller; otherwise the
/// reason.
fn bound(review: &TokenReview, namespace: &str) -> Result<Bound, String> {
    let status = review.status.clone().unwrap_or_default();
    if status.authenticated != Some(true) {
        return Err(status.error.unwrap_or_else(|| "the API server does not know it".to_owned()));
    }
    // An API server that does not support audiences returns none.
    if !status.audiences.iter().flatten().any(|audience| audience == AUDIENCE) {
        return Err(format!("it is not meant for {AUDIENCE}"));
    }
    let user = status.user.unwrap_or_default();
    let (name, account) =
        (user.username.unwrap_or_default(), format!("system:serviceaccount:{namespace}:{ACCOUNT}"));
    if name != account {
        return Err(format!("it is a token of {name}, not of {account}"));
    }
    let extra = user.extra.unwrap_or_default();
    match (only(&extra, POD_NAME), only(&extra, POD_UID)) {
        (Some(pod), Some(uid)) => Ok(Bound { pod, uid, node: only(&extra, NODE_NAME) }),
        _ => Err("it is bound to no pod".to_owned()),
    }
}

fn only(extra: &BTreeMap<String, Vec<String>>, key: &str) -> Option<String> {
    match extra.get(key).map(Vec::as_slice) {
        Some([value]) if !value.is_empty() => Some(value.clone()),
        _ => None,
    }
}

/// Returns the node of a token's pod, or the reason why the token is refused.
fn node(bound: &Bound, pod: Option<&Pod>) -> Result<String, String> {
    let Bound { pod: name, uid, node: told } = bound;
    let Some(pod) = pod.filter(|pod| pod.metadata.uid.as_ref() == Some(uid)) else {
        return Err(format!("its pod {name} no longer exists"));
    };
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
    if node.is_empty() {
        return Err(format!("its pod {name} is on no node yet"));
    }
    match told {
        Some(told) if *told != node => {
            Err(format!("it was made for the node {told}, and its pod {name} is on {node}"))
        }
        _ => Ok(node),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// Builds the API server's review of a valid token.
    fn good() -> Value {
        json!({
            "authenticated": true,
            "audiences": [AUDIENCE],
            "user": {
                "username": "system:serviceaccount:guestlet-system:guestlet-node",
                "extra": { POD_NAME: ["guestlet-node-x7k2p"], POD_UID: ["u-1"] },
            },
        })
    }

    fn review(status: &Value) -> Result<Bound, String> {
        bound(&serde_json::from_value(json!({ "spec": {}, "status": status })).unwrap(), "guestlet-system")
    }

    #[test]
    fn only_a_token_of_a_nodes_pod_for_the_controller_is_good() {
        let pod = "guestlet-node-x7k2p".to_owned();
        assert_eq!(review(&good()).unwrap(), Bound { pod, uid: "u-1".to_owned(), node: None });
        for (path, value, words) in [
            ("/authenticated", json!(false), "does not know it"),
            ("/authenticated", json!(null), "does not know it"),
            ("/audiences", json!([]), "not meant for"),
            ("/audiences", json!(null), "not meant for"),
            ("/audiences", json!(["https://cluster.test"]), "not meant for"),
            ("/user/username", json!("system:serviceaccount:default:guestlet-node"), "it is a token of"),
            ("/user/username", json!("system:serviceaccount:guestlet-system:default"), "it is a token of"),
            ("/user", json!(null), "it is a token of"),
            ("/user/extra", json!(null), "bound to no pod"),
            ("/user/extra", json!({ POD_NAME: ["a"] }), "bound to no pod"),
            ("/user/extra", json!({ POD_NAME: ["a", "b"], POD_UID: ["u-1"] }), "bound to no pod"),
            ("/user/extra", json!({ POD_NAME: [""], POD_UID: ["u-1"] }), "bound to no pod"),
        ] {
            let mut status = good();
            *status.pointer_mut(path).unwrap() = value.clone();
            let why = review(&status).unwrap_err();
            assert!(why.contains(words), "{path} = {value}: {why}");
        }
        assert!(review(&json!(null)).is_err());
        let why = review(&json!({ "authenticated": false, "error": "token has expired" })).unwrap_err();
        assert_eq!(why, "token has expired");
    }

    #[test]
    fn the_node_is_that_of_the_very_pod() {
        let of = |told: Option<&str>| Bound {
            pod: "pod".to_owned(),
            uid: "u-1".to_owned(),
            node: told.map(str::to_owned),
        };
        let pod = |uid: &str, node: Value| -> Pod {
            let pod = json!({ "metadata": { "uid": uid }, "spec": { "containers": [], "nodeName": node } });
            serde_json::from_value(pod).unwrap()
        };
        let here = pod("u-1", json!("host-1"));
        assert_eq!(node(&of(None), Some(&here)), Ok("host-1".to_owned()));
        assert_eq!(node(&of(Some("host-1")), Some(&here)), Ok("host-1".to_owned()));
        for (told, pod, words) in [
            (None, None, "no longer exists"),
            (None, Some(pod("u-2", json!("host-1"))), "no longer exists"),
            (None, Some(pod("u-1", json!(null))), "on no node yet"),
            (None, Some(pod("u-1", json!(""))), "on no node yet"),
            (Some("host-2"), Some(here), "it was made for the node host-2"),
        ] {
            let why = node(&of(told), pod.as_ref()).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
    }
}
