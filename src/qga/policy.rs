//! Decisions on which commands may be called, by the rules in [`crate::policy`]. A decision on a command as a
//! whole is made once for QGA clients, and at each call for a host half. A decision that depends on a program or a
//! file is made when that is known ([`Check`]).

use std::path::Path;
use std::sync::Arc;

use crate::guest::files::Place;
use crate::policy::asker::QGA;
use crate::policy::audit::Noted;
use crate::policy::{Asked, Asker, Decision, Detail, Mode, Role, Rules};
use crate::qga::error::Error;
use crate::qga::table::{self, COMMANDS, Class, Command};

pub use crate::policy::{Bounds, Limits};

/// Rules, applied to the command table.
#[derive(Debug, Clone)]
pub struct Policy {
    rules: Arc<Rules>,
    standings: Vec<Standing>,
}

/// Decisions on one command for QGA clients.
#[derive(Debug, Clone, Copy)]
struct Standing {
    /// True if the command may be called.
    passes: bool,
    /// True if the command may be called while file systems are frozen, provided that it is one of those allowed then.
    passes_frozen: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self::new(Rules::default())
    }
}

impl From<Limits> for Policy {
    fn from(limits: Limits) -> Self {
        Self::new(Rules { bounds: Bounds { limits, ..Bounds::default() }, ..Rules::default() })
    }
}

impl Policy {
    /// Applies the rules to the command table.
    pub fn new(rules: Rules) -> Self {
        let standing = |command: &Command| {
            let asked = asked(command, &QGA);
            Standing {
                passes: rules.decide_command(&asked).passes(),
                // As in qemu-ga, the block and allow lists do not apply while file systems are frozen.
                passes_frozen: rules.granted(&asked).passes(),
            }
        };
        let standings = COMMANDS.iter().map(standing).collect();
        Self { rules: Arc::new(rules), standings }
    }

    /// Returns the names in the block and allow lists that no command has: a list may be written for several versions.
    pub fn unknown(&self) -> Vec<&str> {
        let bounds = &self.rules.bounds;
        let names = bounds.allow.iter().flatten().chain(&bounds.block);
        names.map(String::as_str).filter(|name| table::find(name).is_none()).collect()
    }

    /// Returns whether this caller may call the command at this index of the table.
    pub fn allows(&self, place: usize, asker: &Asker) -> bool {
        match asker {
            Asker::Qga => self.standings.get(place).is_some_and(|standing| standing.passes),
            Asker::Host(_) => COMMANDS
                .get(place)
                .is_some_and(|command| self.rules.decide_command(&asked(command, asker)).passes()),
        }
    }

    /// Returns the same while file systems are frozen, for a command that may be called then.
    pub fn allows_while_frozen(&self, place: usize, asker: &Asker) -> bool {
        match asker {
            Asker::Qga => self.standings.get(place).is_some_and(|standing| standing.passes_frozen),
            Asker::Host(_) => {
                COMMANDS.get(place).is_some_and(|command| self.rules.granted(&asked(command, asker)).passes())
            }
        }
    }

    /// Returns the reason why a command may not be called; empty if it may.
    pub fn why_not(&self, command: &Command, asker: &Asker) -> String {
        match self.rules.decide_command(&asked(command, asker)) {
            Decision::Denied(why) | Decision::WouldDeny(why) => why.to_string(),
            Decision::Allowed(_) => String::new(),
        }
    }

    /// Returns the reason why a command would be denied if grants were enforced; `None` outside audit mode.
    pub fn would_deny(&self, command: &Command, asker: &Asker) -> Option<String> {
        if self.rules.mode != Mode::Audit {
            return None;
        }
        match self.rules.decide_command(&asked(command, asker)) {
            Decision::WouldDeny(why) => Some(why.to_string()),
            _ => None,
        }
    }

    /// Returns whether the rules require each program to be checked, by its path, before it is run.
    pub fn looks_at_programs(&self) -> bool {
        self.rules.looks_at_programs()
    }

    /// Returns a check for the details of a call of `verb` by this caller; its results are recorded in `noted`.
    pub fn check(&self, verb: &'static str, noted: &Arc<Noted>, asker: &Asker) -> Check {
        Check { rules: Arc::clone(&self.rules), noted: Arc::clone(noted), verb, asker: asker.clone() }
    }
}

fn asked<'a>(command: &'a Command, asker: &'a Asker) -> Asked<'a> {
    let protocol = command.class == Class::Protocol;
    Asked { protocol, ..Asked::new(asker.who(), asker.caller(), command.name, command.needs()) }
}

