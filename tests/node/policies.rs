//! The admission policies: what the accounts of guestlet need is admitted, and everything else is not. Opt-in, because the
//! gate's API server has no such policies: [`Scratch`].

use http::Method;
use serde_json::{Value, json};

use crate::patience::until;
use crate::scratch::{Answer, MERGE, Scratch, Who, path};

mod machines;
mod nodes;
mod objects;

const SPACE: &str = "guestlet-policies";
/// What a refusal names.
const POLICY: &str = "ValidatingAdmissionPolicy 'guestlet-";

/// A scratch cluster with the policies in force, and objects to be changed. Nothing of what the tests write there stays.
struct Bench {
    scratch: Scratch,
}

impl Bench {
    async fn start(test: &str) -> Option<Self> {
        let scratch = Scratch::of_the_environment(test).await?;
        scratch.install().await;
        scratch.apply(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})).await;
        let bench = Self { scratch };
        // The API server hears of policies, and of roles, a little later.
        let claim = claim("theirs", &json!({}));
        until("the policies are in force", async || {
            let refused = bench.write(Who::Controller, Method::POST, &claims(), MERGE, &claim).await.err()?;
            refused.contains(POLICY).then_some(())
        })
        .await;
        Some(bench)
    }

    async fn write(&self, who: Who, method: Method, path: &str, kind: &str, body: &Value) -> Answer {
        let mark = if path.contains('?') { '&' } else { '?' };
        let path = format!("{path}{mark}dryRun=All&fieldManager=test");
        let kind = if method == Method::POST { "application/json" } else { kind };
        self.scratch.ask(who, method, &path, kind, body).await
    }

    async fn admits(&self, who: Who, change: &Change) {
        let Change { name, method, path, kind, body } = change;
        let answer = self.write(who, method.clone(), path, kind, body).await;
        assert!(answer.is_ok(), "{who:?}: {name}: {answer:?}");
    }

    /// A policy does not admit it, which an administrator could do.
    async fn refuses(&self, who: Who, change: &Change) {
        self.admits(Who::Administrator, change).await;
        let Change { name, method, path, kind, body } = change;
        let error = self.write(who, method.clone(), path, kind, body).await.expect_err(name);
        assert!(error.contains(POLICY) && !error.contains("resulted in error"), "{who:?}: {name}: {error}");
    }
}

/// A change that somebody would make.
struct Change {
    name: String,
    method: Method,
    path: String,
    kind: &'static str,
    body: Value,
}

impl Change {
    fn of(object: &Value, name: &str, kind: &'static str, body: Value) -> Self {
        Self { name: name.to_owned(), method: Method::PATCH, path: path(object), kind, body }
    }
}

fn claims() -> String {
    format!("/api/v1/namespaces/{SPACE}/persistentvolumeclaims")
}

fn claim(name: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"namespace": SPACE, "name": name, "labels": labels, "annotations": {"example.com/a": "1"}},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "volumeMode": "Block",
            "storageClassName": "guestlet-policies",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    })
}
