//! Where a guest runs: the real agent, told by a host half of the tests, writes it for people, for nodes that are to join,
//! and on its Node, whose API server is one of the tests.

#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::needless_pass_by_value,
    clippy::print_stderr,
    clippy::unwrap_used
)]

#[allow(dead_code, reason = "shared with the tests of QGA")]
#[path = "../qga/agent.rs"]
mod agent;
#[allow(dead_code, reason = "shared with tests in VMs")]
mod api_server;
#[allow(dead_code, reason = "shared with the tests of the API")]
#[path = "../api/host.rs"]
mod host;
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../qga/namespace.rs"]
mod namespace;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/traps.rs"]
mod traps;

mod drop_ins;
mod node;
mod told;
