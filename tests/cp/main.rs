//! Copies of files, from guestctl to the agent and back: the real `guestctl`, `guestlet-host` and agent on unix sockets.
//!
//! Nothing here opens an `AF_VSOCK` socket. The files are those of this machine, below a folder of the test, as root.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    missing_docs,
    reason = "a test runs programs and threads, and may panic"
)]

mod bounds;
mod completion;
mod files;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod host;
mod hostile;
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/launch.rs"]
mod launch;
mod refusals;
mod resume;
#[path = "../soak.rs"]
mod soak;
mod trees;
