//! `guestctl console`: the serial console of a VM, at this terminal.
//!
//! ```text
//! stdin ──thread──▶ ┐                                                        ┌──▶ thread ──▶ stdout
//! signals ────────▶ ├─ Client ◀──stream──▶ guestlet-host ◀──▶ the hypervisor ┤
//! terminal, raw ──▶ ┘    │ lost: dial again, open                            └──▶ exit code
//! ```
//!
//! The local ends are those of `exec::local`, used by [`seat`], and the time without a connection is that of
//! `outage`. Nothing is sent twice: a key that the guest may have received is not sent again. The consoles of
//! a cluster's VMs are in `cluster::console`.

mod client;
pub mod seat;

use super::Error;
use super::door::Door;
use client::Client;

/// Exit codes: the VM has ended, or its hypervisor has closed the console; another client has taken it over;
/// the connection was lost.
pub const ENDED: u8 = 6;
const TAKEN_OVER: u8 = 7;
/// Exit code after the connection was lost.
pub const LOST: u8 = 255;

/// Connects this terminal with the console of the VM of this name until the user leaves it, through the
/// daemon behind this door.
///
/// # Errors
/// Fails if the console cannot be opened, or ends for a reason other than the wish of the user.
pub async fn run(door: &Door, name: String, force: bool) -> Result<(), Error> {
    Client::new(door.clone(), name, force).run().await
}
