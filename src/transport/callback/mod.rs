//! What a guest asks of its host half, as messages of `guestlet.v1.Guest.Callback`: a call is a numbered message, and so is its
//! answer. Both ends are here, because they have to agree.
//!
//! ```text
//!  in the guest                              on the host
//!  tonic's client ──▶ Caller ──call──▶ serve ──▶ tonic's server
//!               ◀──────────── answer ◀──────────
//! ```
//!
//! A call is one request and one answer: their bytes go through as they are, with gRPC's status and without metadata. Calls
//! are under way beside each other, as many as the host half has said; its answer, to a cancellation as well, makes room for
//! the next one, so that neither end collects more than that.

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
