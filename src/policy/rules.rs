//! The decision: whether a client may call a verb, and by which grant.
//!
//! The first of these that applies decides:
//!
//! 1. The bounds that the settings of `[qga]` set ([`Bounds`]): what they forbid is denied, in every mode.
//! 2. Defaults, for clients that no grant names: QGA clients may do everything that was possible before grants
//!    existed, plain host halves the same without programs and files. A keyed host half has the role `status`, and
//!    the roles in the line of its key.
//! 3. The grants for this host and this caller. They add up.
//! 4. Everything else is denied; in the mode `audit` it passes and is recorded.
//!
//! As soon as a guest has keys, a plain host half has the roles of `trust.plain` and no others, in every mode.

use std::fmt;
use std::path::Path;

use crate::policy::bounds::{Bound, Bounds};
use crate::policy::grant::{Grant, Host};
use crate::policy::role::{PLAIN, QEMU_GA, Role, Roles};
use crate::text::target::Target;
use crate::trust::Peer;
use crate::trust::peer::Keyed;

/// Directory of the settings that messages refer to.
const FOLDER: &str = "/etc/guestlet/agent.d";

/// Phrase of a message, after a path: the file is not in this mount namespace.
pub(super) const NOT_HERE: &str = ", which leads into another mount namespace or to a file that was removed";

/// Client that makes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who<'a> {
    /// A client of QGA.
    Qga,
    /// A host half that has proved no key.
    Plain {
        /// The guest was given keys of host halves, so this one has none of them.
        guest_has_keys: bool,
    },
    /// A host half that has proved its key.
    Keyed(&'a Keyed),
}

impl<'a> Who<'a> {
    /// Returns the client at the other end of a connection of the guestlet API.
    pub fn peer(peer: &'a Peer, guest_has_keys: bool) -> Self {
        match peer {
            Peer::Plain => Self::Plain { guest_has_keys },
            Peer::Keyed(keyed) => Self::Keyed(keyed),
        }
    }
}

impl fmt::Display for Who<'_> {
    /// Formats the client as grants and audit records name it: `qga`, `plain`, or the fingerprint of its key.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qga => formatter.write_str("qga"),
            Self::Plain { .. } => formatter.write_str("plain"),
            Self::Keyed(keyed) => keyed.fingerprint.fmt(formatter),
        }
    }
}

/// Object of a call, as far as grants depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail<'a> {
    /// No object, or one that is not known yet: decides whether the verb may be called at all.
    None,
    /// A program is run.
    Program {
        /// Path of the program, with every link resolved.
        path: &'a Path,
        /// True if the caller passes environment variables.
        environment: bool,
        /// True if the caller chooses the working directory.
        directory: bool,
        /// Login name of the user that the program runs as.
        user: &'a str,
    },
    /// A file is opened.
    File {
        /// Path with every link resolved, or as requested if the guest does not have the file there.
        path: &'a Path,
        /// True if the guest has the file at that path. If false, links of /proc have led into another mount namespace,
        /// and no restriction to paths allows the file to be opened.
        is_here: bool,
        /// True if the file is opened for writing.
        writes: bool,
    },
    /// A password is set.
    Password,
    /// A connection to this target is opened.
    Target(&'a Target),
}

/// Call to be decided on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked<'a> {
    /// Client that makes the call.
    pub who: Who<'a>,
    /// User that the host half acts for, in its own words; empty if it names none.
    pub caller: &'a str,
    /// Name of the verb.
    pub verb: &'a str,
    /// Role that the verb needs.
    pub role: Role,
    /// Object of the call.
    pub detail: Detail<'a>,
    /// True if the call is about the QGA protocol itself, without which no other call can be made.
    pub protocol: bool,
}

impl<'a> Asked<'a> {
    /// Creates a call of a verb, without an object.
    pub fn new(who: Who<'a>, caller: &'a str, verb: &'a str, role: Role) -> Self {
        Self { who, caller, verb, role, detail: Detail::None, protocol: false }
    }
}

