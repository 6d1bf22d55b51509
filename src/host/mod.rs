//! The controller half: which VMs there are, and the conversation with the agent in each of them.
//!
//! ```text
//!  backends ──Change──▶ fleet ◀──Request── api ◀── guestctl
//!  (qemu)               │   ▲
//!                 Machine   Report
//!                       ▼   │
//!                      session ──dials──▶ agent in the guest      (one for each VM)
//! ```
//!
//! [`fleet`] is one task and owns what is known of all VMs; everybody else sends it messages. Guests are
//! taken for hostile: what they say is bounded in size and rate, and cleaned by [`text`], before it goes on.

pub mod api;
pub mod backends;
pub mod backoff;
pub mod fleet;
pub mod rate;
pub mod session;
pub mod talk;
pub mod text;
