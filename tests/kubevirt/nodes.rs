//! Nodes that come to the controller: which of them a token speaks for, and the CA that says so from then on.

use std::sync::Arc;

use guestlet::host::backends::kubevirt::controller::certificates::{Ca, CaError, SECRET, node_of};
use guestlet::host::backends::kubevirt::controller::join::{ACCOUNT, AUDIENCE, JoinError, node_of_token};
use guestlet::host::backends::kubevirt::node::identity::{NodeKey, client_config};
use http::Method;
use serde_json::{Value, json};

use crate::api::Api;
use crate::client::{JSON, call};
use crate::lab::wait;
use crate::model::objects::{text, uid};
use crate::patience::until;
use crate::plane::ControlPlane;
use crate::pool;
use crate::role::{self, OWN};

const ACCOUNTS: &str = "/api/v1/namespaces/guestlet-system/serviceaccounts";
const PODS: &str = "/api/v1/namespaces/guestlet-system/pods";
const SECRETS: &str = "/api/v1/namespaces/guestlet-system/secrets";

/// Makes a pod of an account on a node, as a DaemonSet would.
async fn pod(api: &Api, name: &str, account: &str, node: Option<&str>) -> Value {
    api.ensure(ACCOUNTS, &json!({ "metadata": { "name": account } })).await;
    let pod = json!({
        "metadata": { "name": name },
        "spec": {
            "serviceAccountName": account,
            "nodeName": node,
            "containers": [{ "name": "guestlet-host", "image": "registry.test/guestlet-host" }],
        },
    });
    api.create(PODS, &pod).await
}

async fn end(api: &Api, name: &str) {
    let now = json!({ "gracePeriodSeconds": 0 });
    call(api, Method::DELETE, &format!("{PODS}/{name}"), JSON, Some(&now)).await.unwrap();
    until("the pod is gone", async || api.get(&format!("{PODS}/{name}")).await.is_none().then_some(())).await;
}

