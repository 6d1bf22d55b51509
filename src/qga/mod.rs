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
pub mod once;
pub mod owners;
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
use crate::policy::Asker;
use crate::policy::audit::{Audit, Noted, Record};
use arguments::Arguments;
use owners::Owners;
use policy::Policy;
use request::Request;
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
    /// Whose the files and programs are that they have opened and started.
    pub owners: Owners,
    /// The agent ends: nothing new is begun, and what is under way is answered.
    pub stopping: Stopping,
    /// The version that guest-info reports; clients compare it.
    pub version: String,
}

impl Context {
    /// Whether the command at this place of the table may be called now by this asker.
    pub fn allows(&self, place: usize, asker: &Asker) -> bool {
        if self.guest.freezer.restricts() {
            let always = COMMANDS.get(place).is_some_and(|command| command.always);
            return always && self.policy.allows_while_frozen(place, asker);
        }
        self.policy.allows(place, asker)
    }

    /// Why it may not.
    fn refusal(&self, command: &Command, asker: &Asker) -> error::Error {
        if self.guest.freezer.restricts() && !command.always {
            return error::Error::frozen(command.name, &self.guest.freezer.held());
        }
        error::Error::disabled(command.name, &self.policy.why_not(command, asker))
    }

    /// Writes down that `peer` has asked for something that it may not do. That something is frozen is no such reason.
    fn write_down_refusal(&self, name: &str, peer: &str, asker: &Asker) {
        let Some(place) = table::find(name).filter(|place| !self.policy.allows(*place, asker)) else {
            return;
        };
        let command = &COMMANDS[place];
        if self.guest.freezer.restricts() && !command.always {
            return;
        }
        let noted = Noted::default();
        let _ = noted.denied.set(self.policy.why_not(command, asker));
        self.audit.record(&Record {
            id: asker.id(),
            who: asker.who(),
            caller: recorded(peer, asker),
            role: command.needs(),
            verb: command.name,
            noted: &noted,
            result: "not begun",
            took: Duration::ZERO,
        });
    }
}

/// Whom a record names as the caller: of QGA the client, else for whom the host half asks.
fn recorded<'a>(peer: &'a str, asker: &'a Asker) -> &'a str {
    match asker {
        Asker::Qga => peer,
        Asker::Host(_) => asker.caller(),
    }
}

/// The command that is asked for, if this asker may call it.
fn command<'a>(
    request: &Request<'a>,
    context: &Context,
    asker: &Asker,
) -> Result<(&'static Command, Arguments<'a>), error::Error> {
    let (name, arguments) = request.call()?;
    let place = table::find(&name).ok_or_else(|| error::Error::unknown(&name))?;
    let command = &COMMANDS[place];
    if context.allows(place, asker) { Ok((command, arguments)) } else { Err(context.refusal(command, asker)) }
}

/// The version of qemu-ga whose protocol this is; clients compare it.
pub const PROTOCOL_VERSION: &str = "10.2.0";