/// Treatment of a call that no grant allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The call is denied.
    #[default]
    Enforce,
    /// The call passes, and is recorded.
    Audit,
}

/// Rules by which calls are decided, from the settings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    /// Treatment of calls that no grant allows.
    pub mode: Mode,
    /// The grants, in the order of the settings.
    pub grants: Vec<Grant>,
    /// Roles that a host half without a key has even if the guest has keys.
    pub plain: Roles,
    /// Bounds for QGA clients, which hold whatever their grants allow.
    pub bounds: Bounds,
}

/// Reason why a call is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By<'r> {
    /// A grant allows it.
    Grant(&'r Grant),
    /// A default allows it, which these words name.
    Default(&'static str),
}

impl fmt::Display for By<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Grant(grant) => formatter.write_str(&grant.origin),
            Self::Default(words) => formatter.write_str(words),
        }
    }
}

/// Reason why a call is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why<'a> {
    /// A bound of the settings of `[qga]` forbids it.
    Bound(Bound<'a>),
    /// No grant allows it.
    NoGrant {
        /// The call.
        asked: Asked<'a>,
        /// True if a grant gives the role, but not for this program, file or target.
        elsewhere: bool,
    },
}

impl fmt::Display for Why<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (asked, elsewhere) = match self {
            Self::Bound(bound) => return bound.fmt(formatter),
            Self::NoGrant { asked, elsewhere } => (asked, elsewhere),
        };
        if let Who::Plain { guest_has_keys: true } = asked.who {
            return write!(
                formatter,
                "this guest has keys, and trust.plain does not give the role {} to a host half without a key",
                asked.role
            );
        }
        let to = Subject(asked);
        match asked.detail {
            Detail::Program { path, environment, directory, user } if *elsewhere => {
                let with = match (environment, directory) {
                    (false, false) => "",
                    (true, false) => " with variables",
                    (false, true) => " in a directory of its choice",
                    (true, true) => " with variables in a directory of its choice",
                };
                write!(
                    formatter,
                    "no grant lets {to} run {} as {user}{with}; see exec.paths and exec.users of the grants in {FOLDER}",
                    path.display()
                )?;
                if with.is_empty() {
                    return Ok(());
                }
                formatter.write_str("; a grant with exec.paths allows neither --env nor --cwd")
            }
            Detail::File { path, is_here, writes } if *elsewhere => {
                let doing = if writes { "write to" } else { "read" };
                let (path, where_to) = (path.display(), if is_here { "" } else { NOT_HERE });
                write!(
                    formatter,
                    "no grant lets {to} {doing} {path}{where_to}; see files.paths of the grants in {FOLDER}"
                )
            }
            Detail::Target(target) => {
                let who = asked.who;
                write!(
                    formatter,
                    "no grant lets {to} reach {target}; add forward = [\"{target}\"] to a [[grant]] with host = \"{who}\" and \
                     roles = [\"forward\"] in {FOLDER}"
                )
            }
            _ => {
                let (role, who) = (asked.role, asked.who);
                write!(
                    formatter,
                    "no grant gives the role {role} to {to}; add a [[grant]] with host = \"{who}\" and \
                     roles = [\"{role}\"] to {FOLDER}"
                )?;
                if role != Role::Forward {
                    return Ok(());
                }
                formatter.write_str(", and in it forward = [\"22\"], or whatever is to be reached")
            }
        }
    }
}

/// Formatter of the client and its caller, for messages.
struct Subject<'s, 'a>(&'s Asked<'a>);

impl fmt::Display for Subject<'_, '_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.who {
            Who::Qga => formatter.write_str("QGA clients")?,
            Who::Plain { .. } => formatter.write_str("a host half without a key")?,
            Who::Keyed(keyed) => write!(formatter, "the host half {}", keyed.fingerprint)?,
        }
        if self.0.caller.is_empty() { Ok(()) } else { write!(formatter, " for {}", self.0.caller) }
    }
}

