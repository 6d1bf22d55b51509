//! The real `guestlet-host` and `guestctl` against simulated guests and a simulated QEMU.
//!
//! Nothing here opens an `AF_VSOCK` socket, and nothing depends on how fast the machine is: tests wait for
//! what they want to see, up to a deadline that only a fault reaches.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::expect_used,
    missing_docs,
    reason = "a test runs programs and threads, and may panic"
)]

mod access;
mod answers;
mod api;
mod asking;
mod audit;
mod checks;
#[macro_use]
mod cloud_calls;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/clients.rs"]
mod clients;
mod frames;
mod guest;
mod hypervisor;
mod inside;
mod lab;
mod machine;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../qga/namespace.rs"]
mod namespace;
mod neighbour;
mod proxy;
mod qmp;
#[path = "../random.rs"]
mod random;
mod release;
#[path = "../soak.rs"]
mod soak;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/traps.rs"]
mod traps;

mod callback;
mod cloud;
mod csi;
mod disks;
mod events;
mod examples;
mod faults;
mod hostile;
mod labels;
mod manifests;
mod measured;
mod metrics;
mod people;
mod power;
mod service;
mod sessions;
mod settings;
mod topology;
