//! The functions behind the commands, one file per subject, each with the rows of its commands.
//!
//! To add a command: its function and its row in its subject's file.

#![allow(clippy::missing_errors_doc, reason = "what a command's errors are is part of its protocol")]

pub mod credentials;
pub mod disk;
pub mod exec;
pub mod file;
pub mod file_system;
pub mod freeze;
pub mod load;
pub mod memory;
pub mod network;
pub mod power;
pub mod processors;
pub mod protocol;
pub mod routes;
pub mod system;
pub mod time;
pub mod users;

use crate::qga::table::Command;

/// The rows of every subject; [`crate::qga::table`] makes one table of them.
pub const SUBJECTS: &[&[Command]] = &[
    credentials::COMMANDS,
    disk::COMMANDS,
    exec::COMMANDS,
    file::COMMANDS,
    file_system::COMMANDS,
    freeze::COMMANDS,
    load::COMMANDS,
    memory::COMMANDS,
    network::COMMANDS,
    power::COMMANDS,
    processors::COMMANDS,
    protocol::COMMANDS,
    routes::COMMANDS,
    system::COMMANDS,
    time::COMMANDS,
    users::COMMANDS,
];
