//! Table of all commands: it drives dispatch, guest-info, the block lists and docs/qga.md.
//!
//! The file of each subject has the rows of its commands beside their functions. Here they become one table, which
//! is sorted at compile time.

use std::pin::Pin;

use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::commands::SUBJECTS;
use crate::qga::error::Error;
use crate::qga::reply::Reply;

/// Result of a command.
pub type Outcome = Result<Reply, Error>;

/// Future of an outcome.
pub type Pending<'a> = Pin<Box<dyn Future<Output = Outcome> + Send + 'a>>;

/// Function that carries out a command.
#[derive(Debug, Clone, Copy)]
pub enum Run {
    /// Answers at once: must not do anything that could block, such as reading a file on a disk. Files in /proc and
    /// /sys, and those of udev in /run, are in memory.
    Now(fn(&Call<'_>) -> Outcome),
    /// Answers later, because it has to wait for something.
    Later(for<'a> fn(&'a Call<'a>) -> Pending<'a>),
}

/// Class of a command by its effect on the guest; the settings limit some classes further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Concerns the protocol only.
    Protocol,
    /// Reads properties and state of the guest.
    Query,
    /// Changes the guest: its power, clock, processors, file systems.
    Control,
    /// Reads and writes files.
    Files,
    /// Runs programs, and returns their outputs.
    Exec,
    /// Changes passwords and keys of users.
    Credentials,
}

/// Command with all of its properties.
#[derive(Debug, Clone, Copy)]
pub struct Command {
    /// Name on the wire.
    pub name: &'static str,
    /// QEMU version that introduced the command.
    pub since: &'static str,
    /// Arguments, for people; a `?` follows an optional one.
    pub arguments: &'static str,
    /// Result, for people; empty if there is none.
    pub returns: &'static str,
    /// True if success is answered (QAPI's `success-response`).
    pub success_response: bool,
    /// True if the command may be called while file systems are frozen, and never waits forever for another command
    /// that hangs.
    pub always: bool,
    /// Class by the effect on the guest.
    pub class: Class,
    /// Role that the caller needs. Set in every row.
    pub role: Option<Role>,
    /// True if each call is logged: caller, command and result.
    pub audited: bool,
    /// Description of the command, for people.
    pub summary: &'static str,
    /// Differences from qemu-ga, with the reasons; empty if there are none.
    pub differences: &'static str,
    /// Function that carries out the command.
    pub run: Run,
}

impl Command {
    /// Defaults for the rows, which override some of them. This is no callable command.
    pub const USUAL: Self = Self {
        name: "",
        since: "",
        arguments: "",
        returns: "",
        success_response: true,
        always: false,
        class: Class::Query,
        role: None,
        audited: false,
        summary: "",
        differences: "",
        run: Run::Now(|_| Err(Error::unknown(""))),
    };

    /// Returns the role that the caller needs. A row without one would need the most powerful role.
    pub fn needs(&self) -> Role {
        self.role.unwrap_or(Role::Exec)
    }

    /// Returns whether the command serves to synchronize the client with the stream.
    pub fn is_sync(&self) -> bool {
        self.name.starts_with("guest-sync")
    }

    /// Returns whether the command belongs to freezing and thawing, which have time limits of their own.
    pub fn is_freeze(&self) -> bool {
        self.name.starts_with("guest-fsfreeze-")
    }

    /// Returns whether the command thaws file systems.
    pub fn is_thaw(&self) -> bool {
        self.name == "guest-fsfreeze-thaw"
    }
}

/// Table of all commands, sorted by name.
pub static COMMANDS: &[Command] = &SORTED;

static SORTED: [Command; COUNT] = sorted();

const COUNT: usize = {
    let mut count = 0;
    let mut subject = 0;
    while subject < SUBJECTS.len() {
        count += SUBJECTS[subject].len();
        subject += 1;
    }
    count
};

/// Sorts the rows of all subjects by insertion, because `sort` is not available at compile time.
const fn sorted() -> [Command; COUNT] {
    let mut table = [Command::USUAL; COUNT];
    let mut length = 0;
    let mut subject = 0;
    while subject < SUBJECTS.len() {
        let mut row = 0;
        while row < SUBJECTS[subject].len() {
            let command = SUBJECTS[subject][row];
            let mut place = length;
            while place > 0 && precedes(command.name, table[place - 1].name) {
                table[place] = table[place - 1];
                place -= 1;
            }
            table[place] = command;
            length += 1;
            row += 1;
        }
        subject += 1;
    }
    table
}

/// Returns whether `one` comes before `other` in byte order.
const fn precedes(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    let mut at = 0;
    while at < one.len() && at < other.len() {
        if one[at] != other[at] {
            return one[at] < other[at];
        }
        at += 1;
    }
    one.len() < other.len()
}

/// Returns the index of a command in [`COMMANDS`].
pub fn find(name: &str) -> Option<usize> {
    COMMANDS.binary_search_by(|command| command.name.cmp(name)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::role::QEMU_GA;
    use crate::policy::verbs::{ONLY_BY_QGA, VERBS};

    #[test]
    fn the_table_is_sorted_so_that_every_command_is_found() {
        for (place, command) in COMMANDS.iter().enumerate() {
            assert_eq!(find(command.name), Some(place), "{}", command.name);
        }
        assert_eq!(find("guest-nothing"), None);
    }

    #[test]
    fn every_row_is_filled() {
        for command in COMMANDS {
            assert!(!command.since.is_empty() && !command.summary.is_empty(), "{}", command.name);
        }
    }

    /// A command without a method is available through `guestctl qga` only: src/policy/verbs.rs lists those.
    #[test]
    fn every_command_has_a_method_of_the_guestlet_api_or_is_said_to_have_none() {
        let done = || VERBS.iter().flat_map(|verb| verb.commands.iter().map(move |name| (verb, *name)));
        let mut known: Vec<_> = done().map(|(_, name)| name).chain(ONLY_BY_QGA.iter().copied()).collect();
        known.sort_unstable();
        // Listing and ending programs are methods of their own, so that a command may occur several times.
        known.dedup();
        assert_eq!(known, COMMANDS.iter().map(|command| command.name).collect::<Vec<_>>());
        for (verb, name) in done() {
            let command = &COMMANDS[find(name).unwrap()];
            if verb.name == "CollectMetrics" {
                // This verb combines figures of many commands under a role of its own, and also reports freezes.
                assert!(!command.audited, "{name} leaves a record, and {} none", verb.name);
                continue;
            }
            assert_eq!(verb.role, command.needs(), "{name}");
            if ["guest-exec", "guest-file-open"].contains(&name) {
                // While file systems are frozen, programs that run are reached and files are read, too; the services themselves start
                // no program then, and write nothing.
                continue;
            }
            assert_eq!(verb.while_frozen, command.always, "{name}");
            assert!(verb.audited || !command.audited, "{name} leaves a record, and {} none", verb.name);
        }
    }

    #[test]
    fn every_command_has_a_role() {
        let without: Vec<_> = COMMANDS.iter().filter(|command| command.role.is_none()).collect();
        assert!(without.is_empty(), "{without:?}");
        for command in COMMANDS {
            assert!(QEMU_GA.has(command.needs()), "{} is not in the profile qemu-ga", command.name);
        }
    }
}
