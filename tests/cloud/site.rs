//! The control plane of this test program, which a test has to itself and leaves empty to the next.
//!
//! It listens at a loopback address of its own, and ends with this process: programs that are started with `setpriv --pdeathsig`
//! end with the thread that started them, which is one that never ends.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::{Mutex, MutexGuard, OnceCell, oneshot};

use crate::api::Api;
use crate::patience::PATIENCE;
use crate::plane::{ControlPlane, Site};

static PLANE: OnceCell<Mutex<ControlPlane>> = OnceCell::const_new();

/// A turn with the control plane.
pub async fn take() -> MutexGuard<'static, ControlPlane> {
    let plane = PLANE.get_or_init(|| async { Mutex::new(start().await) }).await.lock().await;
    sweep(&Api::read(plane.folder.path(), "test")).await;
    plane
}

async fn start() -> ControlPlane {
    let (started, plane) = oneshot::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = IpAddr::V4(Ipv4Addr::new(127, 63, high, low.max(1)));
        let site = Site { address, by: &["setpriv", "--pdeathsig", "KILL", "--"] };
        let plane = runtime.block_on(ControlPlane::servers(site));
        remove_in_the_end(plane.folder.path());
        let _ = started.send(plane);
        // Whoever it started ends with it.
        let (_kept, never) = mpsc::channel::<()>();
        let _ = never.recv();
    });
    plane.await.expect("the control plane starts")
}

/// Has a folder removed when this process has ended, however it does.
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
