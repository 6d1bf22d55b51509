//! A host cluster: the real etcd, kube-apiserver and kube-controller-manager with `KubeVirt`'s kinds, on which [`model`] plays
//! `KubeVirt` itself, the kubelets of the hosts and their storage. For root.
//!
//! [`lab`] is what a test begins with. The tests here show that the model does what is known of `KubeVirt`; each is named
//! after what it shows.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::print_stderr,
    clippy::unwrap_used,
    missing_docs,
    reason = "a test runs programs and tasks, and may panic"
)]

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../cluster/api.rs"]
mod api;
#[path = "../cluster/authority.rs"]
mod authority;
mod client;
#[allow(dead_code, reason = "shared with the tests in a guest's cluster")]
#[path = "../cluster/components.rs"]
mod components;
#[allow(dead_code, reason = "each test program uses a part of it")]
mod harvester;
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
mod model;
#[path = "../cluster/patience.rs"]
mod patience;
#[allow(dead_code, reason = "shared with the tests in a guest's cluster")]
#[path = "../cluster/plane.rs"]
mod plane;
mod pool;
#[path = "../random.rs"]
mod random;
#[path = "../soak.rs"]
mod soak;
#[path = "../cluster/turns.rs"]
mod turns;

mod adopted;
mod claims;
mod claims_churn;
mod clusters;
mod foreign;
mod holders;
mod hotplug;
mod kinds;
mod late;
mod leader;
mod lifecycle;
mod migration;
mod nodes;
mod requests;
mod role;
mod roster;
mod shares;
mod sharing;
#[allow(dead_code, reason = "each test program uses a part of it")]
mod snapshot_kinds;
mod snapshots;
mod storage;
mod stream;
mod stuck;
