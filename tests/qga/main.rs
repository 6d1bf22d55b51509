//! The real agent on a unix socket, seen through it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, clippy::disallowed_methods)]

mod agent;
mod bad_input;
mod beside_qemu_ga;
mod bus;
#[path = "../fixtures/bus_daemon.rs"]
mod bus_daemon;
mod channels;
mod commands;
mod credentials;
mod disks;
mod exec;
mod file_systems;
mod files;
mod freeze;
#[allow(dead_code, reason = "shared with the tests of CSI")]
mod fuse;
mod grants;
mod hardware;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../host/lab.rs"]
mod host;
mod hung_disk;
mod laid_out;
#[path = "../fixtures/lay_out.rs"]
mod lay_out;
mod limits;
mod machine_beside_qemu_ga;
mod namespace;
mod network;
mod options;
mod power;
mod program;
mod qapi;
mod sessions;
mod time;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../fixtures/traps.rs"]
mod traps;
mod users;
