//! The real `guestlet-host node` and `guestctl` with the real API server, which lets them do what the packaged role says and
//! no more. Guests are simulated, but for one; agents are reached by hybrid vsock. For root.
//!
//! Nothing here opens an `AF_VSOCK` socket.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::print_stderr,
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
#[path = "../host/checks.rs"]
mod checks;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../kubevirt/client.rs"]
mod client;
#[macro_use]
#[path = "../host/cloud_calls.rs"]
mod cloud_calls;
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
#[path = "../kubevirt/harvester.rs"]
mod harvester;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/launch.rs"]
mod launch;
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
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../kubevirt/snapshot_kinds.rs"]
mod snapshot_kinds;

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/csi/sidecar.rs"]
mod sidecar;
#[path = "../soak.rs"]
mod soak;
#[path = "../cluster/turns.rs"]
mod turns;

mod addresses;
mod adopted;
mod agent;
mod balancers;
mod bench;
mod ccm;
mod chart;
mod clusters;
mod controller;
mod guests;
mod identity;
mod kubectl;
mod kubectl_console;
mod kubectl_ends;
mod kubectl_exec;
mod kubectl_nodes;
mod kubelet;
mod labels;
mod life;
mod manifests;
mod many;
mod moves;
mod odd;
mod policies;
mod profile;
mod receipts;
mod rights;
mod rolling;
mod scratch;
mod strangers;
mod takeover;
mod vsock;
mod whole;
