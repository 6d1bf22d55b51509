//! The decision: whether somebody may call a verb, and which grant says so.
//!
//! In this order, the first that has something to say counts:
//!
//! 1. What the settings of `[qga]` forbid QGA clients ([`Bounds`]) is denied, in every mode.
//! 2. What somebody has without a grant, unless a grant is for them: QGA clients everything that there was before there were
//!    grants, plain host halves the same without programs and files; a keyed host half `status`, and the roles in the line of its key.
//! 3. The grants that are for this host and this caller. They add up.
//! 4. Everything else is denied, or would be: in the mode `audit` it passes.
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

/// Where the settings go that a message asks for.
const FOLDER: &str = "/etc/guestlet/agent.d";

/// Of a file, after its path, that it is not here.
pub(super) const NOT_HERE: &str = ", which leads into another mount namespace or to a file that was removed";

/// Who calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who<'a> {
    /// A client of QGA.
    Qga,
    /// A host half that has proved nothing.
    Plain {
        /// The guest was given keys of host halves: this is none of those.
        guest_has_keys: bool,
    },
    /// A host half that has proved its key.
    Keyed(&'a Keyed),
}

impl<'a> Who<'a> {
    /// The peer of a connection of the guestlet API.
    pub fn peer(peer: &'a Peer, guest_has_keys: bool) -> Self {
        match peer {
            Peer::Plain => Self::Plain { guest_has_keys },
            Peer::Keyed(keyed) => Self::Keyed(keyed),
        }
    }
}

impl fmt::Display for Who<'_> {
    /// As a grant for it names it, and audit records do: `qga`, `plain`, or the fingerprint of its key.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Qga => formatter.write_str("qga"),
            Self::Plain { .. } => formatter.write_str("plain"),
            Self::Keyed(keyed) => keyed.fingerprint.fmt(formatter),
        }
    }
}

/// What a call is about, as far as grants look at it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail<'a> {
    /// Nothing, or it is not known yet: whether the verb may be called at all.
    None,
    /// A program is run.
    Program {
        /// Its path when every link is followed.
        path: &'a Path,
        /// It is given variables.
        environment: bool,
        /// It starts in a directory that the caller has chosen.
        directory: bool,
        /// The login name of the user that it runs as.
        user: &'a str,
    },
    /// A file is opened.
    File {
        /// Its path when every link is followed; as it was asked for, if it is not here.
        path: &'a Path,
        /// The guest has it at that path. Otherwise no limit of paths lets it be opened, and links of /proc have led into another mount
        /// namespace.
        is_here: bool,
        /// To write to it.
        writes: bool,
    },
    /// A password is set.
    Password,
    /// This is connected to.
    Target(&'a Target),
}

/// A call that is to be decided on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked<'a> {
    /// Who calls.
    pub who: Who<'a>,
    /// For whom, as the host half says; empty if it does not.
    pub caller: &'a str,
    /// The verb.
    pub verb: &'a str,
    /// Its role.
    pub role: Role,
    /// What it is about.
    pub detail: Detail<'a>,
    /// It speaks about the protocol of QGA only, without which nothing else can be asked.
    pub protocol: bool,
}

impl<'a> Asked<'a> {
    /// A call of a verb, about nothing.
    pub fn new(who: Who<'a>, caller: &'a str, verb: &'a str, role: Role) -> Self {
        Self { who, caller, verb, role, detail: Detail::None, protocol: false }
    }
}

/// What is done with a call that no grant gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// It is denied.
    #[default]
    Enforce,
    /// It passes, and is written down.
    Audit,
}

/// Everything that decisions are made from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    /// What is done with what no grant gives.
    pub mode: Mode,
    /// The grants, in the order of the settings.
    pub grants: Vec<Grant>,
    /// What a plain host half may do although the guest has keys.
    pub plain: Roles,
    /// What QGA clients may not do, whatever grants say.
    pub bounds: Bounds,
}

/// What lets a call pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By<'r> {
    /// A grant.
    Grant(&'r Grant),
    /// What holds without a grant, in words.
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

/// Why a call is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why<'a> {
    /// The settings of `[qga]` forbid it.
    Bound(Bound<'a>),
    /// No grant gives it.
    NoGrant {
        /// What was asked.
        asked: Asked<'a>,
        /// There are grants of the role, for other programs or files.
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
                formatter.write_str(": by one with exec.paths neither --env nor --cwd may be given")
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

/// Who calls, and for whom, for people.
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

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision<'a> {
    /// It passes.
    Allowed(By<'a>),
    /// It does not.
    Denied(Why<'a>),
    /// It passes, because nothing is enforced yet.
    WouldDeny(Why<'a>),
}

impl Decision<'_> {
    /// Whether the call may be carried out.
    pub fn passes(&self) -> bool {
        !matches!(self, Self::Denied(_))
    }

    /// The word of audit records.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Allowed(_) => "allowed",
            Self::Denied(_) => "denied",
            Self::WouldDeny(_) => "would-deny",
        }
    }
}

impl Rules {
    /// Whether a call may be carried out, and why. Allocates nothing.
    pub fn decide<'a>(&'a self, asked: &Asked<'a>) -> Decision<'a> {
        if asked.who == Who::Qga { self.decide_command(asked) } else { self.granted(asked) }
    }

    /// The same of a command of QGA, or a verb that does what one does: what the settings of `[qga]` forbid is forbidden to
    /// everybody who asks for it.
    pub fn decide_command<'a>(&'a self, asked: &Asked<'a>) -> Decision<'a> {
        match self.bounds.forbid(asked) {
            Some(bound) => Decision::Denied(Why::Bound(bound)),
            None => self.granted(asked),
        }
    }

    /// The same without what the settings of `[qga]` forbid.
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
        // What a host half without a key is never given by itself, it does not get because somebody tries grants either.
        let unproved = matches!(asked.who, Who::Plain { .. }) && !PLAIN.has(asked.role);
        if self.mode == Mode::Audit && !stranger && !unproved {
            Decision::WouldDeny(why)
        } else {
            Decision::Denied(why)
        }
    }

    /// Whether a grant is for these, so that nothing else gives them anything.
    pub fn has_grant_for(&self, host: &Host) -> bool {
        self.grants.iter().any(|grant| grant.host == *host)
    }

    /// What gives it without a grant, in words.
    fn without_grant(&self, asked: &Asked<'_>) -> Option<&'static str> {
        // Only grants name targets.
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

    /// Whether what guest-exec runs has to be looked at, path by path.
    pub fn looks_at_programs(&self) -> bool {
        let limited = |grant: &Grant| grant.exec.is_some() || grant.users.is_some();
        self.mode == Mode::Audit || self.bounds.limits.exec_paths.is_some() || self.grants.iter().any(limited)
    }
}
