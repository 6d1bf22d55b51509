//! Serial consoles, from guestctl to a guest and back: the real `guestctl`, `guestlet-host` and QEMU, in which a small program
//! of these tests runs as the guest ([`guest`]). There is no agent.
//!
//! Nothing here opens an `AF_VSOCK` socket.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stderr,
    missing_docs,
    reason = "a test runs programs and threads, and may panic"
)]

mod access;
mod bytes;
mod guest;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod host;
mod lab;
mod places;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../exec/screen.rs"]
mod screen;
mod turns;