/// Check of the details of one call against the rules.
#[derive(Debug)]
pub struct Check {
    rules: Arc<Rules>,
    noted: Arc<Noted>,
    verb: &'static str,
    asker: Asker,
}

impl Check {
    /// Checks that a program may be run, and with an `environment` if that is true. `path` is the program's path with
    /// every link resolved.
    ///
    /// # Errors
    /// If it may not.
    pub fn program(&self, path: &Path, environment: bool) -> Result<(), Error> {
        // Only the first path is recorded: a call runs one program.
        let _ = self.noted.path.set(path.display().to_string());
        self.ask(Role::Exec, Detail::Program { path, environment, directory: false, user: "root" })
    }

    /// Records that this call needs a role different from that of its verb, before anything else is known.
    pub fn needs(&self, role: Role) {
        let _ = self.noted.role.set(role);
    }

    /// Checks that a file may be opened, for writing or only for reading. `given` is the path in the request, and
    /// `place` is the file that it leads to.
    ///
    /// # Errors
    /// If it may not.
    pub fn file(&self, given: &Path, place: &Place, writes: bool) -> Result<(), Error> {
        let role = if writes { Role::FilesWrite } else { Role::FilesRead };
        // A path in another mount namespace would denote a different file here.
        let path = if place.is_here { &place.path } else { given };
        if place.is_here {
            let _ = self.noted.path.set(path.display().to_string());
        }
        self.ask(role, Detail::File { path, is_here: place.is_here, writes })
    }

    /// Checks that passwords may be set.
    ///
    /// # Errors
    /// If they may not.
    pub fn password(&self) -> Result<(), Error> {
        self.ask(Role::Accounts, Detail::Password)
    }

    fn ask(&self, role: Role, detail: Detail<'_>) -> Result<(), Error> {
        let asked = Asked::new(self.asker.who(), self.asker.caller(), self.verb, role);
        match self.rules.decide_command(&Asked { detail, ..asked }) {
            Decision::Allowed(_) => Ok(()),
            Decision::WouldDeny(why) => {
                let _ = self.noted.would_deny.set(why.to_string());
                Ok(())
            }
            Decision::Denied(why) => {
                let words = why.to_string();
                let _ = self.noted.denied.set(words.clone());
                Err(Error::generic(words))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Caller, Grant, Host, Roles};

    fn lists(allow: Option<&[&str]>, block: &[&str]) -> Policy {
        let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
        let bounds = Bounds { allow: allow.map(owned), block: owned(block), limits: Limits::default() };
        Policy::new(Rules { bounds, ..Rules::default() })
    }

    fn enabled(policy: &Policy) -> Vec<&'static str> {
        COMMANDS
            .iter()
            .enumerate()
            .filter(|(place, _)| policy.allows(*place, &QGA))
            .map(|(_, c)| c.name)
            .collect()
    }

    #[test]
    fn block_wins_over_allow_and_allow_denies_the_rest() {
        assert_eq!(enabled(&lists(None, &[])).len(), COMMANDS.len());
        assert!(!enabled(&lists(None, &["guest-shutdown"])).contains(&"guest-shutdown"));
        assert_eq!(enabled(&lists(Some(&["guest-ping", "guest-sync"]), &["guest-sync"])), ["guest-ping"]);
        assert!(enabled(&lists(Some(&[]), &[])).is_empty());
    }

    #[test]
    fn unknown_names_are_told() {
        assert_eq!(lists(None, &["guest-exce", "guest-ping"]).unknown(), ["guest-exce"]);
    }

    /// A caller without the right to freeze must not be able to thaw what another one has frozen.
    #[test]
    fn grants_hold_while_file_systems_are_frozen_and_lists_do_not() {
        let place = |name| table::find(name).unwrap();
        let blocked = lists(None, &["guest-fsfreeze-thaw"]);
        assert!(!blocked.allows(place("guest-fsfreeze-thaw"), &QGA));
        assert!(blocked.allows_while_frozen(place("guest-fsfreeze-thaw"), &QGA));
        let grant = Grant {
            origin: String::new(),
            host: Host::Qga,
            caller: Caller::any(),
            roles: Roles::of(&[Role::Status]),
            exec: None,
            users: None,
            files: None,
            forward: Vec::new(),
        };
        let granted = Policy::new(Rules { grants: vec![grant], ..Rules::default() });
        assert!(!granted.allows_while_frozen(place("guest-fsfreeze-thaw"), &QGA));
        assert!(granted.allows_while_frozen(place("guest-ping"), &QGA));
        assert!(
            granted.why_not(&COMMANDS[place("guest-exec")], &QGA).contains("the role exec to QGA clients")
        );
    }
}
