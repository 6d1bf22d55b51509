//! The guestlet API in the guest, one file per service that it serves or calls.
//!
//! [`guest`] and [`health_checks`] serve the host half, and so do [`freeze`], [`file_systems`], [`power`], [`machine`], [`network`],
//! [`accounts`] and [`qga`], whose verbs QGA clients have as well, [`exec`], [`files`] and [`forward`]; [`callback`] and [`health_reports`] call it,
//! [`local`] serves people in the guest. [`holder`] knows which host half holds the guest, [`guard`] who may call what.

pub mod accounts;
pub mod callback;
mod convert;
pub mod exec;
pub mod file_systems;
pub mod files;
pub mod forward;
pub mod freeze;
pub mod guard;
pub mod guest;
pub mod health_checks;
pub mod health_reports;
pub mod holder;
pub mod introduced;
pub mod journal;
pub mod keys;
pub mod local;
pub mod machine;
pub mod metrics;
pub mod network;
pub mod power;
pub mod qga;
mod receipts;
