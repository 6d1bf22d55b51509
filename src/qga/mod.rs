//! The QEMU guest agent protocol: commands as JSON on a byte stream.
//!
//! This module parses requests, checks the policy, calls a verb of [`crate::guest`] and writes the answer. It owns
//! the [`table`] of commands, which drives dispatch, guest-info, block lists and docs/qga.md. To add a command: a
//! function and a row in the file of its subject under `commands/`.
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

/// Token that is cancelled when the agent ends.
pub type Stopping = CancellationToken;

/// State that all sessions with QGA clients share.
#[derive(Debug)]
pub struct Context {
    /// Guest that the commands act on.
    pub guest: Guest,
    /// Rules for which commands may be called.
    pub policy: Policy,
    /// Log of the calls.
    pub audit: Audit,
    /// Log of the clients' protocol errors, at a limited rate.
    pub complaints: Complaints,
    /// Limits on the memory for large messages and on abandoned commands.
    pub room: Room,
    /// Owners of the files and programs that clients have opened and started.
    pub owners: Owners,
    /// Cancelled when the agent ends: nothing new is begun, and commands under way are answered.
    pub stopping: Stopping,
    /// Version that guest-info reports; clients compare it.
    pub version: String,
}

impl Context {
    /// Returns whether this caller may call the command at this index of the table now.
    pub fn allows(&self, place: usize, asker: &Asker) -> bool {
        if self.guest.freezer.restricts() {
            let always = COMMANDS.get(place).is_some_and(|command| command.always);
            return always && self.policy.allows_while_frozen(place, asker);
        }
        self.policy.allows(place, asker)
    }

    /// Returns the error for a command that may not be called.
    fn refusal(&self, command: &Command, asker: &Asker) -> error::Error {
        if self.guest.freezer.restricts() && !command.always {
            return error::Error::frozen(command.name, &self.guest.freezer.held());
        }
        error::Error::disabled(command.name, &self.policy.why_not(command, asker))
    }

    /// Records that `peer` has called a command that it may not call. A refusal because file systems are frozen is not
    /// recorded.
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

/// Returns the caller for the audit log: the client for QGA, or the one on whose behalf the host half calls.
fn recorded<'a>(peer: &'a str, asker: &'a Asker) -> &'a str {
    match asker {
        Asker::Qga => peer,
        Asker::Host(_) => asker.caller(),
    }
}

/// Returns the requested command and its arguments, if the caller may call it.
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

/// Version of qemu-ga whose protocol this is; clients compare it.
pub const PROTOCOL_VERSION: &str = "10.2.0";
