//! The one table of commands: it drives dispatch, guest-info, the block lists and docs/qga.md.
//!
//! Each subject's file has the rows of its commands beside the functions behind them; here they become one
//! table, sorted when the program is built.

use std::pin::Pin;

use crate::policy::Role;
use crate::qga::call::Call;
use crate::qga::commands::SUBJECTS;
use crate::qga::error::Error;
use crate::qga::reply::Reply;

/// How a command ended.
pub type Outcome = Result<Reply, Error>;

/// An outcome that has to be waited for.
pub type Pending<'a> = Pin<Box<dyn Future<Output = Outcome> + Send + 'a>>;

/// The function behind a command.
#[derive(Debug, Clone, Copy)]
pub enum Run {
    /// Answers at once: does nothing that could block, such as to look at a file that is not the kernel's own. What is
    /// in /proc, /sys and, by udev, in /run is in memory.
    Now(fn(&Call<'_>) -> Outcome),
    /// Has to wait for something.
    Later(for<'a> fn(&'a Call<'a>) -> Pending<'a>),
}

/// What a command can do to the guest; the settings limit some classes further.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Speaks about the protocol only.
    Protocol,
    /// Reads what the guest is and does.
    Query,
    /// Changes the guest: its power, clock, processors, file systems.
    Control,
    /// Reads and writes files.
    Files,
    /// Runs programs.
    Exec,
    /// Changes who may log in.
    Credentials,
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
    /// May be called while file systems are frozen, and does not wait for good for another command that hangs.
    pub always: bool,
    /// What it can do.
    pub class: Class,
    /// What its caller has to have. No row is without one.
    pub role: Option<Role>,
    /// Each call leaves a line in the log: who, what, with which result.
    pub audited: bool,
    /// What it does.
    pub summary: &'static str,
    /// What differs from qemu-ga, and why; empty for nothing.
    pub differences: &'static str,
    /// What does it.
    pub run: Run,
}

impl Command {
    /// What holds for most commands; rows say what they are on top of it. It is called by nobody.
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

    /// What its caller has to have; what no row gives is the most that there is.
    pub fn needs(&self) -> Role {
        self.role.unwrap_or(Role::Exec)
    }

    /// Whether a client finds its place in the stream by it.
    pub fn is_sync(&self) -> bool {
        self.name.starts_with("guest-sync")
    }

    /// Whether it freezes or thaws, which ends in bounded time by itself.
    pub fn is_freeze(&self) -> bool {
        self.name.starts_with("guest-fsfreeze-")
    }

    /// Whether it thaws.
    pub fn is_thaw(&self) -> bool {
        self.name == "guest-fsfreeze-thaw"
    }
}

/// All commands, in the order of their names.
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

/// The rows of all subjects, sorted by insertion: `sort` cannot run while the program is built.
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

/// Whether `one` stands before `other` in the order of their bytes.
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

/// The place of a command in [`COMMANDS`].
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

    /// As long as a command has no method, `guestctl qga` is the way to it: said in src/policy/verbs.rs.
    #[test]
    fn every_command_has_a_method_of_the_guestlet_api_or_is_said_to_have_none() {
        let done = || VERBS.iter().flat_map(|verb| verb.commands.iter().map(move |name| (verb, *name)));
        let mut known: Vec<_> = done().map(|(_, name)| name).chain(ONLY_BY_QGA.iter().copied()).collect();
        known.sort_unstable();
        // Programs are listed and ended by methods of their own.
        known.dedup();
        assert_eq!(known, COMMANDS.iter().map(|command| command.name).collect::<Vec<_>>());
        for (verb, name) in done() {
            let command = &COMMANDS[find(name).unwrap()];
            if verb.name == "CollectMetrics" {
                // It has figures of many commands under a role of its own; and tells of a freeze, too.
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
