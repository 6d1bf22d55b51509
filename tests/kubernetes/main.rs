//! The whole way of a volume, with nothing in it that is simulated but `KubeVirt` itself: from a sidecar in a real VM to its agent,
//! the node role, the controller, a real API server, the model of `KubeVirt`, QEMU, the kernel of a guest, and a mount.
//!
//! ```text
//!  guest (QEMU)                      host cluster
//! ┌────────────────────────┐        ┌───────────────────────────────────────────────┐
//! │ sidecar ──▶ agent ─────┼─ vsock ┼─▶ guestlet-host node ──▶ guestlet-host controller │
//! └────────────────────────┘        │                              │ claims, VMs    │
//! ┌────────────────────────┐        │                              ▼                │
//! │ mount ◀── agent ◀──────┼─ vsock ┼── guestlet-host node    kube-apiserver, etcd  │
//! │   ▲                    │        │                              │                │
//! │ disk ◀─────────────────┼── QMP ─┼── model of KubeVirt ◀────────┘                │
//! └────────────────────────┘        └───────────────────────────────────────────────┘
//! ```
//!
//! Without an argument it shows that ([`demo`], `make demo-kubernetes`; with `KEEP=1` it stays up); with `churn` it kills all parts
//! at random while volumes come and go ([`churn`]). For root.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::unwrap_used,
    missing_docs,
    reason = "a test runs programs and threads, and may panic"
)]

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/answers.rs"]
mod answers;
#[path = "../cluster/api.rs"]
mod api;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/asking.rs"]
mod asking;
#[path = "../cluster/authority.rs"]
mod authority;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../node/bench.rs"]
mod bench;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/checks.rs"]
mod checks;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../kubevirt/client.rs"]
mod client;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../kubevirt/lab.rs"]
mod cluster;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../cluster/components.rs"]
mod components;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/frames.rs"]
mod frames;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/guest.rs"]
mod guest;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../harness/mod.rs"]
mod harness;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../kubevirt/model/mod.rs"]
mod model;
#[path = "../cluster/patience.rs"]
mod patience;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../cluster/plane.rs"]
mod plane;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../kubevirt/pool.rs"]
mod pool;
#[path = "../random.rs"]
mod random;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/csi/sidecar.rs"]
mod sidecar;
#[path = "../soak.rs"]
mod soak;
#[path = "../cluster/turns.rs"]
mod turns;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../node/whole.rs"]
mod whole;

mod churn;
mod demo;
mod machines;
mod stage;

use std::process::ExitCode;
use std::time::Duration;

use harness::process::on_signal;
use tokio::sync::oneshot;

fn main() -> ExitCode {
    let (interrupt, interrupted) = oneshot::channel();
    on_signal(Duration::from_secs(10), || {
        let _ = interrupt.send(());
    });
    let what = std::env::args().nth(1);
    cluster::wait(async {
        tokio::select! {
            code = run(what.as_deref()) => code,
            _ = interrupted => {
                println!("\nInterrupted; everything is stopped and removed.");
                ExitCode::from(130)
            }
        }
    })
}

async fn run(what: Option<&str>) -> ExitCode {
    match what {
        None | Some("demo") => demo::run().await,
        Some("churn") => churn::run().await,
        Some(other) => {
            eprintln!("there is no {other:?} to run: demo and churn are what there is");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
