//! Commands about the protocol itself.

use serde::Serialize;

use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::error::Error;
use crate::qga::reply::Reply;
use crate::qga::table::{COMMANDS as ALL, Class, Command, Outcome, Run};

/// Rows of the command table.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-info",
        role: Some(Role::Status),
        since: "0.15",
        returns: "version, supported_commands[{name, enabled, success-response}]",
        class: Class::Protocol,
        always: true,
        summary: "The protocol's version and the commands.",
        differences: "The version is that of the qemu-ga whose protocol this is.",
        run: Run::Now(info),
        ..Command::USUAL
    },
    Command {
        name: "guest-ping",
        role: Some(Role::Status),
        since: "0.15",
        class: Class::Protocol,
        always: true,
        summary: "Does nothing, successfully.",
        differences: "It is not logged.",
        run: Run::Now(ping),
        ..Command::USUAL
    },
    Command {
        name: "guest-sync",
        role: Some(Role::Status),
        since: "0.15",
        arguments: "id (integer of 64 bits)",
        returns: "the id",
        class: Class::Protocol,
        always: true,
        summary: "Returns the id, by which a client finds its place in the stream.",
        run: Run::Now(sync),
        ..Command::USUAL
    },
    Command {
        name: "guest-sync-delimited",
        role: Some(Role::Status),
        since: "1.1",
        arguments: "id (integer of 64 bits)",
        returns: "the id, after a byte 0xFF",
        class: Class::Protocol,
        always: true,
        summary: "As guest-sync, with a byte 0xFF before the answer.",
        run: Run::Now(sync_delimited),
        ..Command::USUAL
    },
];

/// Implements `guest-sync`.
pub fn sync(call: &Call<'_>) -> Outcome {
    Reply::value(&id(call)?)
}

/// Implements `guest-sync-delimited`.
pub fn sync_delimited(call: &Call<'_>) -> Outcome {
    Reply::delimited(&id(call)?)
}

fn id(call: &Call<'_>) -> Result<i64, Error> {
    call.arguments.read(|arguments| arguments.required("id"))
}

/// Implements `guest-ping`.
pub fn ping(call: &Call<'_>) -> Outcome {
    call.arguments.none()?;
    Ok(Reply::empty())
}

/// Implements `guest-info`.
pub fn info(call: &Call<'_>) -> Outcome {
    #[derive(Serialize)]
    struct Info<'a> {
        version: &'a str,
        supported_commands: Vec<Supported>,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    struct Supported {
        name: &'static str,
        enabled: bool,
        success_response: bool,
    }
    call.arguments.none()?;
    let supported = |(place, command): (usize, &Command)| Supported {
        name: command.name,
        enabled: call.context.allows(place, call.asker()),
        success_response: command.success_response,
    };
    Reply::value(&Info {
        version: &call.context.version,
        supported_commands: ALL.iter().enumerate().map(supported).collect(),
    })
}
