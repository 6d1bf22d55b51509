//! The real agent, `guestlet-host` and `guestctl`, and the keys by which they know each other.
//!
//! Everything is on unix sockets: nothing here opens an `AF_VSOCK` socket.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "a test runs programs and threads, and may panic"
)]

mod agent;
mod authority;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod host;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/launch.rs"]
mod launch;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../qga/namespace.rs"]
mod namespace;
mod wire;

mod certificates;
mod commands;
mod files;
mod first_contact;
mod grants;
mod life;
mod pins;
mod receipts;
mod reset;
mod unwatched;
mod verbs;
