//! The functions behind the commands, one file per subject, each with the rows of its commands.
//!
//! To add a command: its function and its row in its subject's file.

#![allow(clippy::missing_errors_doc, reason = "what a command's errors are is part of its protocol")]

pub mod network;
pub mod power;
pub mod protocol;
pub mod system;
pub mod time;
pub mod users;

use crate::qga::table::Command;

/// The rows of every subject; [`crate::qga::table`] makes one table of them.
pub const SUBJECTS: &[&[Command]] = &[
    network::COMMANDS,
    power::COMMANDS,
    protocol::COMMANDS,
    system::COMMANDS,
    time::COMMANDS,
    users::COMMANDS,
];
