//! What is done to disks, on real ones: files behind loop devices, in mount namespaces. For root.

#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss
)]

mod claim;
mod format;
mod grow;
mod held;
mod lab;
mod lvm;
mod mount;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../qga/namespace.rs"]
mod namespace;
mod rules;
mod swapped;
mod work;