/// A token as kubelet gets it for a pod.
async fn token(api: &Api, account: &str, audience: &str, pod: Option<&Value>) -> String {
    let bound = pod.map(|pod| {
        let name = &pod["metadata"]["name"];
        json!({ "apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid(pod) })
    });
    let wish =
        json!({ "spec": { "audiences": [audience], "expirationSeconds": 3600, "boundObjectRef": bound } });
    let path = format!("{ACCOUNTS}/{account}/token");
    text(&api.create(&path, &wish).await["status"]["token"]).to_owned()
}

/// What the controller's roles are for that has to do with who a node is; what did not work.
pub async fn is_certified(plane: &ControlPlane, api: &Api) -> Result<(), String> {
    let client = role::client(plane).await;
    api.delete(&format!("{SECRETS}/{SECRET}")).await;
    let made = Ca::load_or_make(&client, OWN).await.map_err(|error| error.to_string())?;
    let read = Ca::load_or_make(&client, OWN).await.map_err(|error| error.to_string())?;
    assert_eq!(made.pem(), read.pem());
    if api.get(&format!("{PODS}/its")).await.is_none() {
        pod(api, "its", ACCOUNT, Some("host-1")).await;
    }
    let its = api.get(&format!("{PODS}/its")).await.unwrap();
    let token = token(api, ACCOUNT, AUDIENCE, Some(&its)).await;
    let node = node_of_token(&client, OWN, &token).await.map_err(|error| error.to_string())?;
    assert_eq!(node, "host-1");
    Ok(())
}

#[test]
fn a_token_speaks_for_the_node_of_its_pod() {
    wait(async {
        let mut turn = pool::take().await;
        let api = Api::read(turn.plane().folder.path(), "test");
        role::install(&api).await;
        let client = role::client(turn.plane()).await;
        let asked = async |token: &str| node_of_token(&client, OWN, token).await;
        until("the controller may ask", async || match asked("garbage").await {
            Err(JoinError::Unavailable(_)) => None,
            other => Some(other),
        })
        .await
        .unwrap_err();
        let refused = async |token: &str, words: &str| match asked(token).await {
            Err(JoinError::Refused(why)) => assert!(why.contains(words), "{why}"),
            other => panic!("{words}: {other:?}"),
        };

        let first = pod(&api, "node-1", ACCOUNT, Some("host-1")).await;
        let second = pod(&api, "node-2", ACCOUNT, Some("host-2")).await;
        let good = token(&api, ACCOUNT, AUDIENCE, Some(&first)).await;
        assert_eq!(asked(&good).await.as_deref(), Ok("host-1"));
        let of_second = token(&api, ACCOUNT, AUDIENCE, Some(&second)).await;
        assert_eq!(asked(&of_second).await.as_deref(), Ok("host-2"));

        // Of another audience; what is in every pod for the API server is of that kind.
        let issuer = "https://cluster.test";
        refused(&token(&api, ACCOUNT, issuer, Some(&first)).await, "").await;
        refused(&token(&api, ACCOUNT, "vault", Some(&first)).await, "").await;
        // Of another account, or of no pod.
        let other = pod(&api, "other", "guestlet-controller", Some("host-1")).await;
        let other = token(&api, "guestlet-controller", AUDIENCE, Some(&other)).await;
        refused(&other, "it is a token of system:serviceaccount:guestlet-system:guestlet-controller").await;
        refused(&token(&api, ACCOUNT, AUDIENCE, None).await, "bound to no pod").await;
        // Of a pod that is on no node yet.
        let waits = pod(&api, "waits", ACCOUNT, None).await;
        refused(&token(&api, ACCOUNT, AUDIENCE, Some(&waits)).await, "on no node yet").await;
        // Of nobody.
        let (body, _) = good.rsplit_once('.').unwrap();
        let (_, signature) = of_second.rsplit_once('.').unwrap();
        let long = "a".repeat(16 * 1024 + 1);
        for garbage in ["", "a", "a.b.c", "\0\n\u{1f4a9}", body, &format!("{body}.{signature}"), &long] {
            refused(garbage, "").await;
        }
        // Of a pod that is gone, also when there is another of its name on another node.
        end(&api, "node-1").await;
        refused(&good, "").await;
        pod(&api, "node-1", ACCOUNT, Some("host-2")).await;
        refused(&good, "").await;

        turn.kill_api_server();
        let outcome = asked(&of_second).await;
        assert!(matches!(outcome, Err(JoinError::Unavailable(_))), "{outcome:?}");
    });
}

#[test]
fn the_ca_stays_the_same_until_its_secret_is_deleted() {
    wait(async {
        let turn = pool::take().await;
        let api = Api::read(turn.plane().folder.path(), "test");
        role::install(&api).await;
        let client = role::client(turn.plane()).await;
        let path = format!("{SECRETS}/{SECRET}");
        // Several leaders at once; each of them may be told first that it may not.
        let load = async || until("there is a CA", async || Ca::load_or_make(&client, OWN).await.ok()).await;
        let (a, b, c) = tokio::join!(load(), load(), load());
        assert_eq!((a.pem(), b.pem()), (b.pem(), c.pem()));
        let secret = api.get(&path).await.unwrap();
        assert_eq!(secret["type"], "kubernetes.io/tls");

        // What one of them has signed the others know.
        let key = NodeKey::generate().unwrap();
        let certificate = a.sign(&key.request().unwrap(), "host-1").unwrap();
        assert_eq!(node_of(&certificate).as_deref(), Some("host-1"));
        client_config(b.pem(), Some((&key, &certificate))).unwrap();
        Arc::new(c).server_config().unwrap();

        // A damaged one is left as it is.
        let damaged = json!({ "data": { "tls.key": "AAAA" } });
        api.patch(&path, &damaged).await.unwrap();
        let before = api.get(&path).await.unwrap();
        let error = Ca::load_or_make(&client, OWN).await.unwrap_err();
        assert!(matches!(error, CaError::Damaged(..)), "{error}");
        let said = error.to_string();
        assert!(
            said.contains("guestlet-system/guestlet-controller-ca") && said.contains("delete it"),
            "{said}"
        );
        assert_eq!(api.get(&path).await.unwrap(), before);
        api.delete(&path).await;
        assert_ne!(load().await.pem(), a.pem());
    });
}
