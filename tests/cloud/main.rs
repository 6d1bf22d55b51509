//! The real `guestlet-ccm` with its packaged roles, between the real etcd and kube-apiserver of a guest's cluster and a model of what
//! its node's agent and the host half behind it answer. For root.

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
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../cluster/authority.rs"]
mod authority;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../cluster/components.rs"]
mod components;
mod host;
mod lab;
#[path = "../cluster/patience.rs"]
mod patience;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../cluster/plane.rs"]
mod plane;
mod site;
#[path = "../cluster/turns.rs"]
mod turns;

mod health;
mod leaders;
mod many;
mod nodes;
mod odd;
mod role;
mod services;
