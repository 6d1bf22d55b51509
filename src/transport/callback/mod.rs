//! Calls of a guest to its host half, as messages of `guestlet.v1.Guest.Callback`: a call is a numbered
//! message, and so is its answer. Both ends are in this module, because they have to agree.
//!
//! ```text
//!  in the guest                              on the host
//!  tonic's client ──▶ Caller ──call──▶ serve ──▶ tonic's server
//!               ◀──────────── answer ◀──────────
//! ```
//!
//! A call is one request and one answer. Their bytes are passed unchanged, with gRPC's status and without
//! metadata. Calls run concurrently, up to the limit that the host half has set. Each answer, also that to a
//! cancellation, makes room for the next call, so neither end ever holds more calls than the limit.

#[cfg(any(feature = "agent", feature = "kubevirt"))]
mod caller;
#[cfg(feature = "host")]
mod serve;
#[cfg(all(test, feature = "agent", feature = "host"))]
mod tests;
mod unary;

#[cfg(any(feature = "agent", feature = "kubevirt"))]
pub use caller::{Broken, Caller, Calls, Opened, begin, open};
#[cfg(feature = "host")]
pub use serve::{Breach, Ended, Messages, serve};
pub use unary::{request, request_message, response, response_message};
