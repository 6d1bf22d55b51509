//! The real agent in a cluster of real components: etcd, kube-apiserver, kube-controller-manager, kube-scheduler and
//! kubelet, all in namespaces of the test's own. The container runtime, the sidecars and the host half are the tests'. For
//! root.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::used_underscore_binding
)]

#[allow(dead_code, reason = "shared with the tests of QGA")]
#[path = "../qga/agent.rs"]
mod agent;
#[allow(dead_code, reason = "each test program uses a part of it")]
mod api;
mod attach;
mod authority;
mod cluster;
#[allow(dead_code, reason = "each test program uses a part of it")]
mod components;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../csi/disk.rs"]
mod disk;
mod driver;
mod failover;
mod habits;
mod half;
#[allow(dead_code, reason = "shared with the tests of the API")]
#[path = "../api/host.rs"]
mod host;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../csi/kubelet.rs"]
mod kubelet;
#[allow(dead_code, reason = "shared with the tests of CSI")]
#[path = "../csi/lab.rs"]
mod lab;
mod labels;
mod many;
mod messages;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../qga/namespace.rs"]
mod namespace;
mod node;
mod patience;
mod place;
#[allow(dead_code, reason = "each test program uses a part of it")]
mod plane;
#[path = "../random.rs"]
mod random;
mod runtime;
mod sidecars;
#[path = "../soak.rs"]
mod soak;
mod stand_in;
mod volumes;
