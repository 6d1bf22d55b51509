//! The control planes of this test program. A test has one to itself, and leaves it empty to the next; it starts one only where none
//! is free.
//!
//! They listen at loopback addresses of their own, and end with this process: programs that are started with `setpriv --pdeathsig`
//! end with the thread that started them, which is one that never ends.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};

use crate::api::Api;
use crate::patience::PATIENCE;
use crate::plane::{ControlPlane, Site};

/// How many there are at once.
const MOST: usize = 4;
static TURNS: Semaphore = Semaphore::const_new(MOST);
static FREE: Mutex<Vec<ControlPlane>> = Mutex::new(Vec::new());
static STARTED: AtomicU8 = AtomicU8::new(0);

/// A control plane that is a test's for as long as it has this.
pub struct Turn {
    plane: Option<ControlPlane>,
    _turn: SemaphorePermit<'static>,
}

impl Deref for Turn {
    type Target = ControlPlane;

    fn deref(&self) -> &ControlPlane {
        self.plane.as_ref().expect("it is taken away at the end only")
    }
}

impl DerefMut for Turn {
    fn deref_mut(&mut self) -> &mut ControlPlane {
        self.plane.as_mut().expect("it is taken away at the end only")
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(mut plane) = self.plane.take() else { return };
        // The logs of a failed test are shown.
        if !std::thread::panicking() && plane.api_server.runs() {
            FREE.lock().unwrap_or_else(PoisonError::into_inner).push(plane);
        }
    }
}

/// Waits for a control plane.
pub async fn take() -> Turn {
    let turn = TURNS.acquire().await.unwrap();
    let free = FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let plane = match free {
        Some(plane) => plane,
        None => start().await,
    };
    sweep(&Api::read(plane.folder.path(), "test")).await;
    Turn { plane: Some(plane), _turn: turn }
}

async fn start() -> ControlPlane {
    let (started, plane) = oneshot::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let [.., high, low] = std::process::id().to_be_bytes();
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let address = IpAddr::V4(Ipv4Addr::new(127, 63 - number % 32, high, low.max(1)));
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
