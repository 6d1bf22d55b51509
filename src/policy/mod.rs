//! Authorisation in this guest: roles, the grants that give them, and one pure decision.
//!
//! ```text
//! settings ──▶ Rules ─┐
//! peer, caller ───────┼─ decide ──▶ allowed (by which grant) │ denied (why) │ would be denied (mode "audit")
//! verb, detail ───────┘
//! ```
//!
//! Each verb has one role: the commands of QGA in the table of [`crate::qga`], the methods of the guestlet API in
//! [`verbs`]. The protocols call [`Rules::decide`] and carry out its decision; [`audit`] records the call and its
//! result.
//!
//! To add a role: its line in [`role`], and the verbs that need it.

pub mod asker;
pub mod audit;
pub mod bounds;
pub mod command;
pub mod denials;
pub mod grant;
pub mod role;
pub mod rules;
pub mod show;
pub mod suggest;
#[cfg(test)]
mod tests;
pub mod verbs;

pub use asker::{Asker, HostHalf};
pub use audit::Audit;
pub use bounds::{Bounds, Limits};
pub use grant::{Caller, Grant, Host};
pub use role::{Role, Roles};
pub use rules::{Asked, Decision, Detail, Mode, Rules, Who};

pub use crate::text::target::Target;
