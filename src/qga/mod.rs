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

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::guest::Guest;
use crate::pace::Complaints;
use crate::policy::Who;
use crate::policy::audit::{Audit, Noted, Record};
use policy::Policy;
use room::Room;
use table::{COMMANDS, Command};

/// Cancelled when the agent ends.
pub type Stopping = CancellationToken;

/// What every session with a QGA client shares.
#[derive(Debug)]
pub struct Context {
    /// The machine that the commands act on.
    pub guest: Guest,
    /// Which commands may be called.
    pub policy: Policy,
    /// Where it is written down what was asked.
    pub audit: Audit,
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
            let always = COMMANDS.get(place).is_some_and(|command| command.always);
            return always && self.policy.allows_while_frozen(place);
        }
        self.policy.allows(place)
    }

    /// Why it may not.
    fn refusal(&self, command: &Command) -> error::Error {
        if self.guest.freezer.restricts() && !command.always {
            return error::Error::frozen(command.name, &self.guest.freezer.held());
        }
        error::Error::disabled(command.name, &self.policy.why_not(command))
    }

    /// Writes down that `peer` has asked for something that it may not do. That something is frozen is no such reason.
    fn write_down_refusal(&self, name: &str, peer: &str) {
        let Some(place) = table::find(name).filter(|place| !self.policy.allows(*place)) else { return };
        let command = &COMMANDS[place];
        if self.guest.freezer.restricts() && !command.always {
            return;
        }
        let noted = Noted::default();
        let _ = noted.denied.set(self.policy.why_not(command));
        self.audit.record(&Record {
            id: None,
            who: Who::Qga,
            caller: peer,
            role: command.needs(),
            verb: command.name,
            noted: &noted,
            result: "not begun",
            took: Duration::ZERO,
        });
    }
}

/// The version of qemu-ga whose protocol this is; clients compare it.
pub const PROTOCOL_VERSION: &str = "10.2.0";
