//! Metrics of guests, from files of /proc to Prometheus: the real `guestctl`, `guestlet-host` and agents on unix sockets, and Debian's
//! Prometheus. The guests are this machine, whose files the tests read beside the agents.
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

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/bus_daemon.rs"]
mod bus_daemon;
mod crowd;
mod dashboards;
mod exporters;
mod exposition;
mod guestctl;
mod hanging;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod host;
mod lab;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/launch.rs"]
mod launch;
mod many;
mod prometheus;
mod samples;
mod scrape;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../exec/screen.rs"]
mod screen;
#[path = "../soak.rs"]
mod soak;
mod systemd;
mod top;
