//! The functions behind the command table, one file per subject.

pub mod network;
pub mod power;
pub mod protocol;
pub mod system;