/// Outcome of the decision on a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision<'a> {
    /// The call is allowed.
    Allowed(By<'a>),
    /// The call is denied.
    Denied(Why<'a>),
    /// The call passes, because nothing is enforced yet.
    WouldDeny(Why<'a>),
}

impl Decision<'_> {
    /// Returns whether the call may be carried out.
    pub fn passes(&self) -> bool {
        !matches!(self, Self::Denied(_))
    }

    /// Returns the decision's word in audit records.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Allowed(_) => "allowed",
            Self::Denied(_) => "denied",
            Self::WouldDeny(_) => "would-deny",
        }
    }
}

impl Rules {
    /// Decides whether a call may be carried out, and why. Allocates nothing.
    pub fn decide<'a>(&'a self, asked: &Asked<'a>) -> Decision<'a> {
        if asked.who == Who::Qga { self.decide_command(asked) } else { self.granted(asked) }
    }

    /// Decides likewise on a command of QGA, or on a verb that does the same as one: the bounds of `[qga]` hold for
    /// every client that calls it.
    pub fn decide_command<'a>(&'a self, asked: &Asked<'a>) -> Decision<'a> {
        match self.bounds.forbid(asked) {
            Some(bound) => Decision::Denied(Why::Bound(bound)),
            None => self.granted(asked),
        }
    }

    /// Decides likewise, without the bounds of `[qga]`.
    pub fn granted<'a>(&'a self, asked: &Asked<'a>) -> Decision<'a> {
        if let Some(words) = self.without_grant(asked) {
            return Decision::Allowed(By::Default(words));
        }
        let stranger = asked.who == Who::Plain { guest_has_keys: true };
        let mut grants =
            self.grants.iter().filter(|grant| !stranger && grant.is_for(&asked.who, asked.caller));
        if let Some(grant) = grants.clone().find(|grant| grant.gives(asked.role, &asked.detail)) {
            return Decision::Allowed(By::Grant(grant));
        }
        let elsewhere = grants.any(|grant| grant.roles.has(asked.role));
        let why = Why::NoGrant { asked: *asked, elsewhere };
        // Roles that a host half without a key never has by default are denied in audit mode, too: trying out grants must
        // not open them.
        let unproved = matches!(asked.who, Who::Plain { .. }) && !PLAIN.has(asked.role);
        if self.mode == Mode::Audit && !stranger && !unproved {
            Decision::WouldDeny(why)
        } else {
            Decision::Denied(why)
        }
    }

    /// Returns whether a grant names this host, which replaces the defaults.
    pub fn has_grant_for(&self, host: &Host) -> bool {
        self.grants.iter().any(|grant| grant.host == *host)
    }

    /// Returns the default that allows the call without a grant, in words.
    fn without_grant(&self, asked: &Asked<'_>) -> Option<&'static str> {
        // Targets need a grant: no default names any.
        if matches!(asked.detail, Detail::Target(_)) {
            return None;
        }
        let of_before = QEMU_GA.has(asked.role);
        match asked.who {
            Who::Qga if asked.protocol => Some("the protocol itself"),
            Who::Qga => (of_before && !self.has_grant_for(&Host::Qga)).then_some("no grant is for qga"),
            Who::Plain { guest_has_keys: true } => self.plain.has(asked.role).then_some("trust.plain"),
            Who::Plain { .. } => (PLAIN.has(asked.role) && !self.has_grant_for(&Host::Plain))
                .then_some("no grant is for plain"),
            Who::Keyed(_) if asked.role == Role::Status => Some("its key"),
            Who::Keyed(keyed) => {
                let mut given = keyed.roles.iter().filter_map(|word| Roles::of_word(word));
                given.any(|roles| roles.has(asked.role)).then_some("the line of its key")
            }
        }
    }

    /// Returns whether the programs of guest-exec have to be checked one by one, by path and user.
    pub fn looks_at_programs(&self) -> bool {
        let limited = |grant: &Grant| grant.exec.is_some() || grant.users.is_some();
        self.mode == Mode::Audit || self.bounds.limits.exec_paths.is_some() || self.grants.iter().any(limited)
    }
}
