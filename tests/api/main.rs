//! The guestlet API of the real agent, on unix sockets, seen from a host half.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, clippy::disallowed_methods)]

#[allow(dead_code, reason = "shared with the tests of QGA")]
#[path = "../qga/agent.rs"]
mod agent;
mod disk_rules;
mod disks;
mod events;
mod file_systems;
mod grants;
mod hold;
mod host;
#[path = "../qga/namespace.rs"]
#[allow(dead_code, reason = "each test program uses a part of it")]
mod namespace;
mod status;
