//! The API server that `KUBECONFIG` names, for what the gate's own is too old for: a scratch one, in which nothing runs. It is
//! asked as its administrator, and as the accounts of guestlet.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use http::{Method, Request};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Error};
use serde_json::{Value, json};

use crate::api::collection;
use crate::patience::until;
use crate::pool::KINDS;

/// Who asks.
#[derive(Debug, Clone, Copy)]
pub enum Who {
    Administrator,
    Controller,
    /// A pod on this node.
    Node(&'static str),
    /// The account of the nodes with a token that is no pod's.
    Nowhere,
}

/// What an API server answers: the object, or why not.
pub type Answer = Result<Value, String>;

/// Patches as their content types.
pub const JSON_PATCH: &str = "application/json-patch+json";
pub const MERGE: &str = "application/merge-patch+json";
pub const APPLY: &str = "application/apply-patch+yaml";

#[derive(Clone)]
pub struct Scratch(Client);

impl Scratch {
    /// The one in `KUBECONFIG`; none, with word of it, unless `GUESTLET_POLICIES` asks for it.
    pub async fn of_the_environment(what: &str) -> Option<Self> {
        let is_wanted = std::env::var_os("GUESTLET_POLICIES").is_some_and(|value| value == "1");
        if !is_wanted {
            // What macros write is shown of failed tests only.
            let words = "needs Kubernetes 1.30 or later, of which the gate has none: set GUESTLET_POLICIES=1, and KUBECONFIG to \
                that of a scratch API server";
            let mut output = std::io::stderr();
            writeln!(output, "{what}: SKIPPED, {words}").unwrap();
            return None;
        }
        let file = std::env::var("KUBECONFIG").expect("KUBECONFIG names a scratch API server");
        let read = Kubeconfig::read_from(file).unwrap();
        let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await.unwrap();
        Some(Self(Client::try_from(config).unwrap()))
    }

    /// One request.
    pub async fn ask(&self, who: Who, method: Method, path: &str, kind: &str, body: &Value) -> Answer {
        let mut request = Request::builder().method(method).uri(path).header("content-type", kind);
        let user = |name: &str| format!("system:serviceaccount:guestlet-system:{name}");
        match who {
            Who::Administrator => {}
            Who::Controller => request = request.header("impersonate-user", user("guestlet-controller")),
            Who::Nowhere => request = request.header("impersonate-user", user("guestlet-node")),
            Who::Node(node) => {
                let key = "impersonate-extra-authentication.kubernetes.io%2fnode-name";
                request = request.header("impersonate-user", user("guestlet-node")).header(key, node);
            }
        }
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        match self.0.request_text(request.body(body).unwrap()).await {
            Ok(answer) => Ok(serde_json::from_str(&answer).unwrap()),
            Err(Error::Api(status)) => Err(status.message.clone()),
            Err(error) => panic!("{path}: {error}"),
        }
    }

    /// Makes or changes an object; returns it.
    pub async fn apply(&self, object: &Value) -> Value {
        let path = format!("{}?fieldManager=test&force=true", path(object));
        let answer = self.ask(Who::Administrator, Method::PATCH, &path, APPLY, object).await;
        answer.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Installs KubeVirt's kinds, and of guestlet what says who may do what.
    pub async fn install(&self) {
        for kind in KINDS {
            self.kind(&serde_saphyr::from_str(kind).unwrap()).await;
        }
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/kubernetes/host");
        let files = ["base/namespace.yaml", "base/crd.yaml", "base/node.yaml", "base/controller-role.yaml"];
        let policies = ["policies/controller.yaml", "policies/node.yaml", "guests-here/guests-here.yaml"]
            .map(|file| format!("components/{file}"));
        let shares =
            ["shares", "balancers"].map(|of| format!("overlays/harvester/controller-{of}-role.yaml"));
        self.apply(
            &json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "harvester-system"}}),
        )
        .await;
        for file in files.map(str::to_owned).iter().chain(&policies).chain(&shares) {
            let text = std::fs::read_to_string(folder.join(file)).unwrap();
            for object in serde_saphyr::from_multiple::<Value>(&text).unwrap() {
                match object["kind"].as_str().unwrap() {
                    "CustomResourceDefinition" => self.kind(&object).await,
                    // There is nobody who would run them.
                    "ConfigMap" | "DaemonSet" => {}
                    _ => drop(self.apply(&object).await),
                }
            }
        }
    }

    pub async fn kind(&self, kind: &Value) {
        self.apply(kind).await;
        until("the kind is served", async || {
            let kind =
                self.ask(Who::Administrator, Method::GET, &path(kind), MERGE, &Value::Null).await.ok()?;
            let conditions = kind["status"]["conditions"].as_array()?;
            conditions.iter().any(|it| it["type"] == "Established" && it["status"] == "True").then_some(())
        })
        .await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Where an object is.
pub fn path(object: &Value) -> String {
    format!("{}/{}", collection(object), object["metadata"]["name"].as_str().unwrap_or_default())
}
