//! The functions behind the command table, one file per subject.

#![allow(clippy::missing_errors_doc, reason = "what a command's errors are is part of its protocol")]

pub mod network;
pub mod power;
pub mod protocol;
pub mod system;
