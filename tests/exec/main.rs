//! Programs in a guest, from guestctl to the program and back: the real `guestctl`, `guestlet-host` and agent on unix sockets.
//!
//! Nothing here opens an `AF_VSOCK` socket. The programs are those of this machine, run as root.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    missing_docs,
    reason = "a test runs programs and threads, and may panic"
)]

mod attach;
mod bounds;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/clients.rs"]
mod clients;
mod completion;
mod examples;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod host;
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/launch.rs"]
mod launch;
mod login;

mod programs;
mod refusals;
mod requests;
mod resume;
mod screen;
#[path = "../soak.rs"]
mod soak;
mod streams;
mod terminal;
