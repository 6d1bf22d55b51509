//! The QEMU guest agent protocol: commands as JSON on a byte stream.
//!
//! This room parses requests, checks policy, calls a verb of [`crate::guest`] and writes the answer. It owns
//! the [`table`] of commands, which drives dispatch, guest-info, block lists and docs/qga.md. To add a
//! command: a function and a row in the file of its subject under `commands/`.
//!
//! Reference: <https://www.qemu.org/docs/master/interop/qemu-ga-ref.html>

pub mod arguments;
pub mod base64;
pub mod call;
pub mod commands;
pub mod complaints;
pub mod document;
pub mod error;
pub mod policy;
mod queue;
pub mod reply;
pub mod request;
pub mod room;
pub mod session;
pub mod table;
mod work;

use tokio_util::sync::CancellationToken;

use crate::guest::Guest;
use complaints::Complaints;
use policy::Policy;
use room::Room;

/// Cancelled when the agent ends.
pub type Stopping = CancellationToken;

/// What every session with a QGA client shares.
#[derive(Debug)]
pub struct Context {
    /// The machine that the commands act on.
    pub guest: Guest,
    /// Which commands may be called.
    pub policy: Policy,
    /// What is said of its clients.
    pub complaints: Complaints,
    /// What their large messages take.
    pub room: Room,
    /// The agent ends: nothing new is begun, and what is under way is answered.
    pub stopping: Stopping,
    /// The version that guest-info reports; clients compare it.
    pub version: String,
}

impl Context {
    /// Whether the command at this place of the table may be called now.
    pub fn allows(&self, place: usize) -> bool {
        if self.guest.freezer.restricts() {
            // As with qemu-ga, whatever the lists say.
            return table::COMMANDS.get(place).is_some_and(|command| command.always);
        }
        self.policy.allows(place)
    }

    /// Why it may not.
    fn refusal(&self, name: &str) -> error::Error {
        if self.guest.freezer.restricts() {
            return error::Error::frozen(name, &self.guest.freezer.held());
        }
        error::Error::disabled(name)
    }
}

/// The version of qemu-ga whose protocol this is; clients compare it.
pub const PROTOCOL_VERSION: &str = "10.2.0";
