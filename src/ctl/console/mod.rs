//! `guestctl console`: the serial console of a VM, at this terminal.
//!
//! ```text
//! stdin ──thread──▶ ┐                                                        ┌──▶ thread ──▶ stdout
//! signals ────────▶ ├─ Client ◀──stream──▶ guestlet-host ◀──▶ the hypervisor ┤
//! terminal, raw ──▶ ┘    │ lost: dial again, open                            └──▶ exit code
//! ```
//!
//! The ends at this side are those of `exec::local`, at which [`seat`] sits, and the time without a connection is that of `outage`. Nothing is sent twice: a
//! key that a guest may have seen already is not pressed again. The consoles of a cluster's VMs are in `cluster::console`.

mod client;
pub mod seat;

use super::Error;
use super::door::Door;
use client::Client;

/// Exit codes: the VM has ended, or its hypervisor has closed the console; somebody has taken it over; the connection was lost.
pub const ENDED: u8 = 6;
const TAKEN_OVER: u8 = 7;
/// The same.
pub const LOST: u8 = 255;

/// Until the console of the VM of this name is left, with the daemon behind this door.
///
/// # Errors
/// If it cannot be opened; when it is over for another reason than the wish of whoever sits at it.
pub async fn run(door: &Door, name: String, force: bool) -> Result<(), Error> {
    Client::new(door.clone(), name, force).run().await
}
