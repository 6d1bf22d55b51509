//! Connections with what listens in a guest: the real `guestctl`, `guestlet-host` and agent on unix sockets.
//!
//! Nothing here opens an `AF_VSOCK` socket. What is reached are servers of these tests, on 127.0.0.1 and on unix sockets.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    missing_docs,
    reason = "a test runs programs and threads, and may panic"
)]

mod ends;
mod forwarding;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod host;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../exec/lab.rs"]
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/launch.rs"]
mod launch;
mod many;
mod protocol;
mod refusals;
mod servers;
mod ssh;
mod stdio;
mod streams;
