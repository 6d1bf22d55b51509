//! The one table of commands.

use std::pin::Pin;

use crate::qga::Context;
use crate::qga::commands::{network, power, protocol, system};
use crate::qga::error::Error;
use crate::qga::reply::Reply;
use crate::qga::request::Arguments;

/// How a command ended.
pub type Outcome = Result<Reply, Error>;

/// An outcome that has to be waited for.
pub type Pending<'a> = Pin<Box<dyn Future<Output = Outcome> + Send + 'a>>;

/// The function behind a command.
#[derive(Debug, Clone, Copy)]
pub enum Run {
    /// Answers at once.
    Now(fn(&Context, Arguments<'_>) -> Outcome),
    /// Has to wait for something.
    Later(for<'a> fn(&'a Context, Arguments<'a>) -> Pending<'a>),
}

/// One command: everything that is known about it.
#[derive(Debug, Clone, Copy)]
pub struct Command {
    /// The name on the wire.
    pub name: &'static str,
    /// The QEMU version that brought it.
    pub since: &'static str,
    /// Its arguments, for people; a `?` follows an optional one.
    pub arguments: &'static str,
    /// Its result, for people; empty for none.
    pub returns: &'static str,
    /// Whether success is answered (QAPI's `success-response`).
    pub success_response: bool,
    /// What it does.
    pub summary: &'static str,
    /// What differs from qemu-ga, and why; empty for nothing.
    pub differences: &'static str,
    /// What does it.
    pub run: Run,
}

/// All commands, in the order of their names.
pub const COMMANDS: &[Command] = &[
    Command {
        name: "guest-get-host-name",
        since: "2.10",
        arguments: "",
        returns: "host-name",
        success_response: true,
        summary: "The kernel's host name.",
        differences: "",
        run: Run::Now(system::get_host_name),
    },
    Command {
        name: "guest-get-osinfo",
        since: "2.10",
        arguments: "",
        returns: "kernel-release?, kernel-version?, machine?, id?, name?, pretty-name?, version?, version-id?, variant?, variant-id?",
        success_response: true,
        summary: "The kernel, and the operating system as os-release(5) names it.",
        differences: "",
        run: Run::Now(system::get_osinfo),
    },
    Command {
        name: "guest-info",
        since: "0.15",
        arguments: "",
        returns: "version, supported_commands[{name, enabled, success-response}]",
        success_response: true,
        summary: "The protocol's version and the commands.",
        differences: "The version is that of the qemu-ga whose protocol this is.",
        run: Run::Now(protocol::info),
    },
    Command {
        name: "guest-network-get-interfaces",
        since: "1.1",
        arguments: "",
        returns: "[{name, hardware-address?, ip-addresses[{ip-address, ip-address-type, prefix}]?, statistics?}]",
        success_response: true,
        summary: "Network interfaces with their addresses and counters.",
        differences: "The time it takes grows with the number of interfaces, not with its square.",
        run: Run::Now(network::get_interfaces),
    },
    Command {
        name: "guest-ping",
        since: "0.15",
        arguments: "",
        returns: "",
        success_response: true,
        summary: "Does nothing, successfully.",
        differences: "It is not logged.",
        run: Run::Now(protocol::ping),
    },
    Command {
        name: "guest-shutdown",
        since: "0.15",
        arguments: "mode? (`powerdown`, `halt` or `reboot`; default `powerdown`)",
        returns: "",
        success_response: false,
        summary: "Shuts the guest down.",
        differences: "logind is asked over D-Bus; only where that fails is a command run.",
        run: Run::Later(power::shutdown),
    },
    Command {
        name: "guest-sync",
        since: "0.15",
        arguments: "id (integer of 64 bits)",
        returns: "the id",
        success_response: true,
        summary: "Returns the id, by which a client finds its place in the stream.",
        differences: "",
        run: Run::Now(protocol::sync),
    },
    Command {
        name: "guest-sync-delimited",
        since: "1.1",
        arguments: "id (integer of 64 bits)",
        returns: "the id, after a byte 0xFF",
        success_response: true,
        summary: "As guest-sync, with a byte 0xFF before the answer.",
        differences: "",
        run: Run::Now(protocol::sync_delimited),
    },
];

/// The place of a command in [`COMMANDS`].
pub fn find(name: &str) -> Option<usize> {
    COMMANDS.binary_search_by(|command| command.name.cmp(name)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_so_that_every_command_is_found() {
        for (place, command) in COMMANDS.iter().enumerate() {
            assert_eq!(find(command.name), Some(place), "{}", command.name);
        }
        assert_eq!(find("guest-nothing"), None);
    }
}
