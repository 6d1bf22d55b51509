//! CSI of the real agent, seen from a kubelet: on its sockets, in a mount namespace of the test's own, with files behind
//! loop devices for disks. For root.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::print_stderr,
    clippy::unwrap_used,
    clippy::used_underscore_binding
)]

#[allow(dead_code, reason = "shared with the tests of QGA")]
#[path = "../qga/agent.rs"]
mod agent;
mod churn;
mod cloud;
#[allow(dead_code, reason = "shared with the tests of guestlet-ccm")]
#[path = "../cloud/host.rs"]
mod cloud_host;
mod controller;
#[allow(dead_code, reason = "shared with the tests of a cluster")]
mod disk;
mod faults;
mod folders;
mod foreign;
#[allow(dead_code, reason = "shared with the tests of QGA")]
#[path = "../qga/fuse.rs"]
mod fuse;
mod health_checks;
#[allow(dead_code, reason = "shared with the tests of the API")]
#[path = "../api/host.rs"]
mod host;
mod hung;
mod killed;
mod kubelet;
#[allow(dead_code, reason = "shared with the tests of a cluster")]
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../qga/namespace.rs"]
mod namespace;
#[path = "../random.rs"]
mod random;
mod registration;
mod scripted;
#[path = "../soak.rs"]
mod soak;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/traps.rs"]
mod traps;
mod volumes;
