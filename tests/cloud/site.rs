//! The control plane of a test, which it leaves empty to the next.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::api::Api;
use crate::patience::PATIENCE;
use crate::turns::{Turn, Turns};

static TURNS: Turns = Turns::new(|_| Box::pin(std::future::ready(())));

/// Waits for a control plane in which there is nothing.
pub async fn take() -> Turn {
    let turn = TURNS.take().await;
    sweep(&Api::read(turn.plane().folder.path(), "test")).await;
    turn
}

/// What tests make, and the program under test.
const LEFT: [&str; 4] = [
    "/api/v1/nodes",
    "/api/v1/services",
    "/api/v1/events",
    "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases",
];

/// Takes away what a test has left, whatever it waits for.
async fn sweep(api: &Api) {
    let deadline = Instant::now() + PATIENCE;
    for path in LEFT {
        loop {
            let mut left = api.list(path).await;
            left.retain(|one| one["metadata"]["name"] != "kubernetes");
            if left.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "{path} cannot be swept");
            for one in left {
                let name = one["metadata"]["name"].as_str().unwrap();
                let path = match (path, one["metadata"]["namespace"].as_str()) {
                    ("/api/v1/services" | "/api/v1/events", Some(namespace)) => {
                        let plural = path.rsplit('/').next().unwrap();
                        format!("/api/v1/namespaces/{namespace}/{plural}/{name}")
                    }
                    _ => format!("{path}/{name}"),
                };
                if one["metadata"]["finalizers"].is_array() {
                    api.patch(&path, &json!({ "metadata": { "finalizers": null } })).await;
                }
                api.delete(&path).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
